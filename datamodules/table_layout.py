"""How a text file of a table is laid out: its separator, and the names that its header, or the user, gives."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, field
from pathlib import Path

from datamodules.errors import DataError
from datamodules.table_sources import open_stream

__all__ = ["Declared", "TextLayout", "shown", "sniff"]

#: What a header says of a column, as RecBole writes it (``price:float``), or what ``data.types`` says.
Declared = str
_DECLARED = re.compile(r"(.+):(token|float|token_seq|float_seq)")
_SEPARATORS = ("\t", "::", ",", ";", "|")
_HEAD_BYTES = 1 << 16
_HEAD_LINES = 100
_INDEX = "__index_level_0__"  # as Parquet files of pandas name an index without a name


@dataclass(frozen=True)
class TextLayout:
    """Attributes:
    separator: between two values.
    names: of the columns.
    declared: what the header says of them.
    has_header: whether the first row is one.
    """

    separator: str
    names: list[str]
    declared: dict[str, Declared] = field(default_factory=dict)
    has_header: bool = True


def sniff(path: Path, separator: str | None, columns: list[str] | None, label: str) -> TextLayout:
    """The layout of a text file.

    Args:
        separator: None: the one of tab, ``::``, comma, semicolon and bar that cuts the first lines alike.
        columns: the names, where the file may have no header; None: its first line is one.
        label: a name that only a header would hold.

    Raises:
        DataError: the file is empty, is not text, has no separator, no names, or other columns than ``columns``.
    """
    with open_stream(path) as stream:
        head = stream.read(_HEAD_BYTES)
    if b"\0" in head:
        raise DataError(f"{path} is no table: it is not text; expected Parquet, CSV, TSV, JSON lines or Arrow IPC")
    text = head.decode("utf-8-sig", errors="replace")
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    if len(lines) > 1 and len(head) == _HEAD_BYTES:
        lines.pop()  # cut off
    if not any(lines):
        raise DataError(f"{path} is empty; expected a header and rows")
    separator = separator or _separator(path, [line for line in lines[:_HEAD_LINES] if line])
    first = _fields(lines, separator)
    if columns is not None:
        if len(first) != len(columns):
            raise DataError(
                f"{path}, line 1 has {len(first)} fields, separated by {separator!r}; data.columns names "
                f"{len(columns)}. Name all, in their order, or set data.separator"
            )
        return TextLayout(separator, columns, has_header=first == columns)
    if label not in first and any(_is_number(name) for name in first):
        raise DataError(
            f"{path}, line 1 is no header: {shown(lines[0])}. Name its {len(first)} columns, in their order: "
            f"data.columns=[...]"
        )
    return _named(path, separator, first)


def _named(path: Path, separator: str, header: list[str]) -> TextLayout:
    typed = [_DECLARED.fullmatch(name) for name in header]
    declared = {match[1]: match[2] for match in typed if match is not None} if all(typed) else {}
    names = list(declared) if declared else header
    if names[0] == "":  # what pandas.DataFrame.to_csv makes of an index
        names = [_INDEX, *names[1:]]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or "" in names or len(names) < len(header):
        what = f"the name {twice[0]!r} twice" if twice and twice[0] else "a column without a name, or a name twice"
        raise DataError(f"{path}, line 1 has {what}; every column needs a name of its own")
    return TextLayout(separator, names, declared)


def _separator(path: Path, lines: list[str]) -> str:
    """The separator that occurs equally often, outside quotes, in most of the lines; of several, the most frequent."""
    bare = [re.sub(r'"[^"]*"', "", line) for line in lines]

    def score(separator: str) -> tuple[bool, float, int]:
        counts = [line.count(separator) for line in bare]
        most = max(set(counts) - {0}, key=counts.count, default=0)
        return most > 0 and counts[0] > 0, counts.count(most) / len(counts) if most else 0.0, most * len(separator)

    best = max(_SEPARATORS, key=score)
    if not score(best)[0]:
        raise DataError(
            f"{path}, line 1 has no separator (tab, comma, semicolon, bar, ::): {shown(lines[0])}. Set data.separator"
        )
    return best


def _fields(lines: list[str], separator: str) -> list[str]:
    if len(separator) > 1:
        lines, separator = [line.replace(separator, "\x1f") for line in lines], "\x1f"
    return [field.strip() for field in next(row for row in csv.reader(lines, delimiter=separator) if row)]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def shown(value: str) -> str:
    """A value of a file for a message."""
    return repr(value if len(value) <= 60 else value[:57] + "...")
