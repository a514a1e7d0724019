"""Stored rows as Arrow record batches: on the wire (``PROTOCOL.md``) and in the log."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa

from cache_backend.store import StoredRows

__all__ = ["batch_of_rows", "pack_rows", "rows_of_batch", "rows_schema", "unpack_rows"]

_NOTE = b"hetrec"


def rows_schema(width: int) -> pa.Schema:
    """Of rows of ``width`` values, weights and optimizer values."""
    return pa.schema(
        [("table", pa.int32()), ("key", pa.int64()), ("clock", pa.int64()), ("row", pa.list_(pa.float32(), width))]
    )


def batch_of_rows(rows: StoredRows) -> pa.RecordBatch:
    """The rows around the same memory."""
    width = rows.dim + rows.state_dim
    values = pa.FixedSizeListArray.from_arrays(pa.array(rows.rows.reshape(-1)), width)
    columns = [pa.array(rows.tables), pa.array(rows.keys), pa.array(rows.clocks), values]
    return pa.RecordBatch.from_arrays(columns, schema=rows_schema(width))


def rows_of_batch(batch: pa.RecordBatch, dim: int, state_dim: int) -> StoredRows:
    """The rows in a record batch; arrays are read-only and copied only where they are not aligned.

    Raises:
        pa.ArrowInvalid: another schema, or something is absent.
    """
    schema = rows_schema(dim + state_dim)
    if batch.schema != schema:
        raise pa.ArrowInvalid(
            f"rows of {dim} weights and {state_dim} optimizer values come as {schema}, got {batch.schema}"
        )
    table, key, clock, row = batch.columns
    values = row.flatten()
    if any(column.null_count for column in (table, key, clock, row, values)):
        raise pa.ArrowInvalid("a row has no table, key, clock or value: nothing of a row may be null")
    tables, keys, clocks, flat = (
        np.require(column.to_numpy(zero_copy_only=True), requirements="A") for column in (table, key, clock, values)
    )
    return StoredRows(dim, state_dim, tables, keys, clocks, flat.reshape(len(keys), dim + state_dim))


def pack_rows(rows: StoredRows, **note: Any) -> bytes:
    """Rows and a note (a JSON object) in bytes that can be kept."""
    batch = batch_of_rows(rows)
    note |= {"dim": rows.dim, "state_dim": rows.state_dim}
    schema = batch.schema.with_metadata({_NOTE: json.dumps(note).encode()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(batch.replace_schema_metadata(schema.metadata))
    return sink.getvalue().to_pybytes()


def unpack_rows(packed: memoryview) -> tuple[StoredRows, dict[str, Any]]:
    """What ``pack_rows`` was given."""
    with pa.ipc.open_stream(packed) as reader:
        batch = reader.read_next_batch()
    note = json.loads(batch.schema.metadata[_NOTE])
    rows = rows_of_batch(batch.replace_schema_metadata(None), note.pop("dim"), note.pop("state_dim"))
    return rows, note
