"""Criteo's text format: label, 13 integers, 26 hexadecimal categories, separated by tabs, empty where missing.

A file without labels has the last 39 of these columns. A row may lack trailing fields: some tools strip trailing tabs.
"""

from __future__ import annotations

import gzip
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
from datamodules.errors import DataError

__all__ = ["RowError", "has_label", "parse_block", "read_blocks", "schema"]

_BLOCK_BYTES = 8 << 20
_HEAD_BYTES = 1 << 20


class RowError(Exception):
    """A row that cannot be read: its index within the block, and what is wrong."""

    def __init__(self, row: int, message: str) -> None:
        super().__init__(message)
        self.row = row


def schema(labelled: bool) -> pa.Schema:
    """Of the Parquet copy: the integers as they are (null where missing), the categories as keys (missing: -1)."""
    fields = [pa.field(LABEL, pa.int8(), nullable=False)] if labelled else []
    fields += [pa.field(n, pa.int64()) for n in INTEGERS]
    fields += [pa.field(n, pa.int64(), nullable=False) for n in CATEGORICAL]
    return pa.schema(fields)


def open_text(path: Path) -> BinaryIO:
    return gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")  # type: ignore[return-value]


def has_label(path: Path) -> bool:
    """Whether the rows of a file begin with a label (40 columns) or do not (39).

    Where all of the first rows are short, the 14th field tells: an integer, or the first category.

    Raises:
        DataError: the file is empty, or not tab-separated.
    """
    try:
        with open_text(path) as file:
            head = file.read(_HEAD_BYTES)
    except (OSError, EOFError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    rows = [line.split(b"\t") for line in head.splitlines()]
    if len(head) == _HEAD_BYTES and len(rows) > 1:
        rows.pop()  # cut off
    if not rows:
        raise DataError(f"{path} is empty; expected rows of 40 tab-separated columns")
    most = max(len(row) for row in rows)
    if most == 1:
        raise DataError(f"{path}, line 1: {_no_tab(rows[0][0])}")
    if most >= 40:
        return True
    return not any(len(row) > 13 and len(row[13]) == 8 for row in rows)


def _no_tab(line: bytes) -> str:
    commas = line.count(b",")
    hint = f"it has {commas} commas: convert commas to tabs" if commas > 10 else "expected 40 columns separated by tabs"
    return f"the row {_shown(line)} has no tab; {hint}"


def _shown(field: bytes) -> str:
    text = field.decode(errors="backslashreplace")
    return repr(text if len(text) <= 60 else text[:57] + "...")


def read_blocks(path: Path, start: int, stop: int | None, progress: Callable[[int], None]) -> Iterator[bytes]:
    """The rows that begin in the bytes ``start .. stop`` of a file (None: to its end), in blocks of whole rows.

    ``progress`` is told the bytes of the file (compressed ones, if it is) that were read.
    """
    with open(path, "rb") as raw, gzip.open(raw) if path.suffix == ".gz" else raw as file:
        at = start
        if start:
            # A row that begins exactly at `start` is ours: so look whether the byte before ends a row.
            file.seek(start - 1)
            at = start - 1 + len(file.readline())
        told = at
        while stop is None or at < stop:
            try:
                block = file.read(_BLOCK_BYTES if stop is None else min(_BLOCK_BYTES, stop - at))
                block += file.readline() if not block.endswith(b"\n") else b""
            except (OSError, EOFError, zlib.error) as error:
                raise DataError(f"{path} cannot be read to its end: {error}") from error
            if not block:
                break
            at += len(block)
            now = raw.tell() if path.suffix == ".gz" else at
            progress(now - told)
            told = now
            yield block


def parse_block(block: bytes, labelled: bool) -> pa.RecordBatch:
    """Rows as :func:`schema` has them.

    Raises:
        RowError: a row has too many fields, a label is not 0 or 1, an integer is none, or a category is not 1 to 8
            hexadecimal digits.
    """
    if b"\r" in block:
        block = block.replace(b"\r\n", b"\n")
    if not block.endswith(b"\n"):
        block += b"\n"
    names = [*((LABEL,) if labelled else ()), *INTEGERS, *CATEGORICAL]
    block = _pad(block, len(names))
    types = {n: pa.int64() for n in (LABEL, *INTEGERS)} | {n: pa.binary() for n in CATEGORICAL}
    try:
        table = arrow_csv.read_csv(
            pa.BufferReader(block),
            read_options=arrow_csv.ReadOptions(column_names=names, block_size=len(block) + 1, use_threads=False),
            parse_options=arrow_csv.ParseOptions(
                delimiter="\t", quote_char=False, double_quote=False, escape_char=False, ignore_empty_lines=False
            ),
            convert_options=arrow_csv.ConvertOptions(
                column_types=types, null_values=[""], strings_can_be_null=True, check_utf8=False
            ),
        )
    except pa.ArrowInvalid as error:
        _explain(block, names)
        raise AssertionError("a block was refused, but every row of it looks right") from error
    columns: list[pa.Array] = []
    if labelled:
        label = table[LABEL].combine_chunks()
        if label.null_count or not pc.all(pc.is_in(label, pa.array([0, 1]))).as_py():
            _explain(block, names)
        columns.append(label.cast(pa.int8()))
    columns += [table[n].combine_chunks() for n in INTEGERS]
    for name in CATEGORICAL:
        texts = table[name].combine_chunks()
        offsets = np.frombuffer(texts.buffers()[1], dtype=np.int32)[texts.offset : texts.offset + len(texts) + 1]
        data = np.frombuffer(texts.buffers()[2] or b"", dtype=np.uint8)
        keys, bad = parse_hexadecimal(data, offsets.astype(np.int64))
        if len(bad):
            _explain(block, names)
        keys[np.diff(offsets) == 0] = MISSING
        columns.append(pa.array(keys))
    return pa.record_batch(columns, schema=schema(labelled))


def _pad(block: bytes, fields: int) -> bytes:
    """Gives every row the same number of fields: what is missing at its end are missing values."""
    text = np.frombuffer(block, dtype=np.uint8)
    ends = np.flatnonzero(text == ord("\n"))
    tabs = np.diff(np.searchsorted(np.flatnonzero(text == ord("\t")), ends), prepend=0)
    if int(tabs.max()) > fields - 1:
        row = int(np.argmax(tabs > fields - 1))
        raise RowError(row, f"the row has {tabs[row] + 1} fields; expected {fields}, separated by tabs")
    short = np.flatnonzero(tabs < fields - 1)
    if not len(short):
        return block
    pieces, begin = [], 0
    for row in short.tolist():
        end = int(ends[row])
        pieces += [block[begin:end], b"\t" * (fields - 1 - int(tabs[row]))]
        begin = end
    return b"".join([*pieces, block[begin:]])


def _explain(block: bytes, names: list[str]) -> None:
    """Raises the error of the first bad row, if there is one."""
    digits = frozenset(b"0123456789abcdefABCDEF")
    for row, line in enumerate(block.split(b"\n")[:-1]):
        fields = line.split(b"\t")
        if not any(fields[1:]) and fields[0].count(b",") > 10:
            raise RowError(row, _no_tab(fields[0]))
        for name, field in zip(names, fields, strict=True):
            if name == LABEL:
                good, expected = field in (b"0", b"1"), "0 or 1"
            elif name in INTEGERS:
                number = field.removeprefix(b"-")
                good = not field or (number.isdigit() and -(2**63) <= int(field) < 2**63)
                expected = "an integer, or nothing where it is missing"
            else:
                good, expected = len(field) <= 8 and digits.issuperset(field), "1 to 8 hexadecimal digits, or nothing"
            if not good:
                raise RowError(row, f"{name} is {_shown(field)}; expected {expected}")
