"""Exactly once: which requests of which client processes have been applied.

A client numbers its requests to a shard 1, 2, ...; they may arrive again, late and out of order. Per (worker, session)
the shard keeps the highest number applied and a bit for each of the 64 numbers below it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

__all__ = ["WINDOW", "Sessions"]

WINDOW = 64
_MASK = (1 << WINDOW) - 1
_MOST = 65_536
_SILENT_S = 24 * 3600.0

Key = tuple[int, int]


class Sessions:
    """Applied sequence numbers, bounded: sessions silent for a day, and the most silent beyond 65,536, are forgotten.

    Not thread-safe: used under the shard's lock, together with the push it decides about.
    """

    def __init__(self, most: int = _MOST, silent_s: float = _SILENT_S) -> None:
        self._most = most
        self._silent_s = silent_s
        # (worker, session) -> (last, bits, time last heard); the most silent first. Bit i of `bits`: last - 1 - i.
        self._windows: OrderedDict[Key, tuple[int, int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._windows)

    def is_applied(self, key: Key, sequence: int) -> bool:
        """Whether this request has been applied.

        Raises:
            ValueError: it is so old that nobody knows.
        """
        window = self._windows.get(key)
        if window is None or sequence > window[0]:
            return False
        last, bits, _ = window
        if sequence == last:
            return True
        if last - sequence > WINDOW:
            raise ValueError(
                f"request {sequence} of worker {key[0]:#x} is older than the {WINDOW} before its request {last}: "
                f"whether it was applied is no longer known. A client may have at most {WINDOW} requests under way"
            )
        return bool(bits >> (last - sequence - 1) & 1)

    def mark(self, key: Key, sequence: int, now: float) -> None:
        """Remember that a request was applied. Marking twice, or what is older than the window, changes nothing."""
        last, bits, _ = self._windows.get(key, (0, 0, now))
        if sequence > last:
            bits = (bits << (sequence - last) | 1 << (sequence - last - 1)) & _MASK if last else 0
            last = sequence
        elif 0 < last - sequence <= WINDOW:
            bits |= 1 << (last - sequence - 1)
        self._windows[key] = (last, bits, now)
        self._windows.move_to_end(key)
        self._forget(now)

    def _forget(self, now: float) -> None:
        while len(self._windows) > self._most or next(iter(self._windows.values()))[2] < now - self._silent_s:
            self._windows.popitem(last=False)

    def dump(self) -> list[list[int]]:
        """[worker, session, last, bits] of every session, the most silent first."""
        return [[*key, last, bits] for key, (last, bits, _) in self._windows.items()]

    def load(self, dumped: Iterable[list[int]], now: float) -> None:
        self._windows = OrderedDict(((worker, session), (last, bits, now)) for worker, session, last, bits in dumped)
