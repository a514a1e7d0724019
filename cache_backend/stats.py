"""What a cache counts."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["CacheStats"]


@dataclass
class CacheStats:
    """Counters since the start. Rows are counted per step and unique row, bytes as payload before any encoding.

    ``wait_s``: seconds a step waited for its exchange. ``overflow``: rows that found their set full of rows in use
    and went through without being kept.
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
    bytes_sent: int = 0
    bytes_received: int = 0
    wait_s: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Share of a step's unique rows that were served from the cache."""
        return self.hits / self.unique if self.unique else 0.0

    def __add__(self, other: CacheStats) -> CacheStats:
        return CacheStats(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def __sub__(self, other: CacheStats) -> CacheStats:
        return CacheStats(**{f.name: getattr(self, f.name) - getattr(other, f.name) for f in fields(self)})
