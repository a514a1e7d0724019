"""The policies once more, in plain Python: dictionaries, no packing, nothing incremental.

Written from the rules (``docs/cache_policies.md``), not from the native code. What a coming batch will use is looked up
in the batches themselves.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

WAYS = 32
USE, MOST_FREQUENT, FREQUENT_ENOUGH, USES_AN_AGEING = 2, 15, 6, 16
_MASK = (1 << 64) - 1


def mix64(x: int) -> int:
    x ^= x >> 33
    x = x * 0xFF51AFD7ED558CCD & _MASK
    x ^= x >> 33
    x = x * 0xC4CEB9FE1A85EC53 & _MASK
    return x ^ x >> 33


def hash_of(key: int) -> int:
    """Of a row of table 0."""
    return mix64((key & _MASK) ^ 0x9E3779B97F4A7C15)


class Sketch:
    """A set's: four lines of four times 32 counters, of which a key has four."""

    def __init__(self) -> None:
        self._counters: dict[tuple[int, int, int], int] = defaultdict(int)

    @staticmethod
    def _of(key: int) -> list[tuple[int, int, int]]:
        bits = mix64((hash_of(key) + 0x9E3779B97F4A7C15) & _MASK)
        return [(bits >> 20 & 3, quarter, bits >> 5 * quarter & 31) for quarter in range(4)]

    def frequency(self, key: int) -> int:
        return min(self._counters[counter] for counter in self._of(key))

    def remember(self, key: int, frequency: int) -> None:
        for counter in self._of(key):
            self._counters[counter] = max(self._counters[counter], frequency)

    def age(self) -> None:
        for counter in self._counters:
            self._counters[counter] //= 2


@dataclass
class Row:
    key: int
    uses: int  # lfu's count, or the frequency
    counted: int  # the last batch that counted it
    pins: int = 1


class Reference:
    """A cache of ``capacity`` rows of table 0. ``sight``: batches after the planned one that lookahead knows."""

    def __init__(self, policy: str, capacity: int, stream: list[list[int]], sight: int = 0) -> None:
        self.policy, self.sight = policy, sight
        self.stream = [set(batch) for batch in stream]
        self.admits = policy in ("tiny_lfu", "lookahead")
        self.sets: list[list[Row | None]] = [[None] * WAYS for _ in range(capacity // WAYS)]
        self.sketches = [Sketch() for _ in self.sets]
        self.spilled: dict[int, int] = {}  # key: pins
        self.uses = 0
        self.bypassed = self.overflow = self.evicted = 0

    def cached(self) -> set[int]:
        return {row.key for ways in self.sets for row in ways if row is not None}

    def plan(self, t: int, keys: list[int]) -> list[int]:
        """The keys of batch ``t`` that miss. ``keys``: distinct, in order."""
        self.spilled = {key: pins for key, pins in self.spilled.items() if pins}
        self._age(len(keys))
        misses = []
        for key in keys:
            if (row := self._find(key)) is not None:
                row.pins += 1
                self._count(row, t)
            elif key in self.spilled:
                self.spilled[key] += 1
                if self.admits:
                    self._remember(key, self._one_more(self._sketch(key).frequency(key)))
            else:
                misses.append(key)
        for key in misses:
            self._place(Row(key, self._one_more(self._sketch(key).frequency(key) if self.admits else 0), t), t)
        for key, frequency in self.leaving:  # remembered when all newcomers have a slot
            self._remember(key, frequency)
        return misses

    def release(self, keys: list[int]) -> None:
        for key in keys:
            if key in self.spilled:
                self.spilled[key] -= 1
            else:
                row = self._find(key)
                assert row is not None
                row.pins -= 1

    def _place(self, new: Row, t: int) -> None:
        ways = self.sets[self._set(new.key)]
        candidates = [way for way, row in enumerate(ways) if row is None or row.pins == 0]
        if not candidates:
            self.overflow += 1
            victim = None
        else:
            victim = min(candidates, key=lambda way: (self._worth(ways[way], t), way))
            if self.admits and ways[victim] is not None and self._worth(new, t) < self._worth(ways[victim], t):
                self.bypassed += 1
                victim = None
        if victim is None:
            self.spilled[new.key] = 1
            if self.admits:
                self._remember(new.key, new.uses)
            return
        if (old := ways[victim]) is not None:
            self.evicted += 1
            if self.admits:
                self.leaving.append((old.key, old.uses))
        ways[victim] = new

    def _worth(self, row: Row | None, t: int) -> tuple[int, ...]:
        """The lowest leaves first."""
        if row is None:
            return (-1,)
        if self.policy == "lru":
            return (row.counted,)
        if self.policy == "lookahead":
            coming = [n for n in range(t + 1, t + 1 + self.sight) if n < len(self.stream) and row.key in self.stream[n]]
            if coming:
                return (1, -coming[0], row.uses)
            return (0, row.uses, row.counted)
        if self.policy == "light_lfu" and row.uses >= FREQUENT_ENOUGH:
            return (1, row.uses, row.counted)
        return (0, row.uses, row.counted)

    def _count(self, row: Row, t: int) -> None:
        if self.policy == "light_lfu" and row.uses >= FREQUENT_ENOUGH:
            return
        row.uses, row.counted = self._one_more(row.uses), t

    def _one_more(self, uses: int) -> int:
        return uses + 1 if self.policy == "lfu" else min(uses + USE, MOST_FREQUENT)

    def _age(self, rows: int) -> None:
        self.leaving: list[tuple[int, int]] = []
        turns = range(self.uses // (USES_AN_AGEING * WAYS), (self.uses + rows) // (USES_AN_AGEING * WAYS))
        self.uses += rows
        if self.policy in ("lru", "lfu"):
            return
        for turn in turns:
            n = turn % len(self.sets)
            for row in self.sets[n]:
                if row is not None:
                    row.uses //= 2
            self.sketches[n].age()

    def _set(self, key: int) -> int:
        return ((hash_of(key) >> 20 & 0xFFFFFFFF) * len(self.sets)) >> 32

    def _sketch(self, key: int) -> Sketch:
        return self.sketches[self._set(key)]

    def _remember(self, key: int, frequency: int) -> None:
        self._sketch(key).remember(key, frequency)

    def _find(self, key: int) -> Row | None:
        return next((row for row in self.sets[self._set(key)] if row is not None and row.key == key), None)
