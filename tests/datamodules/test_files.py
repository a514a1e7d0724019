"""Files as folders hold them: empty ones, absent columns, pandas' index, codecs, links, names, no Parquet."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datamodules.errors import DataError
from datamodules.files import ParquetFiles, list_parquet
from datamodules.keys import MISSING_KEY
from datamodules.parquet import ParquetDataModule
from tests.datamodules.modules import Write, column, module

ROW = {"label": [0], "x": [1]}


def test_files_and_row_groups_without_rows(tmp_path: Path) -> None:
    """No row group; row groups with and without rows in turn; an ordinary file."""
    schema = pa.schema({"label": pa.int64(), "x": pa.int64()})
    for name, groups in (("a", []), ("b", [[1], [], [2, 3], [], []]), ("c", [[4]])):
        with pq.ParquetWriter(tmp_path / f"{name}.parquet", schema) as writer:
            for ids in groups:
                writer.write_table(pa.table({"label": [0] * len(ids), "x": ids}, schema=schema))
    assert ParquetFiles.open(tmp_path).group_rows == [(), (1, 0, 2, 0, 0), (1,)]
    assert column(module(tmp_path), "x") == [1, 2, 3, 4]
    with pytest.raises(DataError, match=r"the train split is empty: data\.path=.*a\.parquet' has 0 rows"):
        module(tmp_path / "a.parquet")


@pytest.mark.parametrize("content", [b"", b"P", b"label,x\n0,1\n", b"PAR1" + bytes(100) + b"PAR1"])
def test_what_is_no_parquet_is_named(write: Write, content: bytes) -> None:
    path = write(a=ROW)
    (path / "b.parquet").write_bytes(content)
    with pytest.raises(DataError, match=r"b\.parquet cannot be read as Parquet: .*Write it again, or leave it out$"):
        module(path)


@pytest.mark.parametrize("codec", ["none", "snappy", "gzip", "brotli", "zstd", "lz4"])
def test_every_codec(tmp_path: Path, codec: str) -> None:
    pq.write_table(pa.table({"label": [0] * 500, "x": range(500)}), tmp_path / "a.parquet", compression=codec)
    assert column(module(tmp_path), "x") == list(range(500))


def test_absent_columns_are_missing_and_said(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    """Twenty files, of which one lacks x and d, and two lack y; the test file lacks d, which an option names."""
    whole = {"label": [0], "x": [7], "y": [8], "d": [0.5]}
    files: dict[str, Any] = {f"f{i:02}": dict(whole) for i in range(20)}
    for file, name in (("f03", "x"), ("f03", "d"), ("f05", "y"), ("f19", "y")):
        del files[file][name]
    path = write(**files)
    test = path.parent / "test.parquet"
    pq.write_table(pa.table({"label": [0], "x": [7], "y": [8]}), test)
    data = module(path, dense=["d"], sparse=["x", "y"], test_path=str(test))
    lines = capsys.readouterr().err.splitlines()
    data.setup("test")
    assert capsys.readouterr().err == ""  # once
    assert lines == [
        f"d, x: no such column in 1 of 20 files of data.path ({path}/f03.parquet); the values count as missing there",
        f"y: no such column in 2 of 20 files of data.path ({path}/f05.parquet, ...); the values count as missing there",
        f"d: no such column in 1 of 1 files of data.test_path ({test}); the values count as missing there",
    ]
    assert column(data, "x") == [7] * 3 + [MISSING_KEY] + [7] * 16
    assert [b.dense_features.tolist() for b in data.test_dataloader()] == [[[0.0]]]
    predicted = ParquetDataModule(str(test), dense=["d"], sparse=["x"])
    with pytest.raises(DataError, match=r"data\.dense names d; .*test\.parquet' has: label, x, y"):
        predicted.setup("predict")


@pytest.mark.parametrize("index", ["__index_level_0__", "user"])
def test_the_index_of_a_pandas_table_is_left_out_unless_named(
    write: Write, capsys: pytest.CaptureFixture[str], index: str
) -> None:
    """Index columns as pandas describes them; a numbered index is a description only."""
    described = {"index_columns": [index, {"kind": "range", "start": 0, "stop": 2, "step": 1}], "columns": []}
    table = pa.table({"label": [0, 1], "x": [1, 3], index: [10, 12]})
    path = write(a=table.replace_schema_metadata({"pandas": json.dumps(described)}))
    assert module(path).spec.sparse_names == ["x"]
    assert f"pandas' index is left out: {index}. To use it, name it" in capsys.readouterr().err
    assert column(module(path, sparse=["x", index]), index) == [10, 12]
    assert module(path, dense=[index]).spec.dense == (index,)
    assert capsys.readouterr().err == ""


def test_an_index_is_known_by_pandas_name_for_it(write: Write) -> None:
    """Other programs drop the description and keep the column."""
    assert module(write(a={**ROW, "__index_level_1__": [3]})).spec.sparse_names == ["x"]


def test_names_with_spaces_and_letters_of_other_scripts(write: Write) -> None:
    path = write(**{"mit Leerzeichen/Straße=São Paulo/数据 1": ROW, "b": {**ROW, "Straße": ["x"]}})
    data = module(path)
    assert data.spec.sparse_names == ["x", "Straße"]
    assert column(data, "x") == [1, 1]
    assert len(set(column(data, "Straße"))) == 2


def test_links_are_followed(write: Write, tmp_path: Path) -> None:
    real = write(a={**ROW, "x": [1]}, b={**ROW, "x": [2]})
    folder = tmp_path / "links"
    folder.mkdir()
    (folder / "file.parquet").symlink_to(real / "a.parquet")
    (folder / "k=9").symlink_to(real)
    (folder / "loop").symlink_to(folder)
    data = module(folder)
    assert column(data, "x") == [1, 1, 2]
    assert column(data, "k") == [MISSING_KEY, 9, 9]
    (tmp_path / "root").symlink_to(folder)
    assert column(module(tmp_path / "root"), "x") == [1, 1, 2]


@pytest.mark.parametrize("target", ["/nowhere.parquet", "b.parquet"])
def test_links_that_lead_nowhere_are_named(write: Write, target: str) -> None:
    path = write(a=ROW)
    (path / "b.parquet").symlink_to(target)
    for wrong in (path, path / "b.parquet"):
        with pytest.raises(DataError, match=rf"b\.parquet'? is a link that leads nowhere \({target}\)"):
            module(wrong)


def test_a_folder_may_be_named_like_a_file(write: Write) -> None:
    """As Spark and Dask name what they write; and in capital letters."""
    path = write(**{"rows.parquet/part-0": {**ROW, "x": [1]}, "rows.parquet/part-1": {**ROW, "x": [2]}})
    (path / "rows.parquet" / "part-1.parquet").rename(path / "rows.parquet" / "PART-1.PARQUET")
    assert sorted(column(module(path), "x")) == sorted(column(module(path / "rows.parquet"), "x")) == [1, 2]
    (path / "none.parquet").mkdir()
    with pytest.raises(DataError, match=r"none\.parquet' holds no Parquet file \(\*\.parquet, \*\.pq\); give"):
        module(path / "none.parquet")


@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_may_not_be_read_is_named(what: str) -> None:
    """Root may read everything, so it becomes nobody; in a folder that nobody can enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "inner").mkdir()
        pq.write_table(pa.table(ROW), folder / "inner" / "a.parquet")
        folder.chmod(0o755)
        forbidden = folder / "inner" if what == "folder" else folder / "inner" / "a.parquet"
        forbidden.chmod(0)
        mine = os.geteuid()
        try:
            if mine == 0:
                os.seteuid(65534)
            with pytest.raises(DataError, match=rf"{forbidden} cannot be read.*Permission denied"):
                module(folder)
        finally:
            os.seteuid(mine)
            forbidden.chmod(0o755)


def test_thousands_of_files_keep_few_of_them_open(tmp_path: Path) -> None:
    table = pa.table({"label": [0, 1], "x": [1, 2]})
    for i in range(1500):
        pq.write_table(table, tmp_path / f"{i}.parquet")
    data = module(tmp_path, batch_size=100)
    before = len(os.listdir("/proc/self/fd"))
    opened, rows = 0, 0
    for batch in data.train_dataloader():
        opened = max(opened, len(os.listdir("/proc/self/fd")) - before)
        rows += batch.batch_size
    assert rows == 3000
    assert opened <= 40
    assert [p.stem for p in list_parquet(tmp_path)[:12]] == [str(i) for i in range(12)]
