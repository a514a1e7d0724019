"""What lossy pushes round off: kept on this side and sent with the row's next push, so that no update is lost."""

from __future__ import annotations

import numpy as np

from cache_backend import _table
from cache_backend.store import Check, ExchangeRequest, Fetch, Push

__all__ = ["Residuals"]


class Residuals:
    """Rounding errors by row, for one codec: float32, exactly."""

    def __init__(self, codec: int) -> None:
        self.codec = codec
        self._by_format: dict[tuple[int, int], _table.Residuals] = {}

    def of(self, dim: int, state_dim: int) -> _table.Residuals:
        """Those of one row format, for ``encode_request``."""
        if (dim, state_dim) not in self._by_format:
            self._by_format[dim, state_dim] = _table.Residuals(self.codec, dim, state_dim)
        return self._by_format[dim, state_dim]

    def __len__(self) -> int:
        """Rows, those whose error happens to be zero included."""
        return sum(len(kept) for kept in self._by_format.values())

    def drain(self) -> list[ExchangeRequest]:
        """Requests that push every kept error, to be sent exactly; they move no clock. Nothing is kept afterwards."""
        requests = []
        for (dim, state_dim), kept in self._by_format.items():
            tables, keys, errors = kept.drain()
            if len(keys):
                clocks = np.zeros(len(keys), np.int64)
                push = Push(tables, keys, clocks, clocks, errors)
                requests.append(ExchangeRequest(dim, state_dim, push, Check(), Fetch(tables[:0], keys[:0])))
        return requests

    def clear(self) -> None:
        """Forget everything: the rows were restored."""
        for kept in self._by_format.values():
            kept.clear()
