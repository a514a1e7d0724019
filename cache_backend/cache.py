"""One rank's bounded cache of hot rows: HET's cache embedding table (VLDB'22, sections 3 and 4).

A batch goes through four calls: ``plan`` finds or makes room for its rows, pins them and cuts the request; the store
answers it; ``commit`` writes the answer into the slots; ``update`` (or ``release``) unpins them. Between plan and
commit of one batch, others may be planned, looked up and updated: what they accumulate stays pending on top of the rows
that come back. Batches are committed in the order in which they were planned, and so must the store answer them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cache_backend import ops
from cache_backend.config import POLICIES, EmbeddingOptimizer
from cache_backend.interrupts import uninterrupted
from cache_backend.memory import zeros
from cache_backend.stats import CacheStats
from cache_backend.store import Check, EmbeddingStore, ExchangeReply, ExchangeRequest, Fetch, Push

__all__ = ["WINDOW", "Bags", "Cache", "CachePlan", "UniqueRows"]

WAYS = 32
#: Coming batches that the ``lookahead`` policy can know.
WINDOW = 64
_SKETCH_BYTES = 256  # a set (csrc/core/frequency_sketch.h)
_BUCKET = 8  # entries (csrc/core/window.h)
_INITIAL_SPILL = 256
_PENDING, _TABLE = 4, 5  # int32 columns of `meta` (csrc/core/cache_set.h)


@dataclass
class UniqueRows:
    """A batch's rows. keys int64 (U,), tables int32 (U,); inverse int32 (N,): position -> row; order int32 (N,) and
    splits int32 (U + 1,): the positions of each row."""

    keys: Tensor
    tables: Tensor
    inverse: Tensor
    order: Tensor
    splits: Tensor


class Bags(NamedTuple):
    """A batch's bags, as the ops take them. bag_of int32 (N,): the bag of each position, or None where bag i is
    position i; offsets int64 (F * B + 1), feature-major; weights float32 (N,) or None; mean uint8 (F,). Where nothing
    is pooled every position is a bag of one and the same feature."""

    bag_of: Tensor | None
    offsets: Tensor
    weights: Tensor | None
    mean: Tensor


@dataclass
class CachePlan:
    """What ``plan`` decided. slots int64 (U,); fetch: rows asked for, the first ``inserted`` of them new to the cache;
    late: rows whose validity ends with updates that other batches in flight still make."""

    rows: UniqueRows
    slots: Tensor
    fetch: Tensor
    inserted: int
    late: Tensor
    checks: Tensor
    request: ExchangeRequest


class Cache:
    """The rows of all tables of one width and optimizer.

    Args:
        rows: capacity, rounded up to a multiple of 32.
        dim: weights a row.
        optimizer: trains the rows and decides how many state values they carry.
        store: where the tables live.
        staleness: the bound s.
        policy: decides which row leaves a full set (see ``CacheConfig``).
        table_staleness: other bounds for single tables, by their names.
    """

    def __init__(
        self,
        rows: int,
        dim: int,
        optimizer: EmbeddingOptimizer,
        store: EmbeddingStore,
        staleness: int,
        policy: str = "lru",
        table_staleness: Mapping[str, int] | None = None,
    ) -> None:
        self.capacity = -(-rows // WAYS) * WAYS
        self.dim = dim
        self.optimizer = optimizer
        self.state_dim = optimizer.state_dim(dim)
        self._settings = torch.tensor(optimizer.settings(), dtype=torch.float32)
        self._staleness = staleness
        self._table_staleness = dict(table_staleness or {})
        self._policy = POLICIES[policy]
        self.admits = policy in ("tiny_lfu", "lookahead")
        self.looks_ahead = policy == "lookahead"
        self.stats = CacheStats()
        self._store = store
        self._asks = not store.exclusive  # whether valid rows are checked at the store
        self._tick = 0  # the number of the batch planned last
        self._uses = 0  # unique rows of all batches planned
        self.reset()

    def reset(self) -> None:
        """Forget every row, pending deltas included, and learn the tables' initial rows from the store again."""
        slots = self.capacity + _INITIAL_SPILL
        self.tags = zeros(self.capacity, dtype=torch.uint8)
        self.priority = zeros(self.capacity, dtype=torch.int64).fill_(-1)
        self.meta = zeros(slots, 4, dtype=torch.int64)
        self.meta.view(torch.int32)[:, _TABLE] = -1
        self.rows = zeros(slots, 2, self.dim + self.state_dim, dtype=torch.float32)
        self.sketch = zeros(self.capacity // WAYS if self.admits else 0, _SKETCH_BYTES, dtype=torch.uint8)
        self.window = torch.zeros(0, _BUCKET, 2, dtype=torch.int64)
        self._coming: deque[UniqueRows] = deque()  # revealed and not yet planned
        self._unanswered: tuple[Tensor, ExchangeRequest] | None = None
        schemas = self._store.schemas()
        #: int64 (tables,): the bound s, by table id.
        self.staleness = torch.tensor(
            [self._table_staleness.get(schema.name, self._staleness) for schema in schemas], dtype=torch.int64
        )
        # The seed's 64 bits, as the int64 that torch has.
        seeds = [schema.seed - (1 << 64) if schema.seed >= 1 << 63 else schema.seed for schema in schemas]
        self._init_seeds = torch.tensor(seeds, dtype=torch.int64)
        self._init_values = torch.tensor(
            [[schema.init_low, schema.init_high, schema.init_state] for schema in schemas], dtype=torch.float32
        ).reshape(-1, 3)

    def reveal(self, rows: UniqueRows) -> None:
        """Say which rows the batch after all that were planned or revealed will use (policy ``lookahead``).

        Raises:
            ValueError: more than ``WINDOW`` batches to come.
        """
        if len(self._coming) == WINDOW:
            raise ValueError(f"at most {WINDOW} coming batches can be revealed")
        self._coming.append(rows)
        lost = self._reveal(rows, len(self._coming)) if len(self.window) else rows.keys.numel()
        while 64 * lost > rows.keys.numel():  # buckets of 8 overflow this often when two thirds are in use: double them
            buckets = max(64, rows.keys.numel() // 4, 2 * len(self.window))
            self.window = zeros(buckets, _BUCKET, 2, dtype=torch.int64)
            lost = max(self._reveal(batch, i + 1) for i, batch in enumerate(self._coming))

    def unreveal(self) -> None:
        """The batches that were revealed and not planned do not come after all."""
        self._coming.clear()
        ops.cache_unreveal(self.priority, self.window)

    def plan(self, rows: UniqueRows) -> CachePlan:
        """Pin the batch's rows and cut the request: evictions, refreshes, checks and fetches together.

        Args:
            rows: the batch's, which must be the first revealed one where batches are revealed and still to come.

        Raises:
            ValueError: another batch was revealed.
            StoreError: an earlier ``flush`` or ``settle`` failed, and fails again; nothing has changed.
        """
        self.finish_unanswered()
        if self._coming and self._coming.popleft() is not rows:
            raise ValueError("another batch was revealed to come next; plan that one, or unreveal() first")
        self._tick += 1
        slots, fetch, late, checks, check_clocks, *push, counts = ops.cache_plan(
            self.tags,
            self.priority,
            self.meta,
            self.rows,
            self.sketch,
            self.window,
            rows.keys,
            rows.tables,
            self._policy,
            self._tick,
            self._uses,
            self.staleness,
            self._asks,
        )
        inserted, evicted, bypassed, overflow, unplaced = counts.tolist()
        if unplaced:
            self._spill(slots, rows, unplaced)
        self._uses += rows.keys.numel()
        request = ExchangeRequest(
            self.dim,
            self.state_dim,
            _push_arrays(push),
            Check(
                rows.tables[checks].numpy(),
                rows.keys[checks].numpy(),
                check_clocks.numpy(),
                self.staleness[rows.tables[checks]].numpy(),
            ),
            Fetch(rows.tables[fetch].numpy(), rows.keys[fetch].numpy()),
        )
        s = self.stats
        s.steps += 1
        s.lookups += rows.inverse.numel()
        s.unique += rows.keys.numel()
        s.misses += inserted
        s.stale += fetch.numel() - inserted + late.numel()
        s.hits += rows.keys.numel() - fetch.numel() - late.numel()
        s.evicted += evicted
        s.overflow += overflow
        s.bypassed += bypassed
        self._count_request(request)
        return CachePlan(rows, slots, fetch, inserted, late, checks, request)

    def commit(self, plan: CachePlan, reply: ExchangeReply) -> None:
        """Write the answer into the slots. Rows that were kept are rebased: what is pending stays on top."""
        self._commit(plan.slots[plan.fetch], plan.inserted, reply.rows, reply.clocks, reply.fresh)
        if len(reply.stale):
            stale = plan.checks[torch.from_numpy(reply.stale).long()]
            never_fresh = torch.zeros(len(reply.stale), dtype=torch.uint8).numpy()
            self._commit(plan.slots[stale], 0, reply.stale_rows, reply.stale_clocks, never_fresh)
            self.stats.stale += len(stale)
            self.stats.hits -= len(stale)
        ops.cache_answered(self.meta, plan.slots, torch.cat([plan.fetch, plan.checks]))
        self._count_reply(reply)

    def settle(self, plan: CachePlan) -> None:
        """Refresh, now that the batches before have made their updates, the rows that these updates made invalid."""
        if plan.late.numel():
            self._push_and_fetch(plan.slots[plan.late])
            ops.cache_answered(self.meta, plan.slots, plan.late)
            plan.late = plan.late[:0]

    def lookup(self, plan: CachePlan, bags: Bags) -> Tensor:
        """Pooled rows, float32 (B, F * dim)."""
        return ops.bag_lookup(self.rows, plan.slots, plan.rows.inverse, *bags, self.dim)

    def weights_of(self, plan: CachePlan) -> Tensor:
        """A copy of the batch's rows as they are now, without their state: float32 (U, dim)."""
        return self.rows[plan.slots, 0, : self.dim]

    def update_bags(self, plan: CachePlan, grad: Tensor, bags: Bags, scale: float, lr: float) -> Tensor:
        """One optimizer step on the batch's rows with the pooled gradient, float32 (B, F * dim); unpins them.

        Returns:
            int64: indices of the rows (into U) that stay as they are, because their gradient, or the row after the
            step, is NaN or infinite.
        """
        left_out: Tensor = ops.bag_update(
            self.rows,
            self.meta,
            self.priority,
            plan.slots,
            grad,
            plan.rows.order,
            plan.rows.splits,
            *bags,
            self.dim,
            scale,
            self.optimizer.id,
            lr,
            self._settings,
        )
        self.stats.nonfinite += left_out.numel()
        return left_out

    def update_rows(self, slots: Tensor, grads: Tensor, lr: float) -> Tensor:
        """One optimizer step with grads float32 (n, dim) on slots (n,), which must be distinct. Unpins nothing. Returns
        the indices of those left out, as ``update_bags`` does."""
        return self._update(slots, grads, lr, pending=True)

    def _update(self, slots: Tensor, grads: Tensor, lr: float, pending: bool) -> Tensor:
        left_out: Tensor = ops.row_update(
            self.rows, self.meta, slots, grads, self.dim, self.optimizer.id, lr, self._settings, pending
        )
        self.stats.nonfinite += left_out.numel()
        return left_out

    def rows_in(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Whose rows are in slots (n,): table ids int32 (n,), keys int64 (n,)."""
        return self.meta.view(torch.int32)[slots, _TABLE], self.meta[slots, 0]

    def share(self) -> None:
        """Others write to the store too, from now on: valid rows are checked there."""
        self._asks = True

    def release(self, plan: CachePlan) -> None:
        """Unpin the batch's rows."""
        ops.cache_release(self.meta, self.priority, plan.slots)

    def flush(self) -> None:
        """Push every pending delta and fetch those rows again: afterwards cache and store hold the same values."""
        dirty = self.meta.view(torch.int32)[:, _PENDING].nonzero().squeeze(1)
        self._push_and_fetch(dirty)

    def read(self, rows: UniqueRows) -> Tensor:
        """The store's rows, float32 (U, dim + state). Neither cache nor store change."""
        values, fresh = self._store.read(self.dim, self.state_dim, Fetch(rows.tables.numpy(), rows.keys.numpy()))
        values_t = torch.from_numpy(values)
        ops.init_rows(
            values_t,
            torch.from_numpy(fresh),
            rows.keys,
            rows.tables,
            self._init_seeds,
            self._init_values,
            self.dim,
        )
        return values_t

    def _push_and_fetch(self, slots: Tensor) -> None:
        """Push what is pending in slots, which no request under way may ask about, and fetch their rows again."""
        self.finish_unanswered()
        if not slots.numel():
            return
        with uninterrupted():
            _, *push = ops.cache_cut(self.meta, self.rows, slots)
            tables, keys = self.rows_in(slots)
            fetch = Fetch(tables.numpy(), keys.numpy())
            request = ExchangeRequest(self.dim, self.state_dim, _push_arrays(push), Check(), fetch)
            self._unanswered = slots, request
        self._count_request(request)
        self.finish_unanswered()

    def finish_unanswered(self) -> None:
        """Exchange what ``flush`` or ``settle`` has cut. Should that fail, the deltas, which are in no slot any more,
        wait for the next try. Until then none of their slots may be given to another row, so no batch is planned."""
        if self._unanswered is None:
            return
        slots, request = self._unanswered
        reply = self._store.exchange(request)
        self._unanswered = None
        self._commit(slots, 0, reply.rows, reply.clocks, reply.fresh)
        self._count_reply(reply)

    def _commit(self, slots: Tensor, inserted: int, rows, clocks, fresh) -> None:  # type: ignore[no-untyped-def]
        ops.cache_commit(
            self.meta,
            self.rows,
            slots,
            inserted,
            torch.from_numpy(rows),
            torch.from_numpy(clocks),
            torch.from_numpy(fresh),
            self._init_seeds,
            self._init_values,
            self.dim,
        )

    def _reveal(self, rows: UniqueRows, ahead: int) -> int:
        """How many of the rows found no room in the window."""
        return int(
            ops.cache_reveal(
                self.tags, self.priority, self.meta, self.window, rows.keys, rows.tables, self._tick + ahead
            )
        )

    def _spill(self, slots: Tensor, rows: UniqueRows, unplaced: int) -> None:
        """Give rows without a slot spill rows, growing their room where it is short."""
        left = int(ops.cache_spill(self.meta, slots, rows.keys, rows.tables, self.capacity))
        if left == 0:
            return
        more = max(left, self.meta.size(0) - self.capacity)
        meta = torch.zeros(more, 4, dtype=torch.int64)
        meta.view(torch.int32)[:, _TABLE] = -1
        self.meta = torch.cat([self.meta, meta])
        self.rows = torch.cat([self.rows, torch.zeros(more, 2, self.dim + self.state_dim)])
        left = int(ops.cache_spill(self.meta, slots, rows.keys, rows.tables, self.capacity))
        assert left == 0, f"{left} of {unplaced} rows found no spill row"

    def _count_request(self, request: ExchangeRequest) -> None:
        self.stats.pushed += len(request.push.keys)
        self.stats.fetched += len(request.fetch.keys)

    def _count_reply(self, reply: ExchangeReply) -> None:
        self.stats.bytes_sent += reply.bytes_sent
        self.stats.bytes_received += reply.bytes_received
        self.stats.lags += Counter({lag_bin: n for lag_bin, n in enumerate(reply.lags.tolist()) if n})


def _push_arrays(push: list[Tensor]) -> Push:
    keys, tables, starts, clocks, deltas = (t.numpy() for t in push)
    return Push(tables, keys, starts, clocks, deltas)
