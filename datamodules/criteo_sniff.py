"""What a Criteo text file is, by its first bytes: compressed, with labels, with a header, or something else."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from datamodules.criteo_layout import CATEGORICAL, INTEGERS, LABEL
from datamodules.errors import DataError

__all__ = ["LONGEST_ROW", "TextLayout", "no_tab", "open_text", "shown", "sniff", "too_long"]

#: Bytes; a row of Criteo has some 250. Without a limit, a file without line ends would be one row and fill the memory.
LONGEST_ROW = 1 << 20

_GZIP = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_TAR = (257, b"ustar")
_FOREIGN = {
    b"PK\x03\x04": "is a zip archive: unpack it",
    b"BZh": "is compressed by bzip2: unpack it, or compress it with gzip",
    b"\xfd7zXZ\x00": "is compressed by xz: unpack it, or compress it with gzip",
    b"\x28\xb5\x2f\xfd": "is compressed by zstd: unpack it, or compress it with gzip",
    b"PAR1": "is a Parquet file: let its name end in .parquet",
}
_NUMBER = re.compile(rb"-?[0-9]+(\.[0-9]*)?")


@dataclass(frozen=True)
class TextLayout:
    """What stands before the rows of a text file, and what is in them.

    Attributes:
        compressed: whether it is a gzip file, whatever its name.
        labelled: whether the rows begin with a label (40 columns) or do not (39).
        begin: where the first row begins, in bytes of the (decompressed) text: behind a byte order mark and a header.
        header: whether the first line is a header.
    """

    compressed: bool
    labelled: bool
    begin: int
    header: bool


@contextmanager
def open_text(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """A file as it is, and its text: decompressed where it is a gzip file, of any number of members and any name."""
    with open(path, "rb") as raw:
        compressed = raw.read(len(_GZIP)) == _GZIP
        raw.seek(0)
        if not compressed:
            yield raw, raw
            return
        with gzip.open(raw) as text:
            yield raw, text  # type: ignore[misc]


def sniff(path: Path) -> TextLayout:
    """The layout of a file.

    A header is skipped where it has Criteo's names in Criteo's order. Without one, the longest of the first rows tells
    whether there are labels; where all of them are short, the 14th field does: an integer, or the first category.

    Raises:
        DataError: the file is empty, cannot be read, or holds something else than tab-separated rows.
    """
    try:
        with open_text(path) as (raw, text):
            head = text.read(LONGEST_ROW)
            compressed = text is not raw
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    _refuse_foreign(path, head)
    mark = len(_BYTE_ORDER_MARK) if head.startswith(_BYTE_ORDER_MARK) else 0
    lines = head[mark:].split(b"\n")
    if len(head) == LONGEST_ROW:
        lines.pop()  # cut off
    header = _header(path, lines[0].rstrip(b"\r"))
    rows = [line.split(b"\t") for line in lines[1 if header else 0 :] if line.rstrip(b"\r")]
    if not rows:
        what = "has a header and no rows" if header else "is empty"
        raise DataError(f"{path} {what}; expected rows of 40 tab-separated columns")
    most = max(len(row) for row in rows)
    if header is not None:
        labelled = len(header) == 40
    elif most == 1:
        raise DataError(f"{path}, line 1: {no_tab(rows[0][0])}")
    else:
        labelled = most >= 40 or not any(len(row) > 13 and len(row[13]) == 8 for row in rows)
    return TextLayout(compressed, labelled, mark + (len(lines[0]) + 1 if header else 0), header is not None)


def _refuse_foreign(path: Path, head: bytes) -> None:
    for magic, what in _FOREIGN.items():
        if head.startswith(magic):
            raise DataError(f"{path} {what}")
    if head[_TAR[0] :].startswith(_TAR[1]):
        raise DataError(f"{path} is a tar archive: unpack it")
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in head:
        raise DataError(
            f"{path} is not UTF-8 or ASCII text but UTF-16 or binary; convert text with: iconv -f UTF-16 -t UTF-8"
        )
    if b"\n" not in head:
        if b"\r" in head:
            raise DataError(f"{path} ends its lines by carriage returns alone; convert them with: tr '\\r' '\\n'")
        if len(head) == LONGEST_ROW:
            raise DataError(f"{path}, line 1: {too_long()}")


def _header(path: Path, line: bytes) -> list[bytes] | None:
    """The fields of a line that names the columns; None if it is a row."""
    fields = line.split(b"\t")
    names = [name.lower().encode() for name in (LABEL, *INTEGERS, *CATEGORICAL)]
    found = [field.strip(b'"').lower() for field in fields]
    if found in (names, names[1:]):
        return fields
    if len(fields) >= 39 and all(field and not _NUMBER.fullmatch(field) for field in found[1:13]):
        raise DataError(
            f"{path}, line 1 is a header of other columns: {shown(b', '.join(fields))}; expected {LABEL}, "
            f"{INTEGERS[0]} .. {INTEGERS[-1]}, {CATEGORICAL[0]} .. {CATEGORICAL[-1]} in this order, or no header"
        )
    return None


def too_long() -> str:
    return f"the row has more than {LONGEST_ROW:,} bytes; expected 40 columns separated by tabs, and a line end"


def no_tab(line: bytes) -> str:
    """What to say of a row that is not separated by tabs."""
    commas = line.count(b",")
    hint = f"it has {commas} commas: convert commas to tabs" if commas > 10 else "expected 40 columns separated by tabs"
    return f"the row {shown(line)} has no tab; {hint}"


def shown(field: bytes) -> str:
    """Bytes of a file for a message."""
    text = field.decode(errors="backslashreplace")
    return repr(text if len(text) <= 60 else text[:57] + "...")
