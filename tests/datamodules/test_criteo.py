"""Criteo: the text format with all its defects, the conversion and its drills, the data module."""

from __future__ import annotations

import gzip
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from datamodules.atomic import read_manifest
from datamodules.criteo import CriteoDataModule
from datamodules.criteo_convert import convert
from datamodules.criteo_layout import CATEGORICAL, INTEGERS
from datamodules.errors import DataError
from datamodules.files import ParquetFiles, list_parquet
from tests.datamodules.reference import criteo_row

REPOSITORY = Path(__file__).resolve().parents[2]


def lines(count: int, seed: int = 0, labelled: bool = True, never: tuple[int, ...] = ()) -> list[str]:
    """Made-up rows; the fields ``never`` (from 0, behind the label) are always missing."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        fields = [
            str(draw.randint(*((-2, 9) if i == 1 else (0, 3000)))) if draw.random() < 0.7 else "" for i in range(13)
        ]
        fields += [f"{draw.randrange(2**32):08x}" if draw.random() < 0.8 else "" for _ in range(26)]
        fields = ["" if i in never else f for i, f in enumerate(fields)]
        made.append("\t".join([str(draw.randint(0, 1)), *fields] if labelled else fields))
    return made


def write(path: Path, rows: list[str], end: str = "\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(row + end for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def rows_of(folder: Path) -> list[list[int | None]]:
    """All rows of a Parquet folder, in order."""
    return [list(row.values()) for path in list_parquet(folder) for row in pq.read_table(path).to_pylist()]


def module(path: Path, **options: Any) -> CriteoDataModule:
    made = CriteoDataModule(str(path), cache_dir=str(path.parent / "cache"), **options)
    made.prepare_data()
    made.setup("fit")
    return made


# The text format.


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("name", ["a.tsv", "a.txt", "day_0", "a.tsv.gz", "day_0.gz"])
def test_rows_convert_as_plain_python_reads_them(tmp_path: Path, name: str, end: str) -> None:
    rows = lines(500)
    convert([write(tmp_path / name, rows, end)], tmp_path / "out")
    assert rows_of(tmp_path / "out") == [criteo_row(r) for r in rows]


@pytest.mark.parametrize("part_bytes", [1000, 7777, 10_000_000])
def test_cutting_a_file_into_parts_changes_nothing(tmp_path: Path, part_bytes: int) -> None:
    rows = lines(60)
    manifest = convert([write(tmp_path / "a.tsv", rows)], tmp_path / "out", processes=1, part_bytes=part_bytes)
    assert rows_of(tmp_path / "out") == [criteo_row(r) for r in rows]
    assert manifest["rows"] == 60
    assert manifest["distinct"] == {
        name: len({criteo_row(r)[14 + i] for r in rows}) for i, name in enumerate(CATEGORICAL)
    }


def test_the_last_row_needs_no_line_end(tmp_path: Path) -> None:
    rows = lines(3)
    path = tmp_path / "a.tsv"
    path.write_text("\n".join(rows))
    convert([path], tmp_path / "out")
    assert rows_of(tmp_path / "out") == [criteo_row(r) for r in rows]


def test_trailing_tabs_that_were_stripped_are_missing_values(tmp_path: Path) -> None:
    rows = [r.rstrip("\t") for r in lines(300, never=(36, 37, 38))]
    assert max(r.count("\t") for r in rows) == 36  # no row is whole: the layout shows in the 14th field
    rows.append("1")
    convert([write(tmp_path / "a.tsv", rows)], tmp_path / "out")
    found = rows_of(tmp_path / "out")
    assert found == [criteo_row(r) for r in rows]
    assert found[-1] == [1, *[None] * 13, *[-1] * 26]


def test_missing_is_a_key_of_its_own_and_a_column_may_be_missing_throughout(tmp_path: Path) -> None:
    rows = lines(200, never=(2, 15))
    rows += [rows[0].rsplit("\t", 1)[0] + "\t00000000", rows[0].rsplit("\t", 1)[0] + "\tffffffff"]
    data = module(write(tmp_path / "a.tsv", rows), val_fraction=0, test_fraction=0, shuffle=False, batch_size=1000)
    batch = next(iter(data.train_dataloader()))
    assert set(batch.sparse_features["C3"].values().tolist()) == {-1}
    assert batch.sparse_features["C26"].values().tolist()[-2:] == [0, 2**32 - 1]
    assert set(batch.dense_features[:, 2].tolist()) == {0.0}
    tables = {t.name: t for t in data.spec.tables}
    assert tables["C3"].expected_rows == 1
    assert all(t.num_embeddings is None for t in tables.values())


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda r: r.replace("\t", ","), r"no tab; it has 39 commas"),
        (lambda r: r + "\t", r"41 fields; expected 40"),
        (lambda r: r + "\tx\ty", r"42 fields"),
        (lambda r: "2" + r[1:], r"label is '2'; expected 0 or 1"),
        (lambda r: r[1:], r"label is ''"),
        (lambda r: "\t".join(["1", "4", "x7", *r.split("\t")[3:]]), r"I2 is 'x7'; expected an integer"),
        (lambda r: "\t".join(["1", "1.5", *r.split("\t")[2:]]), r"I1 is '1\.5'; expected an integer"),
        (lambda r: "\t".join([*r.split("\t")[:39], "68fd1e6g"]), r"C26 is '68fd1e6g'; expected 1 to 8 hexadecimal"),
        (lambda r: "\t".join([*r.split("\t")[:39], "068fd1e64"]), r"C26 is '068fd1e64'"),
        (lambda r: "\t".join([*r.split("\t")[:20], "-1", *r.split("\t")[21:]]), r"C7 is '-1'"),
        (lambda r: "\t".join([*r.split("\t")[:20], "\udcff", *r.split("\t")[21:]]), r"C7 is"),
    ],
)
@pytest.mark.parametrize(("at", "part_bytes"), [(0, 10**8), (137, 10**8), (137, 9000)])
def test_a_malformed_row_is_named_by_file_and_line(
    tmp_path: Path, bad: Callable[[str], str], message: str, at: int, part_bytes: int
) -> None:
    rows = lines(200)
    rows[at] = bad(rows[at])
    path = tmp_path / "a.tsv"
    path.write_bytes("".join(r + "\n" for r in rows).encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=rf"a\.tsv, line {at + 1}: .*{message}"):
        convert([path], tmp_path / "out", processes=1, part_bytes=part_bytes)
    assert not (tmp_path / "out").exists()


def test_a_csv_a_header_an_empty_file_and_a_damaged_archive_are_refused(tmp_path: Path) -> None:
    rows = lines(20)
    with pytest.raises(DataError, match=r"a\.tsv, line 1: .*39 commas: convert commas to tabs"):
        convert([write(tmp_path / "a.tsv", [r.replace("\t", ",") for r in rows])], tmp_path / "out")
    names = "\t".join(["click", *(f"f{i}" for i in range(39))])
    with pytest.raises(DataError, match=r"b\.tsv, line 1 is a header of other columns: 'click, f0, .*in this order"):
        convert([write(tmp_path / "b.tsv", [names, *rows])], tmp_path / "out")
    with pytest.raises(DataError, match=r"c\.tsv is empty"):
        convert([write(tmp_path / "c.tsv", [])], tmp_path / "out")
    damaged = write(tmp_path / "d.tsv.gz", lines(30_000))
    damaged.write_bytes(damaged.read_bytes()[:-5000])
    with pytest.raises(DataError, match=r"d\.tsv\.gz cannot be read to its end"):
        convert([damaged], tmp_path / "out")


@pytest.mark.parametrize("strip", [False, True])
def test_a_file_without_labels_can_be_predicted_only(tmp_path: Path, strip: bool) -> None:
    rows = lines(100, labelled=False)
    path = write(tmp_path / "test.txt", [r.rstrip("\t") for r in rows] if strip else rows)
    data = CriteoDataModule(str(path), cache_dir=str(tmp_path / "cache"), batch_size=30)
    data.prepare_data()
    data.setup("predict")
    batches = list(data.predict_dataloader())
    assert [b.batch_size for b in batches] == [30, 30, 30, 10]
    assert all(torch.isnan(b.labels).all() for b in batches)
    keys = [k for b in batches for k in b.sparse_features["C1"].values().tolist()]
    assert keys == [criteo_row(r, labelled=False)[13] for r in rows]
    for stage in ("fit", "test"):
        with pytest.raises(DataError, match=r"39 columns.*predict only"):
            data.setup(stage)


def test_files_with_and_without_labels_do_not_mix(tmp_path: Path) -> None:
    write(tmp_path / "dac" / "train.txt", lines(10))
    write(tmp_path / "dac" / "test.txt", lines(10, labelled=False))
    (tmp_path / "dac" / "readme.txt").write_text("Criteo")
    with pytest.raises(DataError, match=r"test\.txt has 39 columns.*set data\.path to the labelled file"):
        module(tmp_path / "dac")


# The conversion.


def test_a_folder_converts_in_natural_order_and_once(tmp_path: Path) -> None:
    days = {f"day_{i}": lines(50, seed=i) for i in (0, 2, 10)}
    for name, rows in days.items():
        write(tmp_path / "days" / name, rows)
    out = tmp_path / "out"
    sources = [tmp_path / "days" / name for name in days]
    convert(sources, out)
    assert rows_of(out) == [criteo_row(r) for rows in days.values() for r in rows]
    before = {p: p.stat().st_mtime_ns for p in list_parquet(out)}
    convert(sources, out)
    assert {p: p.stat().st_mtime_ns for p in list_parquet(out)} == before
    write(tmp_path / "days" / "day_2", lines(70, seed=5))  # a changed source is converted anew
    assert convert(sources, out)["rows"] == 170
    assert len(rows_of(out)) == 170
    data = module(tmp_path / "days", val_fraction=0, test_fraction=0)
    assert ParquetFiles.open(data._copy_folder(tmp_path / "days")).rows == 170


def test_a_folder_of_someone_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").touch()
    with pytest.raises(DataError, match=r"out exists and was not made by this conversion"):
        convert([write(tmp_path / "a.tsv", lines(5))], tmp_path / "out")
    assert (tmp_path / "out" / "precious").exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    data = CriteoDataModule(str(write(tmp_path / "a.tsv", lines(5))), cache_dir=str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match=r"cannot write .*cache.*data\.cache_dir"):
        data.prepare_data()


def test_distinct_keys_are_counted_closely(tmp_path: Path) -> None:
    rows = lines(20_000)
    manifest = convert([write(tmp_path / "a.tsv", rows)], tmp_path / "out", processes=1, part_bytes=1 << 20)
    for i, name in enumerate(CATEGORICAL):
        exact = len({r.split("\t")[14 + i] for r in rows})
        assert manifest["distinct"][name] == pytest.approx(exact, rel=0.12)


CONVERT = """
import sys
from pathlib import Path
from datamodules.criteo_convert import convert
if __name__ == "__main__":
    convert([Path(sys.argv[1])], Path(sys.argv[2]), processes=2, part_bytes=int(sys.argv[3]))
"""


def start_conversion(tmp_path: Path, source: Path, out: Path, part_bytes: int) -> subprocess.Popen[str]:
    script = tmp_path / "convert.py"
    script.write_text(CONVERT)
    command = [sys.executable, str(script), str(source), str(out), str(part_bytes)]
    return subprocess.Popen(
        command, cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, stderr=subprocess.PIPE, text=True
    )


def descendants(pid: int) -> set[int]:
    children = {int(c) for p in Path(f"/proc/{pid}/task").glob("*/children") for c in p.read_text().split()}
    return children.union(*(descendants(c) for c in children))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("parts_done", [0, 1, 4])
def test_a_killed_conversion_looks_unfinished_and_is_taken_up_again(tmp_path: Path, parts_done: int) -> None:
    rows = lines(25_000)
    source, out, work = write(tmp_path / "a.tsv", rows), tmp_path / "out", tmp_path / ".out.partial"
    process = start_conversion(tmp_path, source, out, 200_000)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        finished = list(work.glob("part-*.parquet"))
        if (work / "_plan.json").exists() and len(finished) >= parts_done:
            break
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.002)
    workers = descendants(process.pid)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    while any(is_running(w) for w in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [w for w in workers if is_running(w)]

    kept = {p: (p.stat().st_ino, p.stat().st_mtime_ns) for p in work.glob("part-*.parquet")}
    assert len(kept) >= parts_done
    assert not out.exists()
    assert read_manifest(out) is None
    with pytest.raises(DataError, match="does not exist"):
        ParquetFiles.open(out)

    convert([source], out, processes=1, part_bytes=200_000)
    assert not work.exists()
    after = {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in list_parquet(out)}
    assert {p.name: after[p.name] for p in kept} == {p.name: state for p, state in kept.items()}
    assert {p.name for p in out.iterdir()} == {*after, "_manifest.json"}
    assert rows_of(out) == [criteo_row(r) for r in rows]


def test_a_conversion_in_processes_shows_its_progress_and_its_errors(tmp_path: Path) -> None:
    rows = lines(2000)
    source = write(tmp_path / "a.tsv", rows)
    process = start_conversion(tmp_path, source, tmp_path / "out", 50_000)
    shown = process.communicate(timeout=60)[1]
    assert process.returncode == 0, shown
    assert "converting a.tsv" in shown
    assert "100%" in shown
    assert rows_of(tmp_path / "out") == [criteo_row(r) for r in rows]

    rows[1500] = rows[1500].replace("\t", ";")
    process = start_conversion(tmp_path, write(source, rows), tmp_path / "out", 50_000)
    shown = process.communicate(timeout=60)[1]
    assert process.returncode != 0
    assert f"{source}, line 1501: " in shown
    assert read_manifest(tmp_path / "out")["rows"] == 2000  # what was there before stays


def test_two_conversions_at_once_make_one_copy(tmp_path: Path) -> None:
    rows = lines(8000)
    source = write(tmp_path / "a.tsv", rows)
    processes = [start_conversion(tmp_path, source, tmp_path / "out", 10**8) for _ in range(2)]
    shown = [p.communicate(timeout=60)[1] for p in processes]
    assert [p.returncode for p in processes] == [0, 0], shown
    assert sum("converting" in s for s in shown) == 1
    assert rows_of(tmp_path / "out") == [criteo_row(r) for r in rows]


# The data module.


def test_integers_enter_as_finite_logarithms(tmp_path: Path) -> None:
    rows = lines(300)
    data = module(write(tmp_path / "a.tsv", rows), val_fraction=0, test_fraction=0, shuffle=False)
    dense = torch.cat([b.dense_features for b in data.train_dataloader()])
    wanted = [[math.log1p(max(v, 0)) if v is not None else 0.0 for v in criteo_row(r)[1:14]] for r in rows]
    assert any(r[2] is not None and r[2] < 0 for r in map(criteo_row, rows))
    torch.testing.assert_close(dense, torch.tensor(wanted))


def test_parquet_of_one_s_own_with_hexadecimal_strings_gives_the_same_batches(tmp_path: Path) -> None:
    import pyarrow as pa

    rows = lines(100)
    text = module(write(tmp_path / "a.tsv", rows), val_fraction=0, test_fraction=0)
    fields = [r.split("\t") for r in rows]
    columns = {"label": [int(f[0]) for f in fields]}
    columns |= {n: pa.array([float(f[1 + i]) if f[1 + i] else None for f in fields]) for i, n in enumerate(INTEGERS)}
    columns |= {n: pa.array([f[14 + i] or None for f in fields]) for i, n in enumerate(CATEGORICAL)}
    (tmp_path / "own").mkdir()
    pq.write_table(pa.table(columns), tmp_path / "own" / "x.parquet")
    own = module(tmp_path / "own", val_fraction=0, test_fraction=0)
    for a, b in zip(text.train_dataloader(), own.train_dataloader(), strict=True):
        assert torch.equal(a.sparse_features.values(), b.sparse_features.values())
        assert torch.equal(a.dense_features, b.dense_features)
        assert torch.equal(a.labels, b.labels)


def test_parquet_with_other_columns_is_refused_by_name(tmp_path: Path) -> None:
    import pyarrow as pa

    pq.write_table(pa.table({"label": [0], "I1": [0]}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"lacks the Criteo columns I2, .*C26.*data=table"):
        module(tmp_path / "x.parquet")


@pytest.mark.parametrize("exists", [False, True])
def test_a_path_with_nothing_at_it_is_named(tmp_path: Path, exists: bool) -> None:
    path = tmp_path / "nowhere"
    if exists:
        path.mkdir()
    data = CriteoDataModule(str(path))
    for call in (data.prepare_data, data.setup):
        with pytest.raises(DataError, match=rf"data\.path='{path}'"):
            call()


def test_the_default_path_with_nothing_at_it_is_replaced_once_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    data = CriteoDataModule(val_fraction=0.1, test_fraction=0.1)
    data.prepare_data()
    shown = capfd.readouterr().err
    assert "There is nothing at data/criteo: training on a generated Criteo-shaped set instead (200,000 rows" in shown
    assert "100%" in shown
    data.setup("fit")
    assert sum(b.batch_size for b in data.train_dataloader()) == pytest.approx(160_000, abs=1500)
    made = {p: p.stat().st_mtime_ns for p in list_parquet(tmp_path / "data")}
    again = CriteoDataModule()
    again.prepare_data()
    again.setup("fit")
    assert {p: p.stat().st_mtime_ns for p in list_parquet(tmp_path / "data")} == made
    shown = capfd.readouterr().err
    assert shown.count("There is nothing at data/criteo") == 1
    assert "%" not in shown
    assert [t.expected_rows for t in data.spec.tables] == [t.expected_rows for t in CriteoDataModule().spec.tables]
    assert all(t.num_embeddings is None for t in data.spec.tables)


@pytest.mark.parametrize("name", ["kaggle_8000", "terabyte_1000", "short_rows_1000"])
def test_the_real_samples(shared_data: Path, tmp_path: Path, name: str) -> None:
    source = shared_data / "criteo" / f"{name}.tsv"
    rows = [criteo_row(line) for line in source.read_text().splitlines()]
    options = {"cache_dir": str(tmp_path), "val_fraction": 0, "test_fraction": 0.1, "split": "order", "shuffle": False}
    data = CriteoDataModule(str(source), **options)
    data.prepare_data()
    data.setup("fit")
    assert not data.has_val
    assert data.val_dataloader() == []
    seen = []
    for loader in (data.train_dataloader(), data.test_dataloader()):
        batches = list(loader)
        seen.append(sum(b.batch_size for b in batches))
        part = rows[: seen[0]] if len(seen) == 1 else rows[seen[0] :]
        labels = torch.cat([b.labels for b in batches]).tolist()
        assert labels == [r[0] for r in part]
        for i, column in enumerate(CATEGORICAL):
            keys = torch.cat([b.sparse_features[column].values() for b in batches]).tolist()
            assert keys == [r[14 + i] for r in part]
        assert all(torch.isfinite(b.dense_features).all() for b in batches)
    assert seen == [len(rows) - len(rows) // 10, len(rows) // 10]
    expected = {t.name: t.expected_rows for t in data.spec.tables}
    for i, column in enumerate(CATEGORICAL):
        assert expected[column] == pytest.approx(len({r[14 + i] for r in rows}), rel=0.12)


def test_a_copy_beside_the_source_is_made_where_no_cache_is_named(tmp_path: Path) -> None:
    source = write(tmp_path / "train.txt", lines(50))
    data = CriteoDataModule(
        str(source), test_path=str(write(tmp_path / "held-out.txt", lines(20, seed=1))), batch_size=7
    )
    data.prepare_data()
    data.setup()
    assert read_manifest(tmp_path / "train.txt.parquet")["rows"] == 50
    assert sum(b.batch_size for b in data.test_dataloader()) == 20
    shutil.rmtree(tmp_path / "train.txt.parquet")
    copy = CriteoDataModule(str(source))
    copy.setup("fit")  # also without prepare_data, as in a loop of one's own
    assert (tmp_path / "train.txt.parquet").is_dir()
