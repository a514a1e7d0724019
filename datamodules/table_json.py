"""JSON lines, an object a row, as record batches, in bounded memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.json as arrow_json

from datamodules.errors import DataError
from datamodules.table_layout import shown
from datamodules.table_sources import Progress, open_stream
from datamodules.table_types import Evidence, seen_in_objects, seen_in_typed

__all__ = ["JsonTable"]

_BLOCK_BYTES = 4 << 20


class JsonTable:
    """A file of JSON lines. It is read twice: to find the types of its columns, and to have the values.

    A key that a row lacks is missing in it, as is null. Blocks of lines that Arrow's reader refuses, because a column
    holds numbers and strings, are read by Python's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def evidence(self, progress: Progress) -> dict[str, Evidence]:
        """What is known of every column, after a look at all values.

        Raises:
            DataError: a line is no JSON object.
        """
        found: dict[str, Evidence] = {}
        for block, line in self._blocks(progress):
            for name, seen in self._seen(block, line).items():
                found.setdefault(name, Evidence()).add(seen)
        if not found:
            raise DataError(f"{self.path} is empty; expected JSON objects, one a line")
        return found

    def batches(self, types: dict[str, pa.DataType], progress: Progress) -> Iterator[pa.RecordBatch]:
        """The rows, in their order, with the columns and types of ``types``."""
        schema = pa.schema(list(types.items()))
        for block, line in self._blocks(progress):
            table = _parse(block, schema)
            if table is None:
                rows = self._rows(block, line)
                columns = [pa.array([_fitted(row.get(n), t) for row in rows], t) for n, t in types.items()]
                table = pa.table(columns, schema=schema)
            yield from table.to_batches()

    def _seen(self, block: bytes, line: int) -> dict[str, Evidence]:
        table = _parse(block)
        typed = {} if table is None else {name: seen_in_typed(table[name]) for name in table.column_names}
        exact = {name: seen for name, seen in typed.items() if seen is not None}
        if table is not None and len(exact) == len(typed):
            return exact
        rows = self._rows(block, line)
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: seen_in_objects(row.get(name) for row in rows) for name in names}

    def _blocks(self, progress: Progress) -> Iterator[tuple[bytes, int]]:
        """Blocks of whole lines, and how many lines come before each."""
        with open_stream(self.path, progress) as stream:
            rest, line = b"", 0
            while data := stream.read(_BLOCK_BYTES):
                end = data.rfind(b"\n") + 1
                if end == 0:
                    rest += data
                    continue
                block, rest = rest + data[:end], data[end:]
                yield block, line
                line += block.count(b"\n")
            if rest.strip():
                yield rest, line

    def _rows(self, block: bytes, before: int) -> list[dict[str, Any]]:
        rows = []
        for number, text in enumerate(block.split(b"\n"), before + 1):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except json.JSONDecodeError as error:
                raise self._error(number, text, f"is no JSON ({error.msg}, column {error.colno})") from None
            except UnicodeDecodeError:
                raise self._error(number, text, "is not UTF-8") from None
            if not isinstance(row, dict):
                raise self._error(number, text, "is no JSON object")
            rows.append(row)
        return rows

    def _error(self, number: int, text: bytes, what: str) -> DataError:
        hint = ". A single array becomes lines by: jq -c '.[]'" if number == 1 and text.lstrip()[:1] == b"[" else ""
        return DataError(
            f"{self.path}, line {number} {what}: {shown(text.decode(errors='replace').strip())}; expected an "
            f'object, as {{"label": 1, "user": 7}}, in every line{hint}'
        )


def _parse(block: bytes, schema: pa.Schema | None = None) -> pa.Table | None:
    """The rows of a block, all columns or those of ``schema``; None where Arrow's reader refuses them."""
    try:
        return arrow_json.read_json(
            pa.BufferReader(block),
            arrow_json.ReadOptions(use_threads=False, block_size=len(block) + 1),
            arrow_json.ParseOptions(
                explicit_schema=schema, unexpected_field_behavior="infer" if schema is None else "ignore"
            ),
        )
    except (pa.ArrowInvalid, UnicodeDecodeError):
        return None


def _fitted(value: Any, dtype: pa.DataType) -> Any:
    """A value of a row as one of the column's type, which was found to hold all."""
    if value is None:
        return None
    if pa.types.is_list(dtype):
        return [_fitted(item, dtype.value_type) for item in value]
    if pa.types.is_string(dtype):
        return value if isinstance(value, str) else json.dumps(value)
    return float(value) if pa.types.is_floating(dtype) else value
