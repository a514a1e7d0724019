"""Which rows belong to a split, and in which order an epoch hands them to ranks, batches and workers.

Everything here follows from the row counts in the files' footers, so all ranks compute the same plan without talking.

* A *unit* is a run of neighbouring row groups of one file (a large row group is a unit by itself).
* An epoch puts the units in an order that depends on (seed, epoch): the same on every rank.
* Rank r of R takes the rows ``N*r//R .. N*(r+1)//R`` of that order: each row once, counts differ by at most one.
* All ranks take ``ceil(ceil(N/R) / batch_size)`` steps. Batches are full but the last ones: a rank whose rows would end
  one step early keeps one row for the last step, so a batch is empty only where a rank has fewer rows than steps.
* A *window* is a number of whole batches that are read, shuffled and handed out together: the bounded shuffle buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from datamodules.keys import mix64

__all__ = ["EpochPlan", "Rows", "Slice", "Unit", "make_units"]

_HASH_CHUNK = 1 << 20
_UNIT_ROWS = 8192  # small row groups are joined up to about this many rows


@dataclass(frozen=True)
class Rows:
    """The rows of one split, by their global position (files in order, rows in file order).

    A row is in the split if ``start <= position < stop`` and, where ``buckets`` is given, its hash (of position and
    ``seed``, mapped to [0, 1)) lies in ``buckets[0] <= hash < buckets[1]``.
    """

    start: int
    stop: int
    buckets: tuple[float, float] | None = None
    seed: int = 0

    def mask(self, position: int, count: int) -> slice | npt.NDArray[np.bool_]:
        """Which of the rows ``position .. position + count`` are in the split: a slice or a mask of that length."""
        low = min(max(self.start - position, 0), count)
        high = max(min(self.stop - position, count), low)
        if self.buckets is None:
            return slice(low, high)
        positions = np.arange(position, position + count, dtype=np.uint64)
        salt = mix64(np.array([self.seed], dtype=np.uint64))
        unit_interval = (mix64(positions ^ salt) >> np.uint64(11)) * 2.0**-53
        kept = (unit_interval >= self.buckets[0]) & (unit_interval < self.buckets[1])
        kept[:low] = False
        kept[high:] = False
        return kept

    def count(self, position: int, count: int) -> int:
        """How many of the rows ``position .. position + count`` are in the split."""
        if self.buckets is None:
            kept = self.mask(position, count)
            assert isinstance(kept, slice)
            return int(kept.stop - kept.start)
        chunks = range(position, position + count, _HASH_CHUNK)
        masks = (np.asarray(self.mask(at, min(_HASH_CHUNK, position + count - at))) for at in chunks)
        return sum(int(np.count_nonzero(mask)) for mask in masks)


@dataclass(frozen=True)
class Unit:
    """Row groups ``first_group .. first_group + groups`` of one file.

    ``position`` is the global position of the first row, ``rows`` the number of rows, ``kept`` how many of them are in
    the split.
    """

    file: int
    first_group: int
    groups: int
    position: int
    rows: int
    kept: int


def make_units(group_rows: Sequence[Sequence[int]], rows: Rows) -> list[Unit]:
    """The units of files whose row groups have ``group_rows[file][group]`` rows, without those that keep no row."""
    units: list[Unit] = []
    position = 0
    for file, groups in enumerate(group_rows):
        first = 0
        while first < len(groups):
            last, size = first + 1, groups[first]
            while last < len(groups) and size + groups[last] <= _UNIT_ROWS:
                size += groups[last]
                last += 1
            kept = rows.count(position, size)
            if kept:
                units.append(Unit(file, first, last - first, position, size, kept))
            position += size
            first = last
    return units


@dataclass(frozen=True)
class Slice:
    """Rows ``start .. stop`` among the kept rows of one unit."""

    unit: Unit
    start: int
    stop: int


@dataclass(eq=False)
class EpochPlan:
    """What one rank reads in every epoch.

    Args:
        units: of the split, in file order.
        batch_size: rows per batch and rank.
        window_rows: size of the shuffle buffer in rows; rounded down to whole batches, at least one.
        shuffle: whether units and the rows of a window are shuffled.
    """

    units: tuple[Unit, ...]
    batch_size: int
    window_rows: int
    shuffle: bool
    seed: int
    rank: int
    world_size: int
    _order: tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = field(
        default=None, init=False, repr=False
    )

    @cached_property
    def total_rows(self) -> int:
        """Rows of the split, of all ranks together."""
        return sum(u.kept for u in self.units)

    @cached_property
    def rank_range(self) -> tuple[int, int]:
        """This rank's rows in the order of the epoch."""
        total = self.total_rows
        return total * self.rank // self.world_size, total * (self.rank + 1) // self.world_size

    @cached_property
    def steps(self) -> int:
        """Batches per epoch: the same on every rank."""
        most = -(-self.total_rows // self.world_size)
        return -(-most // self.batch_size)

    @property
    def window_batches(self) -> int:
        return max(1, self.window_rows // self.batch_size)

    @property
    def windows(self) -> int:
        return -(-self.steps // self.window_batches)

    def batch_start(self, batch: int) -> int:
        """Where a batch begins among this rank's rows; ``batch_start(steps)`` is their number."""
        first, last = self.rank_range
        rows = last - first
        # Every batch that is still to come wants one row at least.
        kept_back = self.steps - batch if rows >= self.steps else 0
        return min(batch * self.batch_size, rows - kept_back)

    def window_bounds(self, window: int) -> list[int]:
        """Where the batches of a window begin among the window's rows, and where the last one ends."""
        first = window * self.window_batches
        starts = [self.batch_start(b) for b in range(first, min(first + self.window_batches, self.steps) + 1)]
        return [s - starts[0] for s in starts]

    def window_slices(self, epoch: int, window: int) -> list[Slice]:
        """What to read for a window, in order."""
        order, ends = self._unit_order(epoch)
        begin = self.rank_range[0] + self.batch_start(window * self.window_batches)
        end = begin + self.window_bounds(window)[-1]
        slices = []
        at = int(np.searchsorted(ends, begin, side="right"))
        while begin < end:
            unit = self.units[order[at]]
            unit_begin = int(ends[at]) - unit.kept
            stop = min(end, int(ends[at]))
            slices.append(Slice(unit, begin - unit_begin, stop - unit_begin))
            begin = stop
            at += 1
        return slices

    def window_permutation(self, epoch: int, window: int) -> npt.NDArray[np.int64] | None:
        """The order of the window's rows, or None to leave them as read."""
        if not self.shuffle:
            return None
        generator = np.random.default_rng([self.seed, epoch, self.rank, window])
        return generator.permutation(self.window_bounds(window)[-1])

    def _unit_order(self, epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Indices of the units in the order of the epoch, and where each ends among the epoch's rows."""
        if self._order is None or self._order[0] != epoch:
            order = np.arange(len(self.units))
            if self.shuffle:
                np.random.default_rng([self.seed, epoch]).shuffle(order)
            kept = np.array([u.kept for u in self.units], dtype=np.int64)
            self._order = (epoch, order, np.cumsum(kept[order]))
        return self._order[1:]
