"""The loader: windows read by this process or by worker processes, handed out as batches."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from datamodules.errors import DataError
from datamodules.reader import Window, WindowReader
from datamodules.workers import Request, WindowWorkers
from hetrec.data import Batch

__all__ = ["ParquetLoader"]


class ParquetLoader:
    """Batches of one rank's rows of a split.

    The batches depend on (seed, epoch, rank) alone: not on the number of workers. Every iteration is an epoch; the next
    one has the next number unless ``set_epoch`` says otherwise. The position is a number of batches handed out. Only
    one iterator at a time.

    Args:
        reader: reads the windows.
        names: the features, in the reader's order.
        num_workers: processes that read; 0: a thread of this process reads one window ahead.
    """

    def __init__(self, reader: WindowReader, names: list[str], num_workers: int = 0) -> None:
        self.reader = reader
        self.names = names
        self._plan = reader.plan
        self._epoch = 0
        self._position = 0  # batches of the epoch that were handed out
        self._begun = False  # an iteration has begun since the epoch was set: the next one is the next epoch
        self._workers = WindowWorkers(reader, num_workers) if num_workers > 0 else None

    def __len__(self) -> int:
        return self._plan.steps

    def __iter__(self) -> Iterator[Batch]:
        if self._begun:
            self._epoch, self._position = self._epoch + 1, 0
        self._begun = True
        epoch, first = self._epoch, self._position
        per_window = self._plan.window_batches
        windows = [(epoch, w) for w in range(first // per_window, self._plan.windows)]
        skip = first % per_window
        for window in self._workers.read(windows) if self._workers else self._read_in_thread(windows):
            for batch in range(skip, len(window.bounds) - 1):
                self._position += 1
                yield self._batch(window, batch)
            skip = 0

    def _read_in_thread(self, requests: list[Request]) -> Iterator[Window]:
        with ThreadPoolExecutor(1, thread_name_prefix="hetrec-reader") as pool:
            ahead: Future[Window] | None = pool.submit(self.reader.read, *requests[0]) if requests else None
            for number in range(len(requests)):
                assert ahead is not None
                window = ahead.result()
                ahead = pool.submit(self.reader.read, *requests[number + 1]) if number + 1 < len(requests) else None
                yield window

    def _batch(self, window: Window, batch: int) -> Batch:
        rows = slice(window.bounds[batch], window.bounds[batch + 1])
        part = slice(window.value_bounds[batch], window.value_bounds[batch + 1])
        count, features = rows.stop - rows.start, len(self.names)
        if window.lengths is None:
            lengths = torch.ones(count * features, dtype=torch.int32)
        else:
            lengths = torch.from_numpy(window.lengths[rows.start * features : rows.stop * features])
        return Batch(
            torch.from_numpy(window.dense[rows]),
            KeyedJaggedTensor(
                self.names,
                torch.from_numpy(window.values[part]),
                weights=None if window.weights is None else torch.from_numpy(window.weights[part]),
                lengths=lengths,
                stride=count,
            ),
            torch.from_numpy(window.labels[rows]),
        )

    @property
    def sampler(self) -> ParquetLoader:
        """Itself: Lightning calls ``loader.sampler.set_epoch(epoch)`` at the start of every epoch."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch: from its start, or from where ``load_state_dict`` put it within it."""
        if self._begun or epoch != self._epoch:
            self._epoch, self._position, self._begun = epoch, 0, False

    def state_dict(self) -> dict[str, Any]:
        """The position: the epoch, the number of its batches handed out, and what they depend on."""
        return {"epoch": self._epoch, "batches": self._position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration goes on behind the batches that ``state`` counts; after a finished epoch, with the next.

        Raises:
            DataError: the position is in the middle of an epoch and belongs to other data or settings.
        """
        epoch, batches = int(state["epoch"]), int(state["batches"])
        total = state.get("steps", len(self))
        if batches >= total:
            epoch, batches = epoch + 1, 0
        identity = self._identity()
        differ = {k: (state[k], v) for k, v in identity.items() if k in state and state[k] != v}
        if differ and batches:
            listed = ", ".join(f"{k} was {a}, is {b}" for k, (a, b) in differ.items())
            raise DataError(
                f"cannot continue in the middle of epoch {epoch} (after {batches} of {total} batches): {listed}. "
                f"Use the settings of the checkpointed run, or a checkpoint from the end of an epoch"
            )
        self._epoch, self._position, self._begun = epoch, batches, False

    def _identity(self) -> dict[str, int]:
        plan = self._plan
        return {
            "steps": plan.steps,
            "rows": plan.total_rows,
            "batch_size": plan.batch_size,
            "shuffle_buffer": plan.window_batches * plan.batch_size,
            "seed": plan.seed,
            "world_size": plan.world_size,
        }
