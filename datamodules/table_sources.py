"""Tables in other formats than Parquet: which files there are, what they hold, and their bytes as a stream."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pyarrow as pa

from datamodules.atomic import MANIFEST
from datamodules.errors import DataError
from datamodules.files import list_files, list_parquet
from datamodules.progress import say

__all__ = ["Format", "Progress", "format_of", "open_stream", "table_sources"]

Format = Literal["parquet", "arrow", "json", "text"]
Progress = Callable[[int], None]

_JSON = (".jsonl", ".ndjson", ".json")
_IN_FOLDERS = (".csv", ".tsv", ".inter", *_JSON, ".arrow", ".feather", ".ipc")  # others may be a readme
_PACKED = (".gz", ".zst", ".bz2", ".lz4")
_CODECS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2", b"\x04\x22\x4d\x18": "lz4"}
_ARROW_FILE, _ARROW_STREAM = b"ARROW1", b"\xff\xff\xff\xff"
_FOREIGN = {
    b"PK\x03\x04": "is a zip archive or a workbook; unpack it, or save the sheet as CSV",
    b"\xfd7zXZ": "is compressed by xz; unpack it, or compress it with gzip or zstd",
    b"FEA1": "is Feather of version 1; write it with version 2, which is Arrow IPC",
    b"\xff\xfe": "is UTF-16; convert it with: iconv -f UTF-16 -t UTF-8",
    b"\xfe\xff": "is UTF-16; convert it with: iconv -f UTF-16 -t UTF-8",
}


def table_sources(root: Path) -> list[Path]:
    """The files at ``root`` that have to be converted, in natural order; none where it is Parquet, or absent.

    In a folder with Parquet files the others are left out, and a line says so. The copies that a conversion left there
    do not count.

    Raises:
        DataError: a folder holds no table, or tables of several formats; a file is something else, or cannot be read.
    """
    if not root.is_dir():
        return [root] if root.is_file() and format_of(root) != "parquet" else []
    others = list_files(root, _IN_FOLDERS, _PACKED)
    parquet = [path for path in list_parquet(root) if not _is_copy(path, root)]
    if not others and not parquet:
        raise DataError(f"{root} holds no table (*.parquet, *{', *'.join(_IN_FOLDERS)}); name another place")
    if parquet and others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        say(f"{root} holds Parquet files; what lies beside them is left out: {others[0].name}{more}")
    return [] if parquet else _of_one_format(root, others)


def _of_one_format(root: Path, files: list[Path]) -> list[Path]:
    kinds = {format_of(path): path.name for path in files}
    if len(kinds) > 1:
        raise DataError(
            f"{root} holds files of several formats ({', '.join(f'{name}: {kind}' for kind, name in kinds.items())}); "
            f"set the path to one of them, or to a folder of one format"
        )
    return files


def _is_copy(path: Path, root: Path) -> bool:
    return any((folder / MANIFEST).exists() for folder in path.parents if root in folder.parents)


def format_of(path: Path) -> Format:
    """What a file is, by its first bytes and, where these are text, by its name.

    Raises:
        DataError: it cannot be read, or is something else.
    """
    head = _head(path)
    for magic, what in _FOREIGN.items():
        if head.startswith(magic):
            raise DataError(f"{path} {what}")
    if head.startswith(b"PAR1") or path.suffix.lower() in (".parquet", ".pq"):
        return "parquet"
    if head.startswith((_ARROW_FILE, _ARROW_STREAM)):
        return "arrow"
    name = path.with_suffix("") if path.suffix.lower() in _PACKED else path
    return "json" if name.suffix.lower() in _JSON else "text"


@contextmanager
def open_stream(path: Path, progress: Progress | None = None) -> Iterator[pa.NativeFile]:
    """The bytes of a file, unpacked; ``progress`` is told how many of the packed ones were read.

    Raises:
        DataError: the file cannot be read to its end.
    """
    codec = next((codec for magic, codec in _CODECS.items() if _head(path).startswith(magic)), None)
    try:
        with _Counted(path, progress) as raw, pa.PythonFile(raw, mode="r") as stream:
            yield stream if codec is None else pa.CompressedInputStream(stream, codec)
    except OSError as error:
        raise DataError(f"{path} cannot be read to its end: {error}. Copy or download it again") from error


class _Counted(io.BufferedReader):
    """A file that tells how many bytes were read."""

    def __init__(self, path: Path, progress: Progress | None) -> None:
        super().__init__(io.FileIO(path))
        self._progress = progress

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        if self._progress is not None:
            self._progress(len(data))
        return data


def _head(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(8)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
