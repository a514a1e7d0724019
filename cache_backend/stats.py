"""What a cache counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields

from cache_backend._table import LAG_BINS

__all__ = ["LAG_BINS", "CacheStats", "lag_of_bin"]


def lag_of_bin(lag_bin: int) -> int:
    """The largest lag that bin ``lag_bin`` of ``CacheStats.lags`` counts (the last one counts larger ones too)."""
    return (1 << lag_bin) - 1


@dataclass
class CacheStats:
    """Counters since the start. Rows are counted per step and unique row, bytes as payload before any encoding.

    ``wait_s``: seconds a step waited for its exchange. Two kinds of misses went through without being kept:
    ``overflow`` found their set full of rows in use, ``bypassed`` were worth less to the policy than what they would
    have replaced. ``nonfinite`` rows were not stepped, because their gradient, or the row after the step, was NaN or
    infinite. ``lags``: observed staleness. Whenever the store looked at the clock of a cached row: by how much the
    row's global clock was ahead of it, that is how many updates by others the row had missed (with ``clock: lamport``,
    at least how many). Bin 0 counts the rows that had missed none, bin i those whose lag has i binary digits, the last
    of the ``LAG_BINS`` all larger ones.
    """

    steps: int = 0
    lookups: int = 0
    unique: int = 0
    hits: int = 0
    misses: int = 0
    stale: int = 0
    fetched: int = 0
    pushed: int = 0
    evicted: int = 0
    overflow: int = 0
    bypassed: int = 0
    nonfinite: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    wait_s: float = 0.0
    lags: Counter[int] = field(default_factory=Counter)

    @property
    def hit_rate(self) -> float:
        """Share of a step's unique rows that were served from the cache."""
        return self.hits / self.unique if self.unique else 0.0

    def __add__(self, other: CacheStats) -> CacheStats:
        return CacheStats(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def __sub__(self, other: CacheStats) -> CacheStats:
        return CacheStats(**{f.name: getattr(self, f.name) - getattr(other, f.name) for f in fields(self)})
