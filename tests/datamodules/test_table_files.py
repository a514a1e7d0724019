"""Tables in other formats than Parquet: what arrives of the same rows, column types by all values, headers, copies."""

from __future__ import annotations

import csv
import gzip
import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datamodules import table_json, table_text
from datamodules.errors import DataError
from datamodules.keys import MISSING_KEY, keys_to_uint64
from datamodules.table import TableDataModule
from tests.datamodules.modules import column, labels
from tests.datamodules.reference import fnv1a

CITIES = ["Rome", "Köln, Rhein", 'a "b"', "two\nlines", None]
ROWS = [{"label": i % 3 == 0, "user": i * 7 % 50, "city": CITIES[i % len(CITIES)], "x": i / 4} for i in range(300)]


def module(path: Path, **options: Any) -> TableDataModule:
    options = {"val_fraction": 0.0, "test_fraction": 0.0, "shuffle": False, "batch_size": 64, **options}
    made = TableDataModule(str(path), **options)
    made.prepare_data()
    made.setup("fit")
    return made


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def dense(data: TableDataModule) -> list[list[float]]:
    return [row for batch in data.train_dataloader() for row in batch.dense_features.tolist()]


def copy_of(path: Path) -> pa.Table:
    """All rows of the converted copy, in order."""
    files = sorted(path.with_name(f"{path.name}.parquet").rglob("*.parquet"))
    return pa.concat_tables(pq.ParquetFile(file).read() for file in files)


def types_in(path: Path) -> dict[str, str]:
    return {field.name: str(field.type) for field in copy_of(path).schema}


def as_text(separator: str, quoting: int = csv.QUOTE_MINIMAL) -> bytes:
    file = io.StringIO()
    writer = csv.writer(file, delimiter=separator, quoting=quoting)
    writer.writerow(ROWS[0])
    writer.writerows(["" if v is None else int(v) if isinstance(v, bool) else v for v in row.values()] for row in ROWS)
    return file.getvalue().encode()


def as_arrow(new: Callable[[Any, pa.Schema], Any]) -> bytes:
    table = pa.Table.from_pylist(ROWS)
    sink = pa.BufferOutputStream()
    with new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=70)
    return sink.getvalue().to_pybytes()


def as_zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


def as_parquet() -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(ROWS), sink)
    return sink.getvalue().to_pybytes()


LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
FILES = {
    "a.csv": as_text(","),
    "quoted.csv": as_text(",", csv.QUOTE_ALL),
    "semicolon.csv": as_text(";"),
    "a.tsv": as_text("\t"),
    "bar.txt": as_text("|"),
    "bom.csv": b"\xef\xbb\xbf" + as_text(","),
    "a.csv.gz": gzip.compress(as_text(",")),
    "two-members.csv.gz": gzip.compress(as_text(",")[:999]) + gzip.compress(as_text(",")[999:]),
    "a.tsv.zst": as_zstd(as_text("\t")),
    "packed-without-saying.csv": gzip.compress(as_text(",")),
    "a.jsonl": LINES,
    "a.json.gz": gzip.compress(LINES),
    "a.ndjson": LINES.rstrip(b"\n"),
    "a.arrow": as_arrow(pa.ipc.new_file),
    "a.feather": as_arrow(pa.ipc.new_file),
    "stream.ipc": as_arrow(pa.ipc.new_stream),
    "a.parquet": as_parquet(),
    "parquet-without-suffix": as_parquet(),
}


@pytest.mark.parametrize("name", FILES)
def test_the_same_rows_arrive_from_every_format(name: str, tmp_path: Path) -> None:
    data = module(write(tmp_path / name, FILES[name]))
    assert data.spec.dense == ("x",)
    assert data.spec.sparse_names == ["user", "city"]
    assert labels(data) == [float(row["label"]) for row in ROWS]
    assert column(data, "user") == [row["user"] for row in ROWS]
    cities = [row["city"] for row in ROWS]
    assert column(data, "city") == [MISSING_KEY if c is None else fnv1a(str(c).encode()) for c in cities]
    assert dense(data) == [[row["x"]] for row in ROWS]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a few kilobytes have many blocks."""
    monkeypatch.setattr(table_text, "_BLOCK_BYTES", 1 << 10)
    monkeypatch.setattr(table_json, "_BLOCK_BYTES", 1 << 10)


LAST = {  # values of the last of 2,000 rows, after "5" in all others: the column's type, and its first value
    "1.5": ("double", 5.0),
    "-1": ("int64", 5),
    str(2**63 - 1): ("int64", 5),
    str(2**64 - 1): ("uint64", 5),
    str(2**64): ("string", "5"),
    "007": ("string", "5"),
    "x": ("string", "5"),
    "1e3": ("double", 5.0),
}


@pytest.mark.parametrize("last", LAST)
def test_a_type_is_found_over_all_of_a_text_file(last: str, tmp_path: Path, small_blocks: None) -> None:
    path = write(tmp_path / "a.csv", "label,c\n" + "1,5\n" * 1999 + f"0,{last}\n")
    module(path)
    found = copy_of(path)["c"]
    assert (str(found.type), found[0].as_py()) == LAST[last]
    assert str(found[1999].as_py()) == ("1000.0" if last == "1e3" else last)
    assert len(found) == 2000


LAST_OF_JSON = [(1.5, "double"), (2**64 - 1, "uint64"), ("x", "string"), ({"a": 1}, None)]


@pytest.mark.parametrize(("last", "dtype"), LAST_OF_JSON)
def test_a_type_is_found_over_all_of_json(last: Any, dtype: str | None, tmp_path: Path, small_blocks: None) -> None:
    rows = [{"label": 1, "c": 5}] * 999 + [{"label": 0, "c": last, "late": [1, 2]}]
    path = write(tmp_path / "a.jsonl", "\n\n".join(json.dumps(row) for row in rows))
    data = module(path)
    assert types_in(path).get("c") == dtype
    assert data.spec.sparse_names == (["c", "late"] if dtype in ("uint64", "string") else ["late"])
    assert column(data, "late") == [MISSING_KEY] * 999 + [1, 2]
    if dtype == "uint64":
        assert keys_to_uint64(column(data, "c")).tolist() == [5] * 999 + [last]
    if dtype == "string":
        assert copy_of(path)["c"].to_pylist() == ["5"] * 999 + ["x"]


def test_missing_values_of_numbers_and_of_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'label,n,x,s,none\n1,NA,nan,NA,\n0,4,\\N,,\n1,,0.5,b,NULL\n0,1,1,"",NA\n')
    data = module(path)
    assert copy_of(path).to_pydict() == {
        "label": [1, 0, 1, 0],
        "n": [None, 4, None, 1],
        "x": [None, None, 0.5, 1.0],
        "s": ["NA", None, "b", None],
        "none": [None] * 4,
    }
    assert column(data, "n") == [MISSING_KEY, 4, MISSING_KEY, 1]


def test_the_files_of_a_folder_have_one_type_and_so_have_its_partitions(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    write(folder / "day=3" / "a.csv", "label,id,x\n1,5,1\n")
    write(folder / "day=4" / "b.csv.gz", gzip.compress(b"x,id,label\n0.5,A7,0\n"))
    write(folder / "README.md", "label,id\n")
    write(folder / "_SUCCESS.csv", "")
    data = module(folder)
    assert column(data, "id") == [fnv1a(b"5"), fnv1a(b"A7")]
    assert column(data, "day") == [3, 4]
    assert dense(data) == [[1.0], [0.5]]
    write(tmp_path / "rows" / "copy.csv", "label,id,x\n1,6,1\n")
    module(folder / "copy.csv")  # its copy lies in the folder now, and is none of its files
    assert column(module(folder), "id") == [fnv1a(b"6"), fnv1a(b"5"), fnv1a(b"A7")]


def test_parquet_files_win_over_files_beside_them(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "rows" / "a.parquet", as_parquet())
    write(tmp_path / "rows" / "columns.json", "{}")
    assert column(module(tmp_path / "rows"), "user") == [row["user"] for row in ROWS]
    assert "holds Parquet files; what lies beside them is left out: columns.json\n" in capfd.readouterr().err


def test_validation_rows_have_the_types_of_the_training_rows(tmp_path: Path) -> None:
    train = write(tmp_path / "train.csv", "label,zip,x\n1,007,0.5\n")
    test = write(tmp_path / "test.csv", "label,zip,x\n0,123,2\n")
    data = module(train, test_path=str(test))
    (batch,) = data.test_dataloader()
    assert batch.sparse_features["zip"].values().tolist() == [fnv1a(b"123")]
    assert batch.dense_features.tolist() == [[2.0]]


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_types_that_the_user_gives(name: str, tmp_path: Path) -> None:
    rows = [{"label": 1, "code": 7, "price": 2, "t": "x"}, {"label": 0, "code": 8, "price": 3, "t": "y"}]
    if name == "a.csv":
        path = write(tmp_path / name, "label,code,price,t\n1,7,2,x\n0,8,3,y\n")
    else:
        path = write(tmp_path / name, "\n".join(map(json.dumps, rows)))
    data = module(path, types={"code": "string", "price": "float", "label": "integer"})
    assert types_in(path) == {"label": "int64", "code": "string", "price": "double", "t": "string"}
    assert column(data, "code") == [fnv1a(b"7"), fnv1a(b"8")]
    where = r"a\.csv, line 2: column 't' holds 'x'; expected" if name == "a.csv" else "holds text values; .* says"
    with pytest.raises(DataError, match=f"{where} integer.* set data.types={{t: string}}"):
        module(path, types={"t": "integer"})
    with pytest.raises(DataError, match=r"data\.types names cod; .*a\.(csv|jsonl) has: label, code, price, t$"):
        module(path, types={"cod": "string"})


def test_headers_of_recbole(tmp_path: Path) -> None:
    text = (
        "user:token\tprice:float\ttags:token_seq\tids:token_seq\tvec:float_seq\tcode:token\tlabel:float\n"
        "7\t3\trock pop\t1 2\t0.5 1\t1.0\t1.0\n"
        "8\t\t\t3\t2\t1.50\t0\n"
    )
    path = write(tmp_path / "set.inter", text)
    data = module(path)
    assert data.spec.dense == ("price",)
    assert data.spec.sparse_names == ["user", "tags", "ids", "code"]
    assert column(data, "user") == [7, 8]
    assert column(data, "tags") == [fnv1a(b"rock"), fnv1a(b"pop"), MISSING_KEY]
    assert column(data, "ids") == [1, 2, 3]
    assert column(data, "code") == [fnv1a(b"1.0"), fnv1a(b"1.50")]
    assert copy_of(path)["vec"].to_pylist() == [[0.5, 1.0], [2.0]]
    np.testing.assert_array_equal(dense(data), [[3.0], [np.nan]])
    assert labels(data) == [1.0, 0.0]


def test_names_for_files_without_a_header(tmp_path: Path) -> None:
    names = ["user", "label"]
    bare = write(tmp_path / "bare.tsv", "5\t1\n6\t0\n")
    named = write(tmp_path / "named.tsv", "user\tlabel\n5\t1\n6\t0\n")
    colons = write(tmp_path / "colons.dat", "5::1\n6::0\n")
    for path in (bare, named, colons):
        assert column(module(path, columns=names), "user") == [5, 6]


def test_a_separator_of_several_characters_across_reads(tmp_path: Path) -> None:
    rows = [(i, f"a:{i % 7}", i % 2) for i in range(150_000)]  # more than the mebibyte of a read
    path = write(tmp_path / "a.dat", "\n".join("::".join(map(str, row)) for row in rows))
    module(path, columns=["n", "s", "label"], separator="::")
    columns = [column.to_pylist() for column in copy_of(path).columns]
    assert list(zip(*columns, strict=True)) == rows


def test_the_index_that_pandas_writes_is_left_out(tmp_path: Path) -> None:
    assert module(write(tmp_path / "a.csv", ",user,label\n0,x,1\n1,y,0\n")).spec.sparse_names == ["user"]


def test_text_that_is_not_utf_8_is_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", b"label,s\n1,caf\xe9\n0,b\n")
    assert column(module(path), "s") == [fnv1a(b"caf\xe9"), fnv1a(b"b")]


def test_a_rating_becomes_a_label(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "user,rating\n1,3.5\n2,4.0\n3,5\n4,\n")
    assert labels(module(path, label="rating", label_threshold=4, null_label=0)) == [0, 1, 1, 0]
    with pytest.raises(DataError, match=r"label column 'rating' holds None; expected a number in every row\. Where a"):
        labels(module(path, label="rating", label_threshold=4))
    with pytest.raises(DataError, match=r"holds 3\.5; .* or set data\.label_threshold to the least value that"):
        labels(module(path, label="rating"))
    with pytest.raises(DataError, match="exclude each other"):
        module(path, label_threshold=4, negative_label=-1)


ERRORS: dict[str, tuple[bytes | str, str]] = {
    "short.csv": ('label,a\n1,"x\ny"\n\n0\n', r"csv, line 5: the row '0' has 1 fields; expected 2, separated by ','"),
    "long.tsv": ("label\ta\n1\t2\t3\n", r"long\.tsv, line 2: the row '1\\t2\\t3' has 3 fields; expected 2"),
    "long.dat": ("label::a\n1::2\n1::2::3\n", r"long\.dat, line 3: the row .* has 3 fields"),
    "quote.tsv": ('label\ta\n1\tx\n1\t"y\n0\tz\n', r"line 3: the quote before 'y\\n0\\tz\\n' is never closed"),
    "quotes.tsv": ('label\ta\tb\n1\t"y\t2\n0\tz\t3\n', r"quotes\.tsv, line 2: the row .* has 2 fields; expected 3"),
    "float.inter": ("label:float\ta:float\n1\t2\n0\tno\n", r"inter, line 3: column 'a' holds 'no'; expected float\."),
    "seq.inter": ("label:float\ta:float_seq\n1\t2 3\n0\t4 no\n", "column 'a' holds '4 no'; expected float_seq"),
    "bare.csv": ("1,2,a\n0,3,b\n", r"line 1 is no header: '1,2,a'\. Name its 3 columns, .*: data\.columns="),
    "twice.csv": ("label,a,a\n1,2,3\n", r"line 1 has the name 'a' twice; every column needs a name of its own"),
    "nameless.csv": ("label,,a\n1,2,3\n", "line 1 has a column without a name"),
    "one.txt": ("label\n1\n", r"line 1 has no separator .*: 'label'\. Set data\.separator"),
    "empty.csv": ("", r"empty\.csv is empty; expected a header and rows"),
    "empty.jsonl": ("\n", r"empty\.jsonl is empty; expected JSON objects"),
    "header.csv": ("label,a\n", r"the train split is empty: .* has 0 rows"),
    "cut.jsonl": ('{"label": 1}\n\n{"label":\n', r"line 3 is no JSON \(.*\): '\{\"label\":'; expected an object"),
    "array.json": ('[{"label": 1}]\n', r"line 1 is no JSON object: .* A single array becomes lines by: jq"),
    "lists.jsonl": ('{"label": 1, "a": [1]}\n{"label": 1, "a": 1}\n', "column 'a' holds lists in some rows and single"),
    "cut.csv.gz": (gzip.compress(as_text(","))[:-99], "cannot be read to its end: .*download it again"),
    "wide.csv": ("label,a\n1,2\n".encode("utf-16"), r"is UTF-16; convert it with: iconv"),
    "book.xlsx": (b"PK\x03\x04" + bytes(99), r"is a zip archive or a workbook; unpack it, or save the sheet as CSV"),
    "binary.csv": (b"label,a\n1,\0\n", r"binary\.csv is no table: it is not text"),
    "latin1.inter": (b"label:float\ta:token_seq\n1\tcaf\xe9\n", r"latin1\.inter cannot become Parquet: .*UTF8"),
    "cut.arrow": (FILES["a.arrow"][:-9], r"cut\.arrow cannot be read as Arrow IPC: .*Write it again"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_a_file_that_is_no_table_is_one_line(name: str, tmp_path: Path) -> None:
    content, message = ERRORS[name]
    path = write(tmp_path / name, content)
    with pytest.raises(DataError, match=message) as caught:
        module(path)
    assert "\n" not in str(caught.value)
    assert name == "header.csv" or not path.with_name(f"{name}.parquet").exists()


def test_a_folder_of_several_formats_or_of_no_table_is_one_line(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", "label,a\n1,2\n")
    write(tmp_path / "meta.json", "{}")
    with pytest.raises(DataError, match=r"several formats \(a\.csv: text, meta\.json: json\); set the path to one"):
        module(tmp_path)
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match=r"none holds no table \(\*\.parquet, \*\.csv, \*\.tsv"):
        module(tmp_path / "none")
    with pytest.raises(DataError, match=r"data\.path='.*absent' does not exist; give a file"):
        module(tmp_path / "absent")


def test_columns_and_separators_that_do_not_fit(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "1\t2\t0\n")
    with pytest.raises(DataError, match=r"line 1 has 3 fields, separated by '\\t'; data\.columns names 2\. Name all"):
        module(path, columns=["a", "label"])
    with pytest.raises(DataError, match=r"data\.separator=''; expected one or more characters"):
        module(path, separator="")


def test_a_copy_is_made_once_and_anew_when_its_source_changes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "label,id\n1,5\n")
    cache = tmp_path / "cache"
    module(path, cache_dir=str(cache))
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".parquet")] == []
    (copy,) = cache.glob("a.csv-*/*.parquet")
    made = copy.stat().st_ino
    assert column(module(path, cache_dir=str(cache), label="label"), "id") == [5]
    assert copy.stat().st_ino == made
    write(path, "label,id\n1,5\n0,6\n")
    assert column(module(path, cache_dir=str(cache)), "id") == [5, 6]


def test_a_killed_conversion_leaves_no_copy_and_the_next_one_makes_it(tmp_path: Path) -> None:
    numbers = np.arange(2_000_000)
    path = write(tmp_path / "a.csv", "label,id\n" + "".join(f"1,{n}\n" for n in numbers.tolist()))
    program = (
        "import sys; from pathlib import Path; from datamodules.table_convert import TableOptions, convert_table; "
        "p = Path(sys.argv[1]); convert_table(p, [p], p.with_name('a.csv.parquet'), TableOptions())"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(path)], stderr=subprocess.DEVNULL)
    work = tmp_path / ".a.csv.parquet.partial"
    while not work.exists() and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not path.with_name("a.csv.parquet").exists()
    assert work.exists()
    module(path)
    assert np.array_equal(copy_of(path)["id"].to_numpy(), numbers)
    assert not work.exists()
