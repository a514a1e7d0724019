"""The written rows of a native table, piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from cache_backend._table import BUCKETS, EmbeddingTable
from cache_backend.store import StoredRows

__all__ = ["bucket_range", "bucket_runs", "stored_rows"]


class _Buckets(Protocol):
    def bucket_size(self, bucket: int) -> int: ...


def bucket_range(part: int, parts: int) -> tuple[int, int]:
    """First and last + 1 of the buckets in one of ``parts`` equal parts.

    Raises:
        ValueError: there is no such part.
    """
    if type(part) is not int or type(parts) is not int or not 0 <= part < parts <= BUCKETS:
        raise ValueError(f"part {part!r} of {parts!r}; give 0 <= part < parts <= {BUCKETS}")
    return part * BUCKETS // parts, (part + 1) * BUCKETS // parts


def bucket_runs(table: _Buckets, rows: int, first: int = 0, last: int = BUCKETS) -> Iterator[tuple[int, int]]:
    """Consecutive buckets of ``first .. last - 1`` that hold together about so many rows, so that memory stays
    bounded."""
    start, held = first, 0
    for bucket in range(first, last):
        held += table.bucket_size(bucket)
        if held >= rows or bucket == last - 1:
            yield start, bucket + 1
            start, held = bucket + 1, 0


def stored_rows(table: EmbeddingTable, tables: Sequence[int], part: int, parts: int, most: int) -> Iterator[StoredRows]:
    """The written rows of some tables in a part of the buckets, at most ``most`` at a time. A bucket is as of one
    instant; others may be pushed to before the next is read."""
    wanted = np.asarray(tables, np.int32)
    for first, last in bucket_runs(table, most, *bucket_range(part, parts)):
        found = table.rows_of(wanted, first, last)
        for start in range(0, len(found[0]), most):
            yield StoredRows(table.dim, table.state_dim, *(column[start : start + most] for column in found))
