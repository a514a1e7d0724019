"""What pooled and unpooled collections share: rows of a store behind a bounded cache, from plan to update."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from typing_extensions import Self

from cache_backend import ops
from cache_backend.bsp import RankGroup, SynchronousCache
from cache_backend.cache import WINDOW, Cache, CachePlan, UniqueRows
from cache_backend.config import CacheConfig, EmbeddingOptimizer
from cache_backend.interrupts import uninterrupted
from cache_backend.stats import CacheStats
from cache_backend.store import EmbeddingStore, ExchangeReply, TableSchema
from hetrec.exchanges import Exchanges, Replies
from hetrec.features import Bags, FeatureGroup, check_features
from hetrec.rank_group import ranks_of_this_run

__all__ = ["HetCollection", "StoredTable"]

DEFAULT_CACHE_ROWS = 500_000


@dataclass
class _Inputs:
    """A batch as the caches take it: unique rows and bags of each group."""

    features: KeyedJaggedTensor
    groups: list[tuple[UniqueRows, Bags]]


@dataclass
class _GroupPlan:
    """One cache's share of a batch; ``grads``: the gradients of its lookups that backward left."""

    cache: CachePlan
    bags: Bags
    grads: list[Tensor] = field(default_factory=list)


@dataclass(eq=False)
class _BatchPlan:
    """A batch between its plan and its update. ``replies`` runs in the background; None once it is committed.
    ``answered``: the replies of the first groups, as they come. ``failed``: they ended in an error that was raised."""

    features: KeyedJaggedTensor
    groups: list[_GroupPlan]
    replies: Replies | None = None
    answered: list[ExchangeReply] = field(default_factory=list)
    failed: bool = False
    stepped: set[int] = field(default_factory=set)  # the groups that backward has stepped


@dataclass
class _Group:
    """Tables of one width share a cache."""

    features: FeatureGroup
    cache: Cache


@dataclass(frozen=True)
class StoredTable:
    """A table at its store. size: keys are 0 .. size - 1; 0: any int64."""

    name: str
    id: int
    dim: int
    state_dim: int
    size: int


class HetCollection(nn.Module):
    """Base of ``HetEmbeddingBagCollection`` and ``HetEmbeddingCollection``: everything but the shape of the output.

    A collection has no parameters and no buffers. In training mode rows come from the cache; gradients are kept until
    ``step`` applies them. In evaluation mode rows are read from the store and nothing changes: unknown keys get their
    deterministic initial row, nothing is inserted, evicted or counted.

    Raises:
        ValueError: a table is named twice, or has no feature.
    """

    def __init__(self, tables: Sequence[EmbeddingBagConfig] | Sequence[EmbeddingConfig], is_weighted: bool) -> None:
        super().__init__()
        names = [table.name for table in tables]
        if not tables:
            raise ValueError("an embedding collection needs at least one table")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"table names must be unique; more than once: {', '.join(twice)}")
        if lonely := [table.name for table in tables if not table.feature_names]:
            raise ValueError(f"these tables have no feature that reads them: {', '.join(lonely)}")
        self._tables = list(tables)
        self._weighted = is_weighted
        self._names_by_table: list[list[str]] = get_embedding_names_by_table(list(tables))
        self._output_names = [name for names in self._names_by_table for name in names]
        self._output_dims = [table.embedding_dim for table in tables for _ in table.feature_names]
        self._groups: list[_Group] = []
        self._store: EmbeddingStore | None = None
        self._lr_in_backward: Callable[[], float] | None = None
        self._borrowed = False  # a copy of an open collection: store and caches are another one's
        self._forget_batches()
        # Gives the lookup a place in the autograd graph; a plain attribute, so that no optimizer or DDP sees it.
        self._leaf = torch.empty(0, requires_grad=True)

    def _forget_batches(self) -> None:
        self._begun: list[_BatchPlan] = []  # since the last step; the last one is the current batch
        self._ahead: deque[_BatchPlan] = deque()  # planned, not yet begun, in the order in which they will be
        self._in_view: deque[_Inputs] = deque()  # revealed to the caches, not yet planned: those that follow
        self._coming: KeyedJaggedTensor | None = None  # the batch after the current one, where it is known

    def __getstate__(self) -> dict[str, Any]:
        if self.is_open:
            raise TypeError(
                "an open embedding collection holds a cache and a store and cannot be copied; close() it first"
            )
        return self.__dict__

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """What averages weights copies modules. The copy shares the rows: open, it reads those of this collection as
        evaluation does (what is not flushed yet it does not see), and cannot train; closed, it is one of its own."""
        live = [*self._groups, self._store, self.__dict__.get("_exchanges"), self._lr_in_backward]
        memo.update((id(part), part) for part in live if part is not None)
        batches = {"_begun", "_ahead", "_in_view", "_coming"}
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__ = deepcopy({k: v for k, v in self.__dict__.items() if k not in batches}, memo)
        copied._forget_batches()
        copied._borrowed = self._borrowed or self.is_open
        return copied

    def table_names(self) -> list[str]:
        return [table.name for table in self._tables]

    @property
    def is_open(self) -> bool:
        return self._store is not None

    def open(
        self,
        store: EmbeddingStore,
        cache: CacheConfig,
        optimizer: EmbeddingOptimizer,
        seed: int = 0,
        world_size: int = 1,
        expected_rows: Mapping[str, int] | None = None,
        ranks: RankGroup | None = None,
    ) -> None:
        """Declare the tables at the store and create the caches.

        Args:
            seed: of the initial rows; with the table's name it decides them.
            world_size: ranks; gradients are divided by it, as DDP's mean does.
            expected_rows: about how many keys tables without a size will see; ``cache.fraction`` is a share of these.
            ranks: for ``cache.consistency`` bsp, who steps together. None: the ranks of ``torch.distributed``, which
                all must be here, or this process alone.

        Raises:
            RuntimeError: already open.
            ValueError: ``cache.fraction`` without known table sizes; ``cache.table_staleness`` for a table that there
                is not; a table the store holds in another format.
        """
        if self.is_open:
            raise RuntimeError("the collection is already open; close() it first")
        names = self.table_names()
        if unknown := sorted(set(cache.table_staleness) - set(names)):
            raise ValueError(
                f"cache.table_staleness names {', '.join(unknown)}, but there are these tables: {', '.join(names)}"
            )
        schemas = [_schema(table, optimizer, seed) for table in self._tables]
        table_ids = dict(zip((s.name for s in schemas), store.open(schemas), strict=True))
        by_dim: dict[int, list[EmbeddingConfig | EmbeddingBagConfig]] = {}
        for table in self._tables:
            by_dim.setdefault(table.embedding_dim, []).append(table)
        capacity = _capacity(by_dim, cache, expected_rows or {})
        self._synchronous = cache.consistency == "bsp"
        if self._synchronous and ranks is None:
            ranks = ranks_of_this_run(world_size)
        for dim, tables in by_dim.items():
            readers = [(table, name) for table in tables for name in table.feature_names]
            features = FeatureGroup(
                [name for _, name in readers],
                [table_ids[table.name] for table, _ in readers],
                [table.name for table, _ in readers],
                [table.num_embeddings for table, _ in readers],
                self._means([table for table, _ in readers]),
            )
            rows = capacity[dim]
            made: Cache
            if self._synchronous:
                assert ranks is not None
                made = SynchronousCache(rows, dim, optimizer, store, ranks, cache.policy)
            else:
                made = Cache(rows, dim, optimizer, store, cache.staleness, cache.policy, cache.table_staleness)
            self._groups.append(_Group(features, made))
        self._stored_tables = [
            StoredTable(
                table.name,
                table_ids[table.name],
                table.embedding_dim,
                optimizer.state_dim(table.embedding_dim),
                table.num_embeddings,
            )
            for table in self._tables
        ]
        self._store = store
        self._exchanges = Exchanges(store)
        self._scale = 1.0 / world_size
        self._prefetch_depth = 0 if self._synchronous else cache.prefetch_depth
        self._looks_ahead = any(group.cache.looks_ahead for group in self._groups)
        self._wait_s = 0.0

    def stored_tables(self) -> tuple[EmbeddingStore, list[StoredTable]]:
        """Where the rows are."""
        self._expect_open()
        assert self._store is not None
        return self._store, self._stored_tables

    @torch.compiler.disable  # threads, a store, and state that lives on: nothing to compile
    def begin(self, features: KeyedJaggedTensor, upcoming: Sequence[KeyedJaggedTensor] = ()) -> None:
        """Start a training step: bring this batch's rows in, then plan the next batches and launch their exchanges.

        Args:
            features: the batch.
            upcoming: batches known to come, nearest first; the first ``cache.prefetch_depth`` of them are planned, the
                others tell the policy ``lookahead`` what to keep. The object that stands here must be the one a later
                ``begin`` gets: identity ties a prefetched plan to its batch.
        """
        self._expect_open()
        if self._borrowed:
            raise RuntimeError(
                "this is a copy of an open embedding collection, which reads the same rows and cannot train them: "
                "put it into evaluation mode (eval()), or close() it and open() it with a store"
            )
        if self._lr_in_backward is not None:
            self.discard()  # what no gradient reached
        self._give_back_ahead(until=features)
        self._look_ahead([features, *upcoming])
        if not self._ahead:
            self._ahead.append(self._plan(features))
        plan = self._ahead[0]
        self._commit(plan)
        self._settle(plan)
        self._begun.append(self._ahead.popleft())
        self._coming = upcoming[0] if upcoming else None
        for i, coming in enumerate(upcoming[: self._prefetch_depth]):
            if i == len(self._ahead):
                self._ahead.append(self._plan(coming))
            elif self._ahead[i].features is not coming:
                break

    def prefetch(self, features: KeyedJaggedTensor) -> None:
        """Plan a batch that comes after all that were begun or planned, and launch its exchange; ``begin`` of this very
        object will find it. With ``cache.consistency`` bsp it does nothing: the request carries the gradients of the
        step before, which is still to come."""
        self._expect_open()
        if not self._synchronous and not any(plan.features is features for plan in self._ahead):
            self._ahead.append(self._plan(features))

    @torch.compiler.disable
    def lookup(self, features: KeyedJaggedTensor) -> list[Tensor]:
        """A batch's rows, group by group (tables of equal width), as ``forward`` takes them: pooled, float32 (B,
        features * dim), or one by one, float32 (values of the group's features, dim). Begins the batch where that was
        not done."""
        self._expect_open()
        if not self.training:
            return self._read(features)
        if not self._begun or self._begun[-1].features is not features:
            self.begin(features)
        plan = self._begun[-1]
        return [_Lookup.apply(self._leaf, self, plan, i) for i in range(len(self._groups))]

    def step(self, lr: float) -> None:
        """Apply the gradients of all batches since the last step as one optimizer step a row, and unpin the batches."""
        begun, self._begun = self._begun, []
        for i in range(len(self._groups)):
            self._step_group(i, begun, lr)
        if self._synchronous and self._coming is not None and not self._ahead:
            # Not earlier: the request carries this step's gradients, and its answer is of after the step.
            self._ahead.append(self._plan(self._coming))

    def step_in_backward(self, lr: Callable[[], float]) -> None:
        """From now on backward applies each batch's gradients as it makes them, as TorchRec's fused optimizers do.

        Args:
            lr: says the learning rate, at every step.
        """
        self._lr_in_backward = lr

    def discard(self) -> None:
        """Give up the batches since the last step: their gradients are dropped, their rows unpinned."""
        begun, self._begun = self._begun, []
        for plan in begun:
            self._release(plan)

    def flush(self) -> None:
        """Push every pending delta. Afterwards the store holds what the cache holds."""
        self._expect_open()
        if self._borrowed:
            return  # it has none; those of the collection that trains are that one's to push
        for plan in self._ahead:
            self._commit(plan)
        for group in self._groups:
            group.cache.flush()
        assert self._store is not None
        self._store.flush()

    def reset(self) -> None:
        """Forget all cached rows, pending deltas included: the store was restored."""
        self._expect_open()
        self._exchanges.recover(plan.replies for plan in self._ahead if plan.replies is not None)
        self._forget_batches()
        for group in self._groups:
            group.cache.reset()

    def stats(self) -> CacheStats:
        """Counters since ``open``, over all caches."""
        if not self._groups:
            return CacheStats()
        total = sum((group.cache.stats for group in self._groups), CacheStats())
        total.steps = self._groups[0].cache.stats.steps
        total.wait_s = self._wait_s
        return total

    def close(self) -> None:
        """Flush and let go of cache and store. Closing twice is fine."""
        if not self.is_open:
            return
        try:
            if not self._borrowed:
                self.discard()
                self.flush()
        finally:
            if not self._borrowed:
                self._exchanges.shutdown()
            self._borrowed = False
            self._forget_batches()
            self._groups = []
            self._store = None

    def _look_ahead(self, stream: Sequence[KeyedJaggedTensor]) -> None:
        """Reveal to the caches, each once, the batches of ``stream`` that come after those that will be planned now."""
        if not self._looks_ahead:
            return
        coming = stream[len(self._ahead) :][:WINDOW]
        if any(known.features is not features for known, features in zip(self._in_view, coming, strict=False)):
            self._lose_view()
        if len(stream) <= 1 + self._prefetch_depth and not self._in_view:
            return  # all of them are planned at once: there is nothing beyond to know
        for features in coming[len(self._in_view) :]:
            inputs = self._inputs(features)
            self._in_view.append(inputs)
            for group, (rows, _) in zip(self._groups, inputs.groups, strict=True):
                group.cache.reveal(rows)

    def _lose_view(self) -> None:
        self._in_view.clear()
        for group in self._groups:
            group.cache.unreveal()

    def _inputs(self, features: KeyedJaggedTensor) -> _Inputs:
        check_features(features, self._weighted)
        return _Inputs(features, [group.features.rows_and_bags(features, self._weighted) for group in self._groups])

    def _plan(self, features: KeyedJaggedTensor) -> _BatchPlan:
        if self._in_view and self._in_view[0].features is not features:
            self._lose_view()
        # What may fail comes before the first cache is touched: neither a bad key nor a store that cannot be reached
        # may leave pins behind.
        for group in self._groups:
            group.cache.finish_unanswered()
        inputs = self._in_view.popleft() if self._in_view else self._inputs(features)
        with uninterrupted():  # until what was cut is on its way
            groups = [
                _GroupPlan(group.cache.plan(rows), bags)
                for group, (rows, bags) in zip(self._groups, inputs.groups, strict=True)
            ]
            plan = _BatchPlan(features, groups)
            self._send(plan)
        return plan

    def _send(self, plan: _BatchPlan) -> None:
        plan.replies = self._exchanges.submit([part.cache.request for part in plan.groups], plan.answered)
        plan.failed = False

    def _resend(self) -> None:
        """Send again, in order, what failed and what came after it."""
        waiting = [plan for plan in self._ahead if plan.replies is not None]
        self._exchanges.recover(plan.replies for plan in waiting if plan.replies is not None)
        for plan in waiting:
            self._send(plan)

    def _commit(self, plan: _BatchPlan) -> None:
        if plan.replies is None:
            return
        if plan.failed:
            self._resend()
        start = time.perf_counter()
        try:
            replies = plan.replies.result()
        except BaseException:
            # What the request carries is in no cache any more, so it must not be lost: whoever goes on sends it again.
            plan.failed = plan.replies.done() and plan.replies.exception() is not None  # Ctrl-C ends the wait only
            raise
        self._wait_s += time.perf_counter() - start
        plan.replies = None
        for group, part, reply in zip(self._groups, plan.groups, replies, strict=True):
            group.cache.commit(part.cache, reply)

    def _settle(self, plan: _BatchPlan) -> None:
        start = time.perf_counter()
        for group, part in zip(self._groups, plan.groups, strict=True):
            group.cache.settle(part.cache)
        self._wait_s += time.perf_counter() - start

    def _give_back_ahead(self, until: KeyedJaggedTensor) -> None:
        """Prefetched batches that do not come after all give their rows back."""
        while self._ahead and self._ahead[0].features is not until:
            plan = self._ahead[0]
            self._commit(plan)
            self._settle(plan)
            self._release(self._ahead.popleft())

    def _release(self, plan: _BatchPlan) -> None:
        for i, (group, part) in enumerate(zip(self._groups, plan.groups, strict=True)):
            if i not in plan.stepped:
                group.cache.release(part.cache)

    def _gradient_arrived(self, plan: _BatchPlan, i: int, grad: Tensor) -> None:
        if i in plan.stepped:
            raise RuntimeError("a batch whose gradients were applied in backward went through backward again")
        plan.groups[i].grads.append(grad)
        if self._lr_in_backward is None:
            return
        if plan not in self._begun:
            raise RuntimeError(
                "backward of a batch that was given up, because another was begun or rows were loaded since its forward"
            )
        self._step_group(i, [plan], self._lr_in_backward())
        plan.stepped.add(i)
        if len(plan.stepped) == len(self._groups):
            self._begun.remove(plan)

    def _step_group(self, i: int, plans: Sequence[_BatchPlan], lr: float) -> None:
        cache = self._groups[i].cache
        parts = [plan.groups[i] for plan in plans]
        if len(parts) == 1 and len(parts[0].grads) == 1:
            cache.update_bags(parts[0].cache, parts[0].grads[0], *parts[0].bags, self._scale, lr)
            return
        self._step_accumulated(cache, parts, lr)
        for part in parts:
            cache.release(part.cache)

    def _step_accumulated(self, cache: Cache, parts: list[_GroupPlan], lr: float) -> None:
        """Several gradients for one step: sum them per row first."""
        grads, slots = [], []
        for part in parts:
            rows = part.cache.rows
            for grad in part.grads:
                slots.append(part.cache.slots)
                grads.append(ops.bag_grad(grad, rows.order, rows.splits, *part.bags, cache.dim, self._scale))
        slots.append(torch.empty(0, dtype=torch.int64))  # a batch without rows, or without a gradient, steps too
        grads.append(torch.empty(0, cache.dim))
        distinct, inverse = torch.unique(torch.cat(slots), return_inverse=True)
        total = torch.zeros(distinct.numel(), cache.dim).index_add_(0, inverse, torch.cat(grads))
        cache.update_rows(distinct, total, lr)

    def _read(self, features: KeyedJaggedTensor) -> list[Tensor]:
        found = []
        for group, (rows, bags) in zip(self._groups, self._inputs(features).groups, strict=True):
            every = torch.arange(rows.keys.numel())
            found.append(ops.bag_lookup(group.cache.read(rows), every, rows.inverse, *bags, group.cache.dim))
        return found

    def _means(self, readers: Sequence[EmbeddingBagConfig | EmbeddingConfig]) -> list[bool] | None:
        """Whether each reader averages its bags; None where nothing is pooled."""
        raise NotImplementedError

    def _expect_open(self) -> None:
        if not self.is_open:
            raise RuntimeError(
                "the embedding collection is not open; call open(store, cache, optimizer) first. Under "
                "DistributedModelParallel its sharder does that: give it plan=hetrec.plan(model, sharders)"
            )


class _Lookup(torch.autograd.Function):
    """The lookup of one group. Its gradient goes nowhere in autograd: it stays with the batch until the step."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, collection: HetCollection, plan: _BatchPlan, i: int) -> Tensor:
        ctx.gradient_arrived = partial(collection._gradient_arrived, plan, i)
        part = plan.groups[i]
        return collection._groups[i].cache.lookup(part.cache, *part.bags)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:
        ctx.gradient_arrived(grad.float().contiguous())
        return None, None, None, None


def _schema(table: EmbeddingBagConfig | EmbeddingConfig, optimizer: EmbeddingOptimizer, seed: int) -> TableSchema:
    digest = hashlib.blake2b(f"{seed}/{table.name}".encode(), digest_size=8).digest()
    return TableSchema(
        name=table.name,
        dim=table.embedding_dim,
        optimizer=optimizer.name,
        seed=int.from_bytes(digest, "little"),
        init_low=table.get_weight_init_min(),
        init_high=table.get_weight_init_max(),
        init_state=optimizer.initial_accumulator,
    )


def _capacity(
    by_dim: Mapping[int, Sequence[EmbeddingBagConfig | EmbeddingConfig]],
    cache: CacheConfig,
    expected_rows: Mapping[str, int],
) -> dict[int, int]:
    """Cache rows of each width: the total is shared in proportion to the tables' rows, evenly where these are
    unknown."""
    tables = [table for group in by_dim.values() for table in group]
    size = {table.name: table.num_embeddings or expected_rows.get(table.name, 0) for table in tables}
    unknown = [name for name, rows in size.items() if not rows]
    if cache.fraction is not None:
        if unknown:
            raise ValueError(
                f"cache.fraction={cache.fraction} is a share of the tables' rows, and nobody knows how many these "
                f"have: {', '.join(unknown)}. Give cache.rows instead"
            )
        return {dim: max(1, round(cache.fraction * sum(size[t.name] for t in group))) for dim, group in by_dim.items()}
    rows = cache.rows if cache.rows is not None else DEFAULT_CACHE_ROWS
    if unknown:
        return {dim: max(1, rows // len(by_dim)) for dim in by_dim}
    total = sum(size.values())
    return {dim: max(1, rows * sum(size[t.name] for t in group) // total) for dim, group in by_dim.items()}
