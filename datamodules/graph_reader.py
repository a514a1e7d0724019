"""Makes the batches of a graph: seeds in the order of the epoch, their neighbourhood, and what is known of the nodes.

Imports neither Lightning nor TorchRec, so that worker processes start quickly.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from cache_backend import ops
from datamodules.graph_format import Graph
from datamodules.plan import EpochPlan, Unit

__all__ = ["GraphReader", "Sample", "seed_plan"]

Int64 = npt.NDArray[np.int64]


@dataclass
class Sample:
    """What :class:`hetrec.data.GraphBatch` is made of, as arrays; n nodes, S of them seeds.

    Attributes:
        values: int64, the n nodes' ids, the seeds first; then the keys of the categorical columns, column after column.
        lengths: int32 ((1 + columns) * n), keys a node, in the same order.
        dense: float32 (n, dense columns).
        labels: int64 (S).
        edge_index: int64 (2, E').
        nodes_per_hop, edges_per_hop: one number for the seeds and each hop, and one for each hop.
    """

    values: Int64
    lengths: npt.NDArray[np.int32]
    dense: npt.NDArray[np.float32]
    labels: Int64
    edge_index: Int64
    nodes_per_hop: list[int]
    edges_per_hop: list[int]


def seed_plan(seeds: int, batch_size: int, shuffle: bool, seed: int, rank: int, world_size: int) -> EpochPlan:
    """How an epoch divides so many seeds over ranks and batches: as the rows of one file that has them all."""
    unit = Unit(file=0, first_group=0, groups=1, position=0, rows=seeds, kept=seeds)
    return EpochPlan((unit,), batch_size, batch_size, shuffle, seed, rank, world_size)


@dataclass
class GraphReader:
    """Reads batch after batch.

    A batch is a function of the graph, the settings, the epoch and its number. The ranks' batches of one step have
    different numbers, so that a node that two of them sample gets two samples of its neighbours.

    Args:
        graph: what is sampled.
        seeds: int64, the nodes of the split, in their order where nothing is shuffled.
        plan: of ``seed_plan``.
        fanouts: neighbours a node in each hop; -1: all.
        every_epoch_differs: whether each epoch has another order and other neighbours, or all are as epoch 0.
    """

    graph: Graph
    seeds: Int64
    plan: EpochPlan
    fanouts: tuple[int, ...]
    every_epoch_differs: bool
    _order: tuple[int, Int64] | None = field(default=None, init=False, repr=False)

    def read(self, epoch: int, number: int) -> Sample:
        """Batch ``number`` of an epoch."""
        epoch = epoch if self.every_epoch_differs else 0
        plan, graph = self.plan, self.graph
        first = plan.rank_range[0]
        part = slice(first + plan.batch_start(number), first + plan.batch_start(number + 1))
        seeds = np.ascontiguousarray(self._of_epoch(epoch)[part])
        nodes, edge_index, nodes_per_hop, edges_per_hop = ops.sample_neighbors(
            torch.from_numpy(graph.colptr),
            torch.from_numpy(graph.row),
            torch.from_numpy(seeds),
            list(self.fanouts),
            plan.seed,
            epoch,
            number * plan.world_size + plan.rank,
        )
        ids: Int64 = nodes.numpy()
        features = [(ids, np.ones(len(ids), dtype=np.int32)), *(_bags(*bags, ids) for bags in graph.bags.values())]
        return Sample(
            values=np.concatenate([keys for keys, _ in features]),
            lengths=np.concatenate([lengths for _, lengths in features]),
            dense=graph.dense[ids],
            labels=graph.labels[seeds],
            edge_index=edge_index.numpy(),
            nodes_per_hop=nodes_per_hop.tolist(),
            edges_per_hop=edges_per_hop.tolist(),
        )

    def _of_epoch(self, epoch: int) -> Int64:
        """The seeds in the order of an epoch, the same on every rank."""
        if not self.plan.shuffle:
            return self.seeds
        if self._order is None or self._order[0] != epoch:
            order = np.random.default_rng([self.plan.seed, epoch]).permutation(len(self.seeds))
            self._order = (epoch, self.seeds[order])
        return self._order[1]


def _bags(starts: Int64, keys: Int64, nodes: Int64) -> tuple[Int64, npt.NDArray[np.int32]]:
    """The keys of nodes, node after node, and how many each has."""
    begin = starts[nodes]
    lengths = starts[nodes + 1] - begin
    before = np.cumsum(lengths) - lengths
    return keys[np.arange(int(lengths.sum())) + np.repeat(begin - before, lengths)], lengths.astype(np.int32)
