"""Criteo text as strangers bring it: what is read all the same, and what is refused in one line."""

from __future__ import annotations

import gzip
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from datamodules.criteo import CriteoDataModule
from datamodules.criteo_convert import convert
from datamodules.criteo_layout import CATEGORICAL, INTEGERS
from datamodules.errors import DataError
from datamodules.files import list_parquet
from tests.datamodules.reference import criteo_row
from tests.datamodules.test_criteo import lines, rows_of

ROWS = lines(200)
NAMES = "\t".join(["label", *INTEGERS, *CATEGORICAL])


def text(rows: list[str], end: str = "\n") -> bytes:
    return "".join(row + end for row in rows).encode()


def field(row: str, at: int, value: str) -> str:
    fields = row.split("\t")
    fields[at] = value
    return "\t".join(fields)


def with_points(row: str) -> str:
    """As pandas writes a column of integers in which some are missing."""
    fields = row.split("\t")
    return "\t".join([f"{f}.0" if f and i < 14 else f for i, f in enumerate(fields)])


def damaged(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :]


@pytest.mark.parametrize("part_bytes", [12_000, 10**8])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("several.txt.gz", gzip.compress(text(ROWS[:70])) + gzip.compress(text(ROWS[70:]))),
        ("cut-in-a-row.gz", gzip.compress(text(ROWS)[:5001]) + gzip.compress(text(ROWS)[5001:])),
        ("padded.gz", gzip.compress(text(ROWS)) + bytes(512)),
        ("no-gzip.gz", text(ROWS)),
        ("gzip.txt", gzip.compress(text(ROWS))),
        ("mark.txt", b"\xef\xbb\xbf" + text(ROWS)),
        ("mark-and-header.gz", gzip.compress(b"\xef\xbb\xbf" + text([NAMES, *ROWS]))),
        ("header.tsv", text([NAMES, *ROWS])),
        ("header-crlf.tsv", text([NAMES.upper(), *ROWS], "\r\n")),
        ("blank.txt", text(["", *ROWS[:50], "", "", *ROWS[50:], "", ""])),
        ("blank-crlf.txt", text([*ROWS[:50], "", *ROWS[50:], ""], "\r\n")),
        ("pandas.tsv", text([with_points(row) for row in ROWS])),
        ("mit Ümlaut und 数据.txt", text(ROWS)),
    ],
)
def test_what_is_read_all_the_same(tmp_path: Path, name: str, content: bytes, part_bytes: int) -> None:
    (tmp_path / name).write_bytes(content)
    convert([tmp_path / name], tmp_path / "out", processes=1, part_bytes=part_bytes)
    assert rows_of(tmp_path / "out") == [criteo_row(row) for row in ROWS]


def test_blank_lines_are_no_rows_of_a_file_without_labels(tmp_path: Path) -> None:
    rows = lines(20, labelled=False)
    (tmp_path / "test.txt").write_bytes(text([NAMES.removeprefix("label\t"), *rows[:9], "", *rows[9:], ""]))
    convert([tmp_path / "test.txt"], tmp_path / "out")
    assert rows_of(tmp_path / "out") == [criteo_row(row, labelled=False) for row in rows]


def test_the_largest_values_stay_what_they_are(tmp_path: Path) -> None:
    rows = [field(ROWS[0], 1, str(-(2**63))), field(ROWS[1], 1, str(2**63 - 1)), field(ROWS[2], 39, "FFFFFFFF")]
    (tmp_path / "a.txt").write_bytes(text([*rows, with_points(ROWS[3])]))
    convert([tmp_path / "a.txt"], tmp_path / "out")
    assert rows_of(tmp_path / "out") == [criteo_row(row) for row in [*rows, ROWS[3]]]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\n\n", "is empty; expected rows of 40"),
        ("a.gz", b"", "is empty"),
        ("a.gz", gzip.compress(b""), "is empty"),
        ("a.txt", text([NAMES]), "has a header and no rows"),
        ("a.gz", gzip.compress(text(ROWS))[:-300], "cannot be read: Compressed file ended before the end-of-stream"),
        ("a.gz", damaged(gzip.compress(text(ROWS)), -6), "cannot be read: CRC check failed"),
        ("a.gz", damaged(gzip.compress(text(ROWS)), 30), "cannot be read: "),
        ("a.gz", gzip.compress(text(ROWS)) + b"garbage", "cannot be read: Not a gzipped file"),
        ("a.txt", b"PK\x03\x04rest", "is a zip archive: unpack it"),
        ("a.gz", gzip.compress(bytes(257) + b"ustar"), "is a tar archive: unpack it"),
        ("a.txt", b"PAR1rest", "is a Parquet file: let its name end in .parquet"),
        ("a.txt", text(ROWS).decode().encode("utf-16"), r"not UTF-8 .* UTF-16 or binary; convert text with: iconv"),
        ("a.txt", text(ROWS, "\r"), r"ends its lines by carriage returns alone; convert them with: tr"),
        ("a.txt", text([r.replace("\t", " ") for r in ROWS]), "line 1: the row .* has no tab; expected 40 columns"),
        ("a.txt", text([*ROWS[:50], NAMES, *ROWS]), "line 51: label is 'label'; expected 0 or 1"),
        (
            "a.txt",
            text([*ROWS[:50], "", *lines(5, 1, labelled=False)]),
            "line 52: the row has 39 fields, without a label",
        ),
        ("a.txt", text([*lines(5, 1, labelled=False), *ROWS]), "line 1: the row has 39 fields, without a label"),
        ("a.txt", text([field(ROWS[0], 0, "-1")]), "line 1: label is '-1'; expected 0 or 1: replace -1 by 0"),
        ("a.txt", text([field(ROWS[0], 20, '"68fd1e64"')]), "C7 is '\"68fd1e64\"'; expected .* without quotes"),
        ("a.txt", text(['"0"' + r[1:].replace("\t", '\t"') for r in ROWS]), "line 1: label is '\"0\"'"),
        (
            "a.txt",
            text([ROWS[0], field(ROWS[0], 3, str(2**63))]),
            f"line 2: I3 is '{2**63}'; expected an integer of 64",
        ),
        ("a.txt", text([with_points(ROWS[0]), field(ROWS[0], 3, "1.5")]), r"line 2: I3 is '1\.5'"),
        ("a.txt", b"x" * (3 << 20), "line 1: the row has more than 1,048,576 bytes"),
        ("a.txt", text([*ROWS, "", "1" * (12 << 20), *ROWS]), "line 202: the row has more than 1,048,576 bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_refused_leaves_nothing(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{name}.*{message}"):
        convert([path], tmp_path / "out", processes=1)
    assert {p.name for p in tmp_path.iterdir()} <= {name, ".out.lock"}


def test_a_row_without_a_label_does_not_pass_for_one_with_a_label(tmp_path: Path) -> None:
    """Its first integer is 1, and its first category, where the last integer should be, has digits only."""
    short = "\t".join(["1", *["2"] * 12, "25683467", *["68fd1e64"] * 25])
    (tmp_path / "a.txt").write_bytes(text([*ROWS, short]))
    with pytest.raises(DataError, match=r"line 201: the row has 39 fields, without a label, and others have 40"):
        convert([tmp_path / "a.txt"], tmp_path / "out")


@pytest.mark.parametrize("change", [lambda p: p.open("ab").write(text(ROWS)), Path.unlink], ids=["grows", "vanishes"])
def test_a_source_that_changes_meanwhile_is_found_out(tmp_path: Path, change: Callable[[Path], object]) -> None:
    source, out = tmp_path / "a.tsv", tmp_path / "out"
    source.write_bytes(text(ROWS * 150))
    seen: list[BaseException] = []

    def run() -> None:
        try:
            convert([source], out, processes=1, part_bytes=500_000)
        except DataError as error:
            seen.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while not (tmp_path / ".out.partial" / "_plan.json").exists():
        time.sleep(0.001)
    change(source)
    thread.join()
    assert len(seen) == 1
    assert str(source) in str(seen[0])
    assert "changed while it was converted" in str(seen[0]) or "cannot be read" in str(seen[0])
    assert not out.exists()
    assert not (tmp_path / ".out.partial").exists()


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "day_0.gz").write_bytes(gzip.compress(text(ROWS)))
    (tmp_path / "train").symlink_to(tmp_path / "real" / "day_0.gz")
    data = CriteoDataModule(str(tmp_path / "train"), val_fraction=0, test_fraction=0)
    data.prepare_data()
    assert rows_of(tmp_path / "train.parquet") == [criteo_row(row) for row in ROWS]
    (tmp_path / "broken").symlink_to(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"broken' does not exist"):
        CriteoDataModule(str(tmp_path / "broken")).prepare_data()


def test_many_tiny_files_make_one_data_set(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    for i, row in enumerate(ROWS[:60]):
        (tmp_path / "tiny" / f"part_{i}").write_bytes(text([row]))
    data = CriteoDataModule(str(tmp_path / "tiny"), cache_dir=str(tmp_path / "cache"), val_fraction=0, test_fraction=0)
    data.prepare_data()
    data.setup("fit")
    assert sum(batch.batch_size for batch in data.train_dataloader()) == 60
    data.teardown()
    assert rows_of(data._copy_folder(tmp_path / "tiny")) == [criteo_row(row) for row in ROWS[:60]]


def test_a_full_disk_is_named_and_what_is_done_is_used_again(tmp_path: Path, small_disk: Callable[[int], Path]) -> None:
    disk, source = small_disk(2 << 20), tmp_path / "a.tsv"
    rows = lines(25_000)
    source.write_bytes(text(rows))
    with pytest.raises(OSError, match=rf"cannot write {disk}/out: No space left on device; make room, or set data\."):
        convert([source], disk / "out", processes=1, part_bytes=500_000)
    assert not (disk / "out").exists()
    kept = {p.name: p.stat().st_mtime_ns for p in (disk / ".out.partial").glob("part-*.parquet")}
    assert kept
    assert not list((disk / ".out.partial").glob(".*"))

    shutil.copytree(disk / ".out.partial", tmp_path / ".out.partial")  # a larger disk
    convert([source], tmp_path / "out", processes=1, part_bytes=500_000)
    after = {p.name: p.stat().st_mtime_ns for p in list_parquet(tmp_path / "out")}
    assert kept.items() <= after.items()
    assert rows_of(tmp_path / "out") == [criteo_row(row) for row in rows]
