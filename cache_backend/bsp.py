"""One rank's side of synchronous steps (``cache.consistency=bsp``): a cache of rows that the store trains."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from cache_backend import ops
from cache_backend.cache import Bags, Cache, CachePlan, UniqueRows
from cache_backend.config import EmbeddingOptimizer
from cache_backend.store import Check, EmbeddingStore, ExchangeRequest, Fetch, Push, Share

__all__ = ["RankGroup", "SynchronousCache"]

_NEVER = 1 << 40  # a staleness that no row reaches: whether it is valid is the store's word alone


@dataclass(frozen=True)
class RankGroup:
    """The ranks that step together, and which of them this one is.

    Args:
        id: random, 64 bits, new for every run, the same on all of its ranks.
    """

    id: int
    rank: int
    ranks: int


class SynchronousCache(Cache):
    """Keeps rows that the store trains. A cached row is valid while no other rank has stepped it, which the store is
    asked of every row of a batch; those that nobody else stepped do not travel.

    An update hands in this rank's share of a round, which goes out with the request of the next plan, or with a flush.
    The cached row makes the same step at once, with this rank's gradient alone, and its clock advances by one. Where
    other ranks had a gradient too, the clock at the store advances by more, so that the row is found stale.

    A gradient that is not finite goes into the sum too, so that the store leaves the row's step out as one process
    would. Its clock advances all the same: every rank that had a gradient counts the step.

    Args:
        ranks: who steps together. All of them must step the same number of times.
        rows, dim, optimizer, store, policy: as for ``Cache``.
    """

    def __init__(
        self,
        rows: int,
        dim: int,
        optimizer: EmbeddingOptimizer,
        store: EmbeddingStore,
        ranks: RankGroup,
        policy: str = "lru",
    ) -> None:
        self._ranks = ranks
        self._round = 0
        self._next: Share | None = None  # no request has taken it
        self._unsent: ExchangeRequest | None = None  # a flush that failed
        super().__init__(rows, dim, optimizer, store, _NEVER, policy)
        self._asks = True

    def reset(self) -> None:
        super().reset()
        if self._next is not None:  # a step that no rank has sent: its round's number is free again
            self._next = None
            self._round -= 1
        self._unsent = None

    def plan(self, rows: UniqueRows) -> CachePlan:
        plan = super().plan(rows)
        plan.request.check.staleness = np.zeros_like(plan.request.check.staleness)
        plan.request.share = self._take()
        return plan

    def update_bags(self, plan: CachePlan, grad: Tensor, bags: Bags, scale: float, lr: float) -> Tensor:
        rows = plan.rows
        grads = ops.bag_grad(grad, rows.order, rows.splits, *bags, self.dim, scale)
        self._put(rows.tables, rows.keys, grads, lr)
        left_out = self._update(plan.slots, grads, lr, pending=False)
        self.release(plan)
        return left_out

    def update_rows(self, slots: Tensor, grads: Tensor, lr: float) -> Tensor:
        self._put(*self.rows_in(slots), grads, lr)
        return self._update(slots, grads, lr, pending=False)

    def flush(self) -> None:
        """Take part in the last round, if this rank's share is still here, and wait until it is applied."""
        if self._unsent is None:
            share = self._take()
            if share is None:
                return
            fetch = Fetch(share.tables[:0], share.keys[:0])
            self._unsent = ExchangeRequest(
                self.dim, self.state_dim, Push.nothing(self.dim + self.state_dim), Check(), fetch, share
            )
        self._count_reply(self._store.exchange(self._unsent))
        self._unsent = None

    def _put(self, tables: Tensor, keys: Tensor, grads: Tensor, lr: float) -> None:
        self.flush()  # nothing, unless two steps came without a plan between them
        self._round += 1
        step = np.array([lr, *self.optimizer.settings()], np.float32)
        arrays = (tensor.contiguous().numpy() for tensor in (tables, keys, grads))
        self._next = Share(self._ranks.id, self._round, self._ranks.rank, self._ranks.ranks, step, *arrays)

    def _take(self) -> Share | None:
        share, self._next = self._next, None
        if share is not None:
            self.stats.pushed += len(share.keys)
        return share
