"""Copying a table bucket by bucket while pushes go on."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from cache_backend._table import BUCKETS, EmbeddingTable

__all__ = ["CutTable"]


class CutTable:
    """Looks like the table to the snapshot writer, but each bucket is one instant's, and ``changes`` says which.

    Args:
        lock: held by whoever changes the table.
        last_change: number of the last change made; asked under ``lock``.
    """

    def __init__(self, table: EmbeddingTable, lock: threading.Lock, last_change: Callable[[], int]) -> None:
        self.dim, self.state_dim = table.dim, table.state_dim
        self.changes = [0] * BUCKETS
        self._table = table
        self._lock = lock
        self._last_change = last_change
        self._copies: dict[int, tuple[np.ndarray, ...]] = {}

    def bucket_size(self, bucket: int) -> int:
        """Rows in the bucket; copies it when asked first."""
        if bucket not in self._copies:
            with self._lock:
                n = self._table.bucket_size(bucket)
                copy = (
                    np.empty(n, np.int32),
                    np.empty(n, np.int64),
                    np.empty(n, np.int64),
                    np.empty((n, self.dim + self.state_dim), np.float32),
                )
                self._table.export_bucket(bucket, *copy)
                self.changes[bucket] = self._last_change()
            self._copies[bucket] = copy
        return len(self._copies[bucket][0])

    def export_bucket(
        self, bucket: int, tables: np.ndarray, keys: np.ndarray, clocks: np.ndarray, rows: np.ndarray
    ) -> None:
        """The copy, once: then its memory is free again."""
        for given, copied in zip((tables, keys, clocks, rows), self._copies.pop(bucket), strict=True):
            given[:] = copied
