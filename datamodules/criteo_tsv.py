"""Criteo's text format: label, 13 integers, 26 hexadecimal categories, separated by tabs, empty where missing.

A file without labels has the last 39 of these columns. A row may lack trailing fields: some tools strip trailing tabs.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as arrow_csv

from datamodules.columns import parse_hexadecimal
from datamodules.criteo_layout import CATEGORICAL, INTEGERS, LABEL, MISSING
from datamodules.criteo_sniff import LONGEST_ROW, no_tab, open_text, shown, too_long
from datamodules.errors import DataError

__all__ = ["RowError", "parse_block", "read_blocks", "schema"]

_BLOCK_BYTES = 8 << 20
_CATEGORY_DIGITS = 8  # of nearly all categories; no integer of Criteo's has as many


class RowError(Exception):
    """A row that cannot be read: the index of its line within the block, and what is wrong."""

    def __init__(self, row: int, message: str) -> None:
        super().__init__(message)
        self.row = row


def schema(labelled: bool) -> pa.Schema:
    """Of the Parquet copy: the integers as they are (null where missing), the categories as keys (missing: -1)."""
    fields = [pa.field(LABEL, pa.int8(), nullable=False)] if labelled else []
    fields += [pa.field(n, pa.int64()) for n in INTEGERS]
    fields += [pa.field(n, pa.int64(), nullable=False) for n in CATEGORICAL]
    return pa.schema(fields)


def read_blocks(
    path: Path, start: int, stop: int | None, begin: int, progress: Callable[[int], None]
) -> Iterator[bytes]:
    """The rows that begin in the bytes ``start .. stop`` of a file (None: to its end), in blocks of whole lines.

    Args:
        begin: where the first row of the file begins.
        progress: is told the bytes of the file (compressed ones, if it is) that were read.

    Raises:
        DataError: the file is absent or damaged.
        RowError: a row is longer than ``LONGEST_ROW``.
    """
    try:
        with open_text(path) as (raw, text):
            at = begin
            text.seek(begin)
            if start > begin:
                # A row that begins exactly at `start` is ours: so look whether the byte before ends a row.
                text.seek(start - 1)
                at = start - 1 + len(_line(text, b""))
            told = start
            while stop is None or at < stop:
                block = text.read(_BLOCK_BYTES if stop is None else min(_BLOCK_BYTES, stop - at))
                if not block:
                    break
                block += _line(text, block)
                at += len(block)
                now = at if text is raw else raw.tell()
                progress(now - told)
                told = now
                yield block
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read to its end: {error}") from error


def _line(text: BinaryIO, block: bytes) -> bytes:
    """The rest of the line that a block ends in."""
    if block.endswith(b"\n"):
        return b""
    rest = text.readline(LONGEST_ROW)
    if len(rest) == LONGEST_ROW and not rest.endswith(b"\n"):
        raise RowError(block.count(b"\n"), too_long())
    return rest


def parse_block(block: bytes, labelled: bool) -> pa.RecordBatch:
    """Rows as :func:`schema` has them; blank lines are none.

    Raises:
        RowError: a row has too many fields, a label is not 0 or 1, an integer is none, or a category is not 1 to 8
            hexadecimal digits.
    """
    names = [*((LABEL,) if labelled else ()), *INTEGERS, *CATEGORICAL]
    text = block.replace(b"\r\n", b"\n") if b"\r" in block else block
    if not text.endswith(b"\n"):
        text += b"\n"
    if b"\n\n" in text or text.startswith(b"\n"):
        text = re.sub(rb"\n+", b"\n", text).removeprefix(b"\n")
    padded = _padded(text, len(names), labelled)
    try:
        if padded is None:
            raise pa.ArrowInvalid("rows of too many fields")
        columns = _columns(padded, names)
    except pa.ArrowInvalid as error:
        _explain(block, names)
        raise AssertionError("a block was refused, but every row of it looks right") from error
    return pa.record_batch(columns, schema=schema(labelled))


def _columns(text: bytes, names: list[str]) -> list[pa.Array]:
    """The columns of rows that all have as many fields.

    Raises:
        ArrowInvalid: a value is none of its column.
    """
    if not text:
        return [pa.array([], field.type) for field in schema(LABEL in names)]
    try:
        table = _read(text, names, pa.int64())
    except pa.ArrowInvalid:  # pandas writes the integers of a column with missing values as 260.0
        table = _read(text, names, pa.binary())
    columns: list[pa.Array] = []
    for name in names:
        column = table[name].combine_chunks()
        if name in CATEGORICAL:
            columns.append(_keys(column))
            continue
        if pa.types.is_binary(column.type):
            column = pc.replace_substring_regex(column.cast(pa.string()), r"^(-?[0-9]+)\.0*$", r"\1").cast(pa.int64())
        if name == LABEL:
            if column.null_count or not pc.all(pc.is_in(column, pa.array([0, 1]))).as_py():
                raise pa.ArrowInvalid("labels other than 0 and 1")
            column = column.cast(pa.int8())
        columns.append(column)
    return columns


def _read(text: bytes, names: list[str], number: pa.DataType) -> pa.Table:
    types = {name: pa.binary() if name in CATEGORICAL else number for name in names}
    return arrow_csv.read_csv(
        pa.BufferReader(text),
        read_options=arrow_csv.ReadOptions(column_names=names, block_size=len(text) + 1, use_threads=False),
        parse_options=arrow_csv.ParseOptions(
            delimiter="\t", quote_char=False, double_quote=False, escape_char=False, ignore_empty_lines=False
        ),
        convert_options=arrow_csv.ConvertOptions(
            column_types=types, null_values=[""], strings_can_be_null=True, check_utf8=False
        ),
    )


def _keys(texts: pa.Array) -> pa.Array:
    offsets = np.frombuffer(texts.buffers()[1], dtype=np.int32)[texts.offset : texts.offset + len(texts) + 1]
    data = np.frombuffer(texts.buffers()[2] or b"", dtype=np.uint8)
    keys, bad = parse_hexadecimal(data, offsets.astype(np.int64))
    if len(bad):
        raise pa.ArrowInvalid("categories that are no numbers")
    keys[np.diff(offsets) == 0] = MISSING
    return pa.array(keys)


def _padded(text: bytes, fields: int, labelled: bool) -> bytes | None:
    """Gives every row the same number of fields: what is missing at its end are missing values.

    None where a row has too many fields, or is one without a label among others.
    """
    codes = np.frombuffer(text, dtype=np.uint8)
    ends = np.flatnonzero(codes == ord("\n"))
    tabs = np.diff(np.searchsorted(np.flatnonzero(codes == ord("\t")), ends), prepend=0)
    if int(tabs.max(initial=0)) > fields - 1:
        return None
    short = np.flatnonzero(tabs < fields - 1)
    if not len(short):
        return text
    pieces, begin = [], 0
    for row in short.tolist():
        end = int(ends[row])
        if labelled and tabs[row] == fields - 2 and _lacks_label(text[int(ends[row - 1]) + 1 if row else 0 : end]):
            return None
        pieces += [text[begin:end], b"\t" * (fields - 1 - int(tabs[row]))]
        begin = end
    return b"".join([*pieces, text[begin:]])


def _lacks_label(row: bytes) -> bool:
    """Whether a row of 39 fields has the first category where one with a label has the last integer."""
    return len(row.split(b"\t", 14)[13]) == _CATEGORY_DIGITS


def _explain(block: bytes, names: list[str]) -> None:
    """Raises the error of the first bad row, if there is one."""
    for row, line in enumerate(block.split(b"\n")):
        fields = line.rstrip(b"\r").split(b"\t")
        if fields == [b""]:
            continue
        if len(fields) > len(names):
            raise RowError(row, f"the row has {len(fields)} fields; expected {len(names)}, separated by tabs")
        if not any(fields[1:]) and fields[0].count(b",") > 10:
            raise RowError(row, no_tab(fields[0]))
        if len(fields) == 39 and names[0] == LABEL and (_lacks_label(line) or fields[0] not in (b"0", b"1")):
            raise RowError(row, "the row has 39 fields, without a label, and others have 40, with one: separate them")
        for name, field in zip(names, fields, strict=False):
            if (expected := _expected(name, field)) is not None:
                hint = ", without quotes" if field.startswith(b'"') else ""
                raise RowError(row, f"{name} is {shown(field)}; expected {expected}{hint}")


def _expected(name: str, field: bytes) -> str | None:
    """What a column holds, where a field is nothing of it."""
    if name == LABEL:
        if re.fullmatch(rb"[01](\.0*)?", field):
            return None
        return "0 or 1" if field != b"-1" else "0 or 1: replace -1 by 0"
    if name in INTEGERS:
        number = field.strip(b" ")
        if not number or (re.fullmatch(rb"-?[0-9]+(\.0*)?", number) and -(2**63) <= int(number.split(b".")[0]) < 2**63):
            return None
        return "an integer of 64 bits, or nothing where it is missing"
    return None if re.fullmatch(rb"[0-9a-fA-F]{0,8}", field) else "1 to 8 hexadecimal digits, or nothing"
