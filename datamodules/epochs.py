"""What all loaders share: one epoch after the other, and a position that can be saved and taken up again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from datamodules.errors import DataError
from datamodules.plan import EpochPlan
from hetrec.data import Batch

__all__ = ["EpochLoader"]

BatchT = TypeVar("BatchT", bound=Batch)


class EpochLoader(ABC, Generic[BatchT]):
    """Batches of one rank's share of a split.

    The batches depend on (seed, epoch, rank) alone: not on the number of workers. Every iteration is an epoch; the next
    one has the next number unless ``set_epoch`` says otherwise. The position is a number of batches handed out. Only
    one iterator at a time.
    """

    def __init__(self, plan: EpochPlan) -> None:
        self._plan = plan
        self._epoch = 0
        self._position = 0  # batches of the epoch that were handed out
        self._begun = False  # an iteration has begun since the epoch was set: the next one is the next epoch

    @abstractmethod
    def read(self, epoch: int, first: int) -> Iterator[BatchT]:
        """The batches of an epoch from number ``first`` on."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What the batches of an epoch depend on, beside ``steps``: a position means nothing where it differs."""

    def __len__(self) -> int:
        return self._plan.steps

    def __iter__(self) -> Iterator[BatchT]:
        if self._begun:
            self._epoch, self._position = self._epoch + 1, 0
        self._begun = True
        for batch in self.read(self._epoch, self._position):
            self._position += 1
            yield batch

    @property
    def sampler(self) -> EpochLoader[BatchT]:
        """Itself: Lightning calls ``loader.sampler.set_epoch(epoch)`` at the start of every epoch."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch: from its start, or from where ``load_state_dict`` put it within it."""
        if self._begun or epoch != self._epoch:
            self._epoch, self._position, self._begun = epoch, 0, False

    def state_dict(self) -> dict[str, Any]:
        """The position: the epoch, the number of its batches handed out, and what they depend on."""
        return {"epoch": self._epoch, "batches": self._position, "steps": len(self), **self.identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration goes on behind the batches that ``state`` counts; after a finished epoch, with the next.

        Raises:
            DataError: the position is in the middle of an epoch and belongs to other data or settings.
        """
        epoch, batches = int(state["epoch"]), int(state["batches"])
        total = state.get("steps", len(self))
        if batches >= total:
            epoch, batches = epoch + 1, 0
        identity = {"steps": len(self), **self.identity()}
        differ = {k: (state[k], v) for k, v in identity.items() if k in state and state[k] != v}
        if differ and batches:
            listed = ", ".join(f"{k} was {a}, is {b}" for k, (a, b) in differ.items())
            raise DataError(
                f"cannot continue in the middle of epoch {epoch} (after {batches} of {total} batches): {listed}. "
                f"Use the settings of the checkpointed run, or a checkpoint from the end of an epoch"
            )
        self._epoch, self._position, self._begun = epoch, batches, False
