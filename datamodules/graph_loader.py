"""The loader of a graph's batches: sampled by this process or by worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from datamodules.epochs import EpochLoader
from datamodules.graph_reader import GraphReader, Sample
from datamodules.workers import Workers
from hetrec.data import NODE, GraphBatch

__all__ = ["GraphLoader"]


class GraphLoader(EpochLoader[GraphBatch]):
    """Batches of one rank's share of the seeds of a split.

    Args:
        reader: samples the batches.
        num_workers: processes that sample; 0: whoever iterates does (the thread of a
            :class:`~hetrec.lookahead.LookaheadLoader`).
    """

    def __init__(self, reader: GraphReader, num_workers: int = 0) -> None:
        super().__init__(reader.plan)
        self.reader = reader
        self._workers = Workers(reader, num_workers) if num_workers > 0 else None

    def read(self, epoch: int, first: int) -> Iterator[GraphBatch]:
        requests = [(epoch, number) for number in range(first, len(self))]
        samples = self._workers.read(requests) if self._workers else (self.reader.read(*r) for r in requests)
        for sample in samples:
            yield self._batch(sample)

    def _batch(self, sample: Sample) -> GraphBatch:
        return GraphBatch(
            torch.from_numpy(sample.dense),
            KeyedJaggedTensor(
                [NODE, *self.reader.graph.columns],
                torch.from_numpy(sample.values),
                lengths=torch.from_numpy(sample.lengths),
                stride=sum(sample.nodes_per_hop),
            ),
            torch.from_numpy(sample.labels),
            edge_index=torch.from_numpy(sample.edge_index),
            nodes_per_hop=sample.nodes_per_hop,
            edges_per_hop=sample.edges_per_hop,
        )

    def identity(self) -> dict[str, Any]:
        plan = self._plan
        return {
            "seeds": plan.total_rows,
            "nodes": self.reader.graph.nodes,
            "edges": self.reader.graph.edges,
            "batch_size": plan.batch_size,
            "fanouts": list(self.reader.fanouts),
            "seed": plan.seed,
            "world_size": plan.world_size,
        }
