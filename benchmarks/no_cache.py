"""What the cache is measured against: a client that keeps nothing."""

from __future__ import annotations

import torch

from cache_backend import EmbeddingOptimizer, ops
from cache_backend.cache import Cache, CachePlan, UniqueRows
from cache_backend.memory import zeros
from cache_backend.store import Check, EmbeddingStore, ExchangeRequest, Fetch, Push
from hetrec import HetEmbeddingBagCollection

__all__ = ["NoCache", "without_cache"]

_TABLE, _PINS = 5, 6  # int32 columns of `meta` (csrc/core/cache_set.h)


class NoCache(Cache):
    """Every row of a batch is fetched for it and its update pushed after it, in one exchange a step.

    The pushes of a batch travel with the next request. Where requests run ahead by one batch, they carry the updates of
    the batch before the current one, and what they fetch misses the current batch's: the price of overlap without a
    cache.

    Args:
        most: rows that a batch can have.
        dim, optimizer, store: as for ``Cache``.
    """

    def __init__(self, most: int, dim: int, optimizer: EmbeddingOptimizer, store: EmbeddingStore) -> None:
        self._most = most
        super().__init__(32, dim, optimizer, store, 0)

    def reset(self) -> None:
        super().reset()
        # Two batches can be in flight; they use one half of the slots each, in turn.
        self.priority = self.priority[:0]  # no sets of ways
        self.meta = zeros(2 * self._most, 4, dtype=torch.int64)
        self.rows = zeros(2 * self._most, 2, self.dim + self.state_dim, dtype=torch.float32)
        self._in_use = [torch.empty(0, dtype=torch.int64)] * 2

    def plan(self, rows: UniqueRows) -> CachePlan:
        self._tick += 1
        half, count = self._tick % 2, rows.keys.numel()
        _, *push = ops.cache_cut(self.meta, self.rows, torch.cat(self._in_use))
        keys, tables, starts, clocks, deltas = (t.numpy() for t in push)
        first = half * self._most
        slots = torch.arange(first, first + count)
        self._in_use[half] = slots
        meta = self.meta[first : first + count]
        meta.zero_()
        meta[:, 0] = rows.keys
        fields = meta.view(torch.int32)
        fields[:, _TABLE] = rows.tables
        fields[:, _PINS] = 1
        request = ExchangeRequest(
            self.dim,
            self.state_dim,
            Push(tables, keys, starts, clocks, deltas),
            Check(),
            Fetch(rows.tables.numpy(), rows.keys.numpy()),
        )
        s = self.stats
        s.steps += 1
        s.lookups += rows.inverse.numel()
        s.unique += count
        s.misses += count
        self._count_request(request)
        every = torch.arange(count, dtype=torch.int32)
        return CachePlan(rows, slots, every, count, every[:0], every[:0], request)


def without_cache(collection: HetEmbeddingBagCollection, most: int) -> None:
    """Replace the caches of an open collection; ``most``: rows that a batch can have."""
    for group in collection.stream.groups:
        had = group.cache
        group.cache = NoCache(most, had.dim, had.optimizer, had._store)
