"""The loader: windows read by this process or by worker processes, handed out as batches."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from datamodules.epochs import EpochLoader
from datamodules.reader import Window, WindowReader
from datamodules.workers import Request, Workers
from hetrec.data import Batch

__all__ = ["ParquetLoader"]


class ParquetLoader(EpochLoader[Batch]):
    """Batches of one rank's rows of a split.

    Args:
        reader: reads the windows.
        names: the features, in the reader's order.
        num_workers: processes that read; 0: a thread of this process reads one window ahead.
    """

    def __init__(self, reader: WindowReader, names: list[str], num_workers: int = 0) -> None:
        super().__init__(reader.plan)
        self.reader = reader
        self.names = names
        self._workers = Workers(reader, num_workers) if num_workers > 0 else None

    def read(self, epoch: int, first: int) -> Iterator[Batch]:
        per_window = self._plan.window_batches
        windows = [(epoch, w) for w in range(first // per_window, self._plan.windows)]
        skip = first % per_window
        for window in self._workers.read(windows) if self._workers else self._read_in_thread(windows):
            for batch in range(skip, len(window.bounds) - 1):
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

    def identity(self) -> dict[str, Any]:
        plan = self._plan
        return {
            "rows": plan.total_rows,
            "batch_size": plan.batch_size,
            "shuffle_buffer": plan.window_batches * plan.batch_size,
            "seed": plan.seed,
            "world_size": plan.world_size,
        }
