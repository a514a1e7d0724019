"""What lossy pushes round off: kept on this side and sent with the row's next push, so that no update is lost."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from cache_backend._table import BUCKETS, EmbeddingTable, rounding_errors
from cache_backend.store import Check, ExchangeRequest, Fetch, Push

__all__ = ["Residuals"]

LIMIT = 1_000_000  # rows; beyond that all of them are sent exactly


class Residuals:
    """Rounding errors by row, for one codec."""

    def __init__(self, codec: int, limit: int = LIMIT) -> None:
        self._codec = codec
        self._limit = limit
        self._errors: dict[tuple[int, int], EmbeddingTable] = {}
        self._declared: set[tuple[int, int, int]] = set()

    def carry(self, request: ExchangeRequest) -> None:
        """Add what earlier pushes of these rows left behind, and keep what this one will."""
        push = request.push
        if request.prepared is not None or not len(push.keys):
            return
        key = request.dim, request.state_dim
        table = self._errors.setdefault(key, EmbeddingTable(*key))
        for number in np.unique(push.tables).tolist():
            if (*key, number) not in self._declared:
                table.set_init(number, 0, 0.0, 0.0, 0.0)
                self._declared.add((*key, number))
        n = len(push.keys)
        left = np.zeros((n, request.width), np.float32)
        table.fetch(push.tables, push.keys, left, np.empty(n, np.int64), np.empty(n, np.uint8))
        push.deltas += left
        errors = push.deltas.copy()
        rounding_errors(self._codec, request.dim, request.state_dim, errors)
        table.assign(push.tables, push.keys, np.zeros(n, np.int64), errors)

    @property
    def full(self) -> bool:
        return sum(len(table) for table in self._errors.values()) > self._limit

    def drain(self) -> Iterator[ExchangeRequest]:
        """Requests that push every kept error; to be sent exactly. They move no clock."""
        for (dim, state_dim), table in self._errors.items():
            sizes = [table.bucket_size(bucket) for bucket in range(BUCKETS)]
            n = sum(sizes)
            tables, keys, clocks = np.empty(n, np.int32), np.empty(n, np.int64), np.empty(n, np.int64)
            rows = np.empty((n, dim + state_dim), np.float32)
            ends = np.cumsum([0, *sizes])
            for bucket, (start, end) in enumerate(pairwise(ends)):
                s = slice(start, end)
                table.export_bucket(bucket, tables[s], keys[s], clocks[s], rows[s])
            some = np.flatnonzero(rows.any(axis=1))
            table.clear()
            if len(some):
                push = Push(tables[some], keys[some], clocks[some], clocks[some], rows[some])
                yield ExchangeRequest(dim, state_dim, push, Check(), Fetch(tables[:0], keys[:0]))

    def clear(self) -> None:
        """Forget everything: the rows were restored."""
        for table in self._errors.values():
            table.clear()
