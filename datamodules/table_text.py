"""CSV, TSV and other separated text as record batches, in bounded memory."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as arrow_csv

from datamodules.errors import DataError
from datamodules.table_layout import TextLayout, shown
from datamodules.table_sources import Progress, open_stream
from datamodules.table_types import MISSING_WORDS, Evidence, seen_in_texts

__all__ = ["TextTable"]

_BLOCK_BYTES = 4 << 20  # a row has to fit
_UNIT = "\x1f"  # the separator of ASCII that takes the place of one of several characters


class TextTable:
    """A text file. It is read twice: to find the types of its columns, and to have the values.

    Values may be quoted by ``"``, and hold separators and line ends then. An empty value is missing, and in a column of
    numbers so are NA, NULL, NaN and the like.
    """

    def __init__(self, path: Path, layout: TextLayout) -> None:
        self.path = path
        self.layout = layout

    def evidence(self, progress: Progress) -> dict[str, Evidence]:
        """What is known of every column, after a look at all values.

        Raises:
            DataError: a row has too many or too few fields, a quote is open, or a column is not what it is said to be.
        """
        found = {name: Evidence() for name in self.layout.names}
        rows, last = 0, b""
        for batch in self._read({name: pa.binary() for name in found}, progress):
            for name, values in zip(batch.schema.names, batch.columns, strict=True):
                self._look(name, values, rows, found[name])
            rows += len(batch)
            if len(batch):
                last = batch.columns[-1][-1].as_py()
        if last.endswith(b"\n"):  # the end of the file, as that of a value
            raise DataError(
                f"{self.path}, {self._line(rows - 1)}: the quote before {shown(last.decode(errors='replace'))} is "
                f"never closed; close it, or double it within a value"
            )
        return found

    def batches(self, types: dict[str, pa.DataType], progress: Progress) -> Iterator[pa.RecordBatch]:
        """The rows, in their order, with the columns and types of ``types``."""
        flat = {name: pa.string() if pa.types.is_list(dtype) else dtype for name, dtype in types.items()}
        for batch in self._read(flat, progress):
            columns = [_finished(batch[name], dtype) for name, dtype in types.items()]
            yield pa.record_batch(columns, names=list(types))

    def _look(self, name: str, fields: pa.Array, rows_before: int, found: Evidence) -> None:
        """Adds what the fields of a column tell."""
        declared, values = self.layout.declared.get(name), fields
        if declared in ("token_seq", "float_seq"):
            values = _split(fields.cast(pa.string())).flatten().cast(pa.binary())
            found.items = found = found.items or Evidence()
        found.flags |= self._declared(name, declared, seen_in_texts(values, found.flags), fields, rows_before)

    def _declared(self, name: str, declared: str | None, flags: set[str], fields: pa.Array, rows: int) -> set[str]:
        """Flags, as far as the column's declaration leaves them open."""
        if declared is None or not flags:
            return flags
        if declared == "string":
            return {"text"} | (flags & {"bytes"})
        if declared.startswith("token"):
            return {"text"} | flags if "fraction" in flags else flags
        others = {"text", "fraction"} if declared == "integer" else {"text"}
        if flags & others:
            row = next(i for i, value in enumerate(fields) if seen_in_texts(_one(value, declared)) & others)
            raise DataError(
                f"{self.path}, {self._line(rows + row)}: column {name!r} holds "
                f"{shown(fields[row].as_py().decode(errors='replace'))}; expected {declared}. Mend it, or set "
                f"data.types={{{name}: string}}"
            )
        return flags if declared == "integer" else {"fraction"}

    @contextmanager
    def _open(self, types: dict[str, pa.DataType], progress: Progress) -> Iterator[arrow_csv.CSVStreamingReader]:
        separator = self.layout.separator
        with open_stream(self.path, progress) as stream:
            if len(separator) > 1:
                stream = pa.PythonFile(_Replaced(stream, separator.encode(), _UNIT.encode()), mode="r")
            yield arrow_csv.open_csv(
                stream,
                # Without threads an error tells the row.
                read_options=arrow_csv.ReadOptions(
                    use_threads=False,
                    block_size=_BLOCK_BYTES,
                    column_names=self.layout.names,
                    skip_rows_after_names=int(self.layout.has_header),
                ),
                parse_options=arrow_csv.ParseOptions(
                    delimiter=separator if len(separator) == 1 else _UNIT, newlines_in_values=True
                ),
                convert_options=arrow_csv.ConvertOptions(
                    column_types=types, null_values=MISSING_WORDS, strings_can_be_null=False, check_utf8=False
                ),
            )

    def _read(self, types: dict[str, pa.DataType], progress: Progress) -> Iterator[pa.RecordBatch]:
        try:
            with self._open(types, progress) as reader:
                yield from reader
        except pa.ArrowInvalid as error:
            raise DataError(f"{self.path}{self._explained(str(error))}") from error

    def _explained(self, error: str) -> str:
        match = re.search(r"Row #(\d+): (Expected (\d+) columns, got (\d+))(?:: (.*))?", error, re.DOTALL)
        if match is not None:
            row = int(match[1]) - 1 - int(self.layout.has_header)
            return (
                f", {self._line(row)}: the row {shown(match[5] or '')} has {match[4]} fields; expected {match[3]}, "
                f"separated by {self.layout.separator!r}. Mend or remove it"
            )
        if "straddling" in error:
            return (
                f" has a row of more than {_BLOCK_BYTES >> 20} MiB, or a quote that is never closed; close it, "
                f"or double it within a value"
            )
        return f" cannot be read: {error}"

    def _line(self, row: int) -> str:
        """Where a row of data begins, for a message: quoted values may span lines, and empty lines are no rows."""
        wanted = row + int(self.layout.has_header)
        with open_stream(self.path) as stream, io.TextIOWrapper(stream, errors="replace", newline="") as text:
            lines = (line.replace(self.layout.separator, _UNIT) for line in text)
            reader = csv.reader(lines, delimiter=_UNIT)
            try:
                before, count = 0, -1
                for fields in reader:
                    count += bool(fields)
                    if count == wanted:
                        return f"line {before + 1}"
                    before = reader.line_num
            except csv.Error:
                pass
        return f"row {row + 1}"


class _Replaced(io.RawIOBase):
    """A stream in which ``old`` is ``new``."""

    def __init__(self, stream: pa.NativeFile, old: bytes, new: bytes) -> None:
        super().__init__()
        self._stream, self._old, self._new = stream, old, new
        self._ready, self._rest = b"", b""

    def read(self, size: int = -1, /) -> bytes:
        while not self._ready and (block := self._stream.read(1 << 20)):
            text = (self._rest + block).replace(self._old, self._new)
            # What looks like the beginning of a separator may go on in the next block.
            keep = next((n for n in range(len(self._old) - 1, 0, -1) if text.endswith(self._old[:n])), 0)
            self._ready, self._rest = text[: len(text) - keep], text[len(text) - keep :]
        if not self._ready:
            self._ready, self._rest = self._rest, b""
        size = len(self._ready) if size < 0 else size
        data, self._ready = self._ready[:size], self._ready[size:]
        return data

    def readable(self) -> bool:
        return True


def _one(value: pa.Scalar, declared: str) -> pa.Array:
    values = pa.array([value.as_py()], pa.binary())
    return _split(values.cast(pa.string())).flatten().cast(pa.binary()) if declared.endswith("_seq") else values


def _split(texts: pa.Array) -> pa.Array:
    """Lists of what stands between spaces; an empty text is a missing list."""
    return pc.utf8_split_whitespace(pc.utf8_trim_whitespace(_without_empty(texts)))


def _without_empty(texts: pa.Array) -> pa.Array:
    return pc.if_else(pc.equal(pc.binary_length(texts), 0), pa.scalar(None, texts.type), texts)


def _finished(column: pa.Array, dtype: pa.DataType) -> pa.Array:
    if pa.types.is_list(dtype):
        return _split(column).cast(dtype)
    if pa.types.is_string(dtype) or pa.types.is_binary(dtype):
        return _without_empty(column)
    return column
