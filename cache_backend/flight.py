"""Frames over Arrow Flight: what client and server both know. The protocol is on one page, ``PROTOCOL.md``."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl

from cache_backend._table import PROTOCOL_VERSION

__all__ = ["EXCHANGE", "FRAME_SCHEMA", "PROTOCOL_VERSION", "batch_of", "frame_of"]

#: Each message of an exchange is one row holding one frame.
FRAME_SCHEMA = pa.schema([("frame", pa.large_binary())])
EXCHANGE = fl.FlightDescriptor.for_command(b"hetrec.exchange")


def batch_of(frame: np.ndarray) -> pa.RecordBatch:
    """A frame, uint8 (n,), as a record batch around the same memory."""
    offsets = pa.py_buffer(np.array([0, frame.nbytes], np.int64))
    column = pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, pa.py_buffer(frame)])
    return pa.RecordBatch.from_arrays([column], schema=FRAME_SCHEMA)


def frame_of(batch: pa.RecordBatch) -> np.ndarray:
    """The frame in a record batch, without a copy.

    Raises:
        pa.ArrowInvalid: the batch is not one row of one binary column.
    """
    if batch.schema != FRAME_SCHEMA or batch.num_rows != 1 or batch.column(0).null_count:
        raise pa.ArrowInvalid(f"a message is one row of {FRAME_SCHEMA}, got {batch.num_rows} rows of {batch.schema}")
    column = batch.column(0)
    _, offsets, values = column.buffers()
    start, end = np.frombuffer(offsets, np.int64)[column.offset : column.offset + 2]
    if values is None:
        return np.empty(0, np.uint8)
    return np.frombuffer(values, np.uint8)[start:end]
