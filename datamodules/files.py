"""Parquet files as one table: listing, footers, the union of their schemas, Hive partitions."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from datamodules.columns import Kind, kind_of
from datamodules.errors import DataError

__all__ = [
    "Column",
    "ParquetFiles",
    "list_files",
    "list_parquet",
    "natural_key",
    "open_parquet",
    "read_column",
    "stamp",
    "widen",
]

_BUFFER_BYTES = 1 << 18  # per column of an open row group; without it a whole column chunk is loaded at once
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"


def natural_key(path: Path) -> list[tuple[int, int, str]]:
    """Sorts ``day_2`` before ``day_10``."""
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in re.split(r"(\d+)", str(path)) if p]


def list_parquet(path: Path) -> list[Path]:
    """The Parquet files at ``path``: itself, or all below it as in :func:`list_files`."""
    return [path] if path.is_file() else list_files(path, (".parquet", ".pq"))


def list_files(folder: Path, suffixes: tuple[str, ...], packed: tuple[str, ...] = ()) -> list[Path]:
    """The files below ``folder`` with one of the suffixes, in natural order. Links are followed.

    Names that begin with ``_`` or ``.`` are not data. One of the suffixes ``packed`` may come on top.

    Raises:
        DataError: a folder cannot be read, or a link leads nowhere.
    """
    found = []
    seen = {os.path.realpath(folder)}  # a link to a folder above would lead in circles
    for path, folders, names in os.walk(folder, onerror=_cannot_list, followlinks=True):
        folders[:] = [n for n in sorted(folders) if _is_data(n) and _is_new(os.path.join(path, n), seen)]
        for file in (Path(path, name) for name in names if _is_data(name)):
            unpacked = file.with_suffix("") if file.suffix.lower() in packed else file
            if unpacked.suffix.lower() not in suffixes:
                continue
            if file.is_symlink() and not file.exists():
                raise DataError(f"{file} is a link that leads nowhere ({os.readlink(file)}); mend or remove it")
            if file.is_file():
                found.append(file)
    return sorted(found, key=natural_key)


def _cannot_list(error: OSError) -> None:
    raise DataError(f"the folder {error.filename} cannot be read: {error.strerror}") from error


def _is_data(name: str) -> bool:
    return not name.startswith(("_", "."))


def _is_new(folder: str, seen: set[str]) -> bool:
    real = os.path.realpath(folder)
    known = real in seen
    seen.add(real)
    return not known


@dataclass
class Column:
    """A column of the union.

    Attributes:
        kind: what it can be used as.
        dtype: its type in ``file``, the first that has values of it.
        smallest, largest: of its integers, where the footers tell.
        float_in: the first file in which it is a float or a list of floats.
        is_index: whether it is the index of a pandas table.
    """

    name: str
    kind: Kind
    dtype: str
    file: str
    smallest: int | None = None
    largest: int | None = None
    float_in: str | None = None
    is_index: bool = False


@dataclass
class ParquetFiles:
    """Files and what their footers say.

    Attributes:
        paths: in the order that defines the rows' global positions.
        stamps: size in bytes and time of the last change of every file, when its footer was read.
        group_rows: rows of every row group, per file.
        names: the columns that each file holds itself.
        partitions: per file, the columns that its folders' names give (``source_id=9319/``): int, str or None. A column
            that a file holds itself wins over its folder's.
        columns: the union of all files' columns, in order of first appearance.
    """

    paths: list[str]
    stamps: list[tuple[int, int]]
    group_rows: list[tuple[int, ...]]
    names: list[frozenset[str]]
    partitions: list[dict[str, int | str | None]]
    columns: dict[str, Column] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return sum(sum(groups) for groups in self.group_rows)

    @classmethod
    def open(cls, path: str | Path, what: str = "data.path") -> ParquetFiles:
        """Reads the footers of all files at ``path``.

        Raises:
            DataError: nothing is there, a file is not Parquet, or two files disagree about a column.
        """
        root = Path(path)
        if not root.exists():
            if root.is_symlink():
                raise DataError(f"{what}={str(root)!r} is a link that leads nowhere ({os.readlink(root)})")
            raise DataError(f"{what}={str(root)!r} does not exist; give a file or a folder of them")
        paths = list_parquet(root)
        if not paths:
            raise DataError(
                f"{what}={str(root)!r} holds no Parquet file (*.parquet, *.pq); give the "
                f"files such names, or name a single file"
            )
        files = cls([str(p) for p in paths], [], [], [], [])
        raw_partitions = [_partition_values(p.relative_to(root).parts[:-1] if root.is_dir() else ()) for p in paths]
        for file in paths:
            try:
                files.stamps.append(stamp(file))
                metadata = pq.read_metadata(file)
            except (pa.ArrowException, OSError) as error:
                why = str(error).strip().rstrip(".")
                raise DataError(f"{file} cannot be read as Parquet: {why}. Write it again, or leave it out") from error
            schema = metadata.schema.to_arrow_schema()
            files.group_rows.append(tuple(metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)))
            files.names.append(frozenset(schema.names))
            for column in schema:
                files._unite(column.name, column.type, str(file))
            for name in _pandas_index(schema):
                files.columns[name].is_index = True
            files._spans(metadata)
        files._add_partitions(raw_partitions)
        return files

    def _unite(self, name: str, dtype: pa.DataType, file: str) -> None:
        kind = kind_of(dtype)
        known = self.columns.setdefault(name, Column(name, kind, str(dtype), file))
        both = widen(known.kind, kind)
        if both is None:
            raise DataError(
                f"column {name!r} is {dtype} in {file} and {known.dtype} in {known.file}; these have no common type. "
                f"Write the files with one type, or read them apart"
            )
        if known.kind == "null":
            known.dtype, known.file = str(dtype), file
        known.kind = both
        if "float" in kind and known.float_in is None:
            known.float_in = file

    def _spans(self, metadata: pq.FileMetaData) -> None:
        """Widens the integer columns' spans by the row groups' statistics."""
        if not metadata.num_row_groups:
            return
        group = metadata.row_group(0)
        at = {group.column(i).path_in_schema: i for i in range(group.num_columns)}
        for name, index in at.items():
            column = self.columns.get(name)
            if column is None or column.kind != "integer":
                continue
            for g in range(metadata.num_row_groups):
                statistics = metadata.row_group(g).column(index).statistics
                if statistics is None or not statistics.has_min_max:
                    continue
                low, high = int(statistics.min), int(statistics.max)
                column.smallest = low if column.smallest is None else min(low, column.smallest)
                column.largest = high if column.largest is None else max(high, column.largest)

    def _add_partitions(self, raw: list[dict[str, str | None]]) -> None:
        """Types the partition columns: integers if all values are and no file says otherwise, else strings."""
        names = dict.fromkeys(name for values in raw for name in values)
        as_integer = {}
        for name in names:
            texts = [values[name] for values in raw if values.get(name) is not None]
            in_files = self.columns[name].kind if name in self.columns else "null"
            integers = all(re.fullmatch(r"-?\d{1,18}", text or "") for text in texts)
            as_integer[name] = integers and in_files in ("null", "integer", "float")
            self.columns.setdefault(name, Column(name, "null", "a folder's name", self.paths[0]))
            if in_files == "null":
                self.columns[name].kind = "integer" if as_integer[name] else "string"
        for file, values in enumerate(raw):
            self.partitions.append(
                {
                    name: int(text) if text is not None and as_integer[name] else text
                    for name, text in values.items()
                    if name not in self.names[file]
                }
            )

    def holders(self, name: str) -> Iterable[str]:
        """The files that have the column, themselves or by their folder's name."""
        return (
            p
            for p, own, part in zip(self.paths, self.names, self.partitions, strict=True)
            if name in own or name in part
        )


def read_column(files: ParquetFiles, name: str, start: int, stop: int) -> Iterator[pa.Array]:
    """The values of a column in the rows ``start .. stop``, in their order and in bounded memory.

    Yields:
        Arrays of one type, that of the first file that holds the column; null where a file does not. The first one is
        empty, so that the type is known.

    Raises:
        DataError: a file holds another type that does not fit.
    """
    dtype = _type_of(files, name)
    yield pa.array([], dtype)
    position = 0
    for path, groups, own, part in zip(files.paths, files.group_rows, files.names, files.partitions, strict=True):
        rows = sum(groups)
        low, high = max(start - position, 0), min(stop - position, rows)
        position += rows
        if low >= high:
            continue
        if name not in own:
            yield pa.array([part.get(name)], dtype).take(pa.array([0] * (high - low)))
            continue
        at = 0
        for batch in open_parquet(path).iter_batches(columns=[name]):
            kept = batch.column(0)[max(low - at, 0) : max(high - at, 0)]
            at += len(batch)
            try:
                yield kept.cast(dtype)
            except pa.ArrowInvalid as error:
                raise DataError(f"{path}: column {name!r} is {kept.type}, and {dtype} in the files before") from error


def _type_of(files: ParquetFiles, name: str) -> pa.DataType:
    for path, own, part in zip(files.paths, files.names, files.partitions, strict=True):
        if name in own:
            dtype = pq.read_schema(path).field(name).type
            return dtype.value_type if pa.types.is_dictionary(dtype) else dtype
        if part.get(name) is not None:
            return pa.scalar(part[name]).type
    return pa.null()


def open_parquet(path: str) -> pq.ParquetFile:
    """A file to read a few rows at a time, in memory that does not grow with its row groups."""
    # pre_buffer would load all column chunks of a row group before the first row is decoded.
    return pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False)


def stamp(file: str | Path) -> tuple[int, int]:
    """Size in bytes and time of the last change in ns: tells whether a file is still the one it was."""
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns


def _pandas_index(schema: pa.Schema) -> list[str]:
    """The columns that pandas made of a table's index. A plain numbered index is no column, but a description."""
    named = (schema.pandas_metadata or {}).get("index_columns", [])
    return [name for name in schema.names if name in named or re.fullmatch(r"__index_level_\d+__", name)]


def _partition_values(folders: Iterable[str]) -> dict[str, str | None]:
    pairs = (folder.split("=", 1) for folder in folders if "=" in folder)
    return {unquote(key): None if value == _HIVE_NULL else unquote(value) for key, value in pairs}


def widen(a: Kind, b: Kind) -> Kind | None:
    """The kind that holds both, or None: integers of any width are one kind, and null fits everything."""
    if a == b or b == "null":
        return a
    if a == "null":
        return b
    if {a, b} == {"integer", "float"}:
        return "float"
    if {a, b} == {"list<integer>", "list<float>"}:
        return "list<float>"
    for one, other in ((a, b), (b, a)):
        if one == "list<null>" and other.startswith("list"):
            return other
    return None
