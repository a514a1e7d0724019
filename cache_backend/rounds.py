"""Synchronous steps (``cache.consistency=bsp``): all ranks' gradients become one optimizer step a row, at the store.

A *round* is one such step; a *share* is what one rank has for it. The round is applied when the last share has come,
and no rank is answered before: so a rank's next read sees it. Until then a share is held only for the rank that waits
with it, which sends it again should its wait fail. Nothing of an unfinished round has to be kept or made durable.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cache_backend.interrupts import uninterrupted
from cache_backend.store import StoreError

__all__ = ["RoundIncomplete", "Rounds"]

_MOST = 65_536
_MOST_NAMED = 8

#: (group, dim, state_dim): the rounds of each row format are numbered on their own.
Key = tuple[int, int, int]


class RoundIncomplete(StoreError):
    """A round for which other ranks did not send their shares in time; says which."""


@dataclass
class _Open:
    """A round under way: the shares that are there, by rank. ``seen``: whose share ever was."""

    ranks: int
    step: bytes
    shares: dict[int, Any] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    failure: Exception | None = None


class Rounds:
    """The rounds of a store.

    Args:
        lock: held by whoever changes the tables; rounds are counted and applied under it.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self._changed = threading.Condition(lock)
        self._applied: OrderedDict[Key, int] = OrderedDict()  # the last round applied; the most silent group first
        self._open: dict[Key, _Open] = {}
        self._stopping = False

    def add(
        self,
        key: Key,
        number: int,
        rank: int,
        ranks: int,
        step: np.ndarray,
        share: Any,
        apply: Callable[[Sequence[Any]], None],
        wait_s: float,
    ) -> bool:
        """Hand in a share and return once its round is applied. False: it had been already, and nothing was done.

        Args:
            step: learning rate and settings, on which the ranks must agree.
            apply: applies the shares of all ranks, in their order; called under the lock.

        Raises:
            RoundIncomplete: a rank's share did not come within ``wait_s``; or ``stop`` was called.
            ValueError: the ranks do not agree, or a round was left out.
        """
        with self._changed:
            last = self._applied.get(key, 0)
            if number <= last:
                return False
            if number > last + 1:
                raise ValueError(
                    f"round {number} of group {key[0]:#x} came after round {last}: this store is not the one that the "
                    f"rounds between were sent to, or they were lost"
                )
            round_ = self._open.setdefault(key, _Open(ranks, step.tobytes()))
            if len(self._open) > _MOST:  # of groups that ended in the middle of a round
                self._open.pop(next(iter(self._open)))
            if (round_.ranks, round_.step) != (ranks, step.tobytes()):
                raise ValueError(
                    f"rank {rank} of {ranks} steps round {number} with {_told(step.tobytes())}, another one of "
                    f"{round_.ranks} with {_told(round_.step)}: all ranks need the same learning rate and settings"
                )
            round_.shares[rank] = share  # a share that comes again takes the place of the first
            round_.seen.add(rank)
            if len(round_.shares) == ranks:
                self._complete(key, number, round_, apply)
            else:
                self._wait(key, number, rank, share, round_, wait_s)
            return True

    def _complete(self, key: Key, number: int, round_: _Open, apply: Callable[[Sequence[Any]], None]) -> None:
        del self._open[key]
        try:
            with uninterrupted():
                apply([round_.shares[rank] for rank in range(round_.ranks)])
                self.mark(key, number)
        except Exception as error:
            round_.failure = error
            raise
        finally:
            self._changed.notify_all()

    def _wait(self, key: Key, number: int, rank: int, share: Any, round_: _Open, wait_s: float) -> None:
        def applied() -> bool:
            return self._applied.get(key, 0) >= number

        missing: list[int] = []
        try:
            self._changed.wait_for(lambda: applied() or round_.failure is not None or self._stopping, wait_s)
            # Ranks that came and gave up waited for others too, unless there are no others.
            there = round_.seen if len(round_.seen) < round_.ranks else round_.shares.keys()
            missing = [r for r in range(round_.ranks) if r not in there]
        finally:
            if not applied() and round_.shares.get(rank) is share:
                del round_.shares[rank]
        if applied():
            return
        if round_.failure is not None:
            raise round_.failure
        if self._stopping:
            raise RoundIncomplete(f"round {number} was not complete when the server stopped")
        named = ", ".join(map(str, missing[:_MOST_NAMED])) + (", ..." if len(missing) > _MOST_NAMED else "")
        raise RoundIncomplete(
            f"round {number} of {round_.ranks} ranks waits for rank{'s' if len(missing) > 1 else ''} {named}"
        )

    def mark(self, key: Key, number: int) -> None:
        """Remember that a round was applied. Called under the lock."""
        self._applied[key] = max(number, self._applied.get(key, 0))
        self._applied.move_to_end(key)
        if len(self._applied) > _MOST:
            self._applied.popitem(last=False)

    def stop(self) -> None:
        """Let nobody wait any longer."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def dump(self) -> list[list[int]]:
        """[group, dim, state_dim, last round applied]. Called under the lock."""
        return [[*key, number] for key, number in self._applied.items()]

    def load(self, dumped: Iterable[list[int]]) -> None:
        self._applied = OrderedDict(((group, dim, state), number) for group, dim, state, number in dumped)


def _told(step: bytes) -> str:
    lr, *settings = np.frombuffer(step, np.float32).tolist()
    return f"learning rate {lr:g} and settings {', '.join(f'{s:g}' for s in settings)}"
