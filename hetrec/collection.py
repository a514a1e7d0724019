"""What pooled and unpooled collections share: rows of a store behind a bounded cache, as a module."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from typing_extensions import Self

from cache_backend.bsp import RankGroup, SynchronousCache
from cache_backend.cache import Bags, Cache
from cache_backend.config import CacheConfig, EmbeddingOptimizer
from cache_backend.stats import CacheStats
from cache_backend.store import EmbeddingStore, TableSchema
from hetrec.batch_stream import BatchStream, Group
from hetrec.cached_batch import CachedBatch, Graph
from hetrec.features import FeatureGroup, check_features
from hetrec.lookups import CachedLookup, Pooled
from hetrec.rank_group import ranks_of_this_run

__all__ = ["HetCollection", "StoredTable"]

DEFAULT_CACHE_ROWS = 500_000


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
        self._stream: BatchStream | None = None
        self._borrowed = False  # a copy of an open collection: the stream is another one's to close
        # Gives the lookup a place in the autograd graph; a plain attribute, so that no optimizer or DDP sees it.
        self._leaf = torch.empty(0, requires_grad=True)

    def __getstate__(self) -> dict[str, Any]:
        if self.is_open:
            raise TypeError(
                "an open embedding collection holds a cache and a store and cannot be sent elsewhere; close() it first"
            )
        return self.__dict__

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """What averages a model's parameters (SWA, EMA) copies the model. Rows are no parameters: the copy of an open
        collection reads and trains the same ones, until either is closed."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        if self._stream is not None:
            memo[id(self._stream)] = self._stream
        copied.__dict__.update({name: deepcopy(value, memo) for name, value in self.__dict__.items()})
        copied._borrowed = self._borrowed or self.is_open
        return copied

    def table_names(self) -> list[str]:
        return [table.name for table in self._tables]

    @property
    def is_open(self) -> bool:
        return self._stream is not None and self._stream.is_open

    @property
    def stream(self) -> BatchStream:
        """The batches under way, and the caches they go through.

        Raises:
            RuntimeError: the collection is not open.
        """
        if self._stream is None or not self._stream.is_open:
            raise RuntimeError(
                "the embedding collection is not open; call open(store, cache, optimizer) first. Under "
                "DistributedModelParallel its sharder does that: give it plan=hetrec.plan(model, sharders)"
            )
        return self._stream

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
        synchronous = cache.consistency == "bsp"
        if synchronous and ranks is None:
            ranks = ranks_of_this_run(world_size)
        groups = []
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
            if synchronous:
                assert ranks is not None
                made = SynchronousCache(rows, dim, optimizer, store, ranks, cache.policy)
            else:
                made = Cache(rows, dim, optimizer, store, cache.staleness, cache.policy, cache.table_staleness)
            groups.append(Group(features, made))
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
        self._stream = BatchStream(
            store,
            groups,
            optimizer,
            {id_: name for name, id_ in table_ids.items()},
            self._weighted,
            scale=1.0 / world_size,
            synchronous=synchronous,
            prefetch_depth=0 if synchronous else cache.prefetch_depth,
        )
        _share_tables(self._stream, set(names))

    def stored_tables(self) -> tuple[EmbeddingStore, list[StoredTable]]:
        """Where the rows are."""
        return self.stream.store, self._stored_tables

    @torch.compiler.disable  # threads, a store, and state that lives on: nothing to compile
    def begin(self, features: KeyedJaggedTensor, upcoming: Sequence[KeyedJaggedTensor] = ()) -> None:
        """Start a training step: bring this batch's rows in, then plan the next batches and launch their exchanges.

        Args:
            features: the batch.
            upcoming: batches known to come, nearest first; the first ``cache.prefetch_depth`` of them are planned, the
                others tell the policy ``lookahead`` what to keep. The object that stands here must be the one a later
                ``begin`` gets: identity ties a prefetched plan to its batch.
        """
        self.stream.begin(features, upcoming)

    def prefetch(self, features: KeyedJaggedTensor) -> None:
        """Plan a batch that comes after all that were begun or planned, and launch its exchange; ``begin`` of this very
        object will find it. With ``cache.consistency`` bsp it does nothing: the request carries the gradients of the
        step before, which is still to come."""
        self.stream.prefetch(features)

    @torch.compiler.disable
    def lookup(self, features: KeyedJaggedTensor) -> list[Tensor]:
        """A batch's rows, group by group (tables of equal width), as ``forward`` takes them: pooled, float32 (B,
        features * dim), or one by one, float32 (values of the group's features, dim).

        In training, begins the batch where that was not done: it may be the very object that was begun, or, with
        weighted bags, one with the same bags under other weights, as a feature processor makes it.
        """
        stream = self.stream
        if self.training:
            return self._lookup_to_train(stream, stream.current(features), features)
        batch = stream.view(features)
        found = []
        for i, (group, rows) in enumerate(zip(stream.groups, batch.rows, strict=True)):
            bags = self._bags(stream, batch, features, i)
            found.append(Pooled.apply(bags.weights, group.cache.read(rows), rows.inverse, bags, group.cache.dim))
        return found

    def _lookup_to_train(self, stream: BatchStream, batch: CachedBatch, features: KeyedJaggedTensor) -> list[Tensor]:
        if features is not batch.features:
            check_features(features, self._weighted)
        graph = Graph()
        found = []
        for i in range(len(stream.groups)):
            bags = self._bags(stream, batch, features, i)
            found.append(CachedLookup.apply(self._leaf, bags.weights, graph, stream, batch, i, bags))
        batch.looked_up(graph)
        return found

    def _bags(self, stream: BatchStream, batch: CachedBatch, features: KeyedJaggedTensor, i: int) -> Bags:
        bags = batch.bags[i]
        return bags._replace(weights=stream.groups[i].features.weights(features)) if self._weighted else bags

    def step(self, lr: float) -> None:
        """Apply the gradients of all batches since the last step as one optimizer step a row, and unpin the batches.

        A row whose gradient is not finite, or that would not be afterwards, stays as it is
        (``EmbeddingOptimizer.nonfinite``).

        Raises:
            ValueError: there is such a row, and ``nonfinite`` is ``error``.
        """
        self.stream.step(lr)

    def step_in_backward(self, lr: Callable[[], float]) -> None:
        """From now on backward applies each batch's gradients as it makes them, as TorchRec's fused optimizers do.

        Args:
            lr: says the learning rate, at every step.
        """
        self.stream.step_in_backward(lr)

    def discard(self) -> None:
        """Give up the batches since the last step: their gradients are dropped, their rows unpinned."""
        self.stream.discard()

    def flush(self) -> None:
        """Push every pending delta. Afterwards the store holds what the cache holds."""
        self.stream.flush()

    def reset(self) -> None:
        """Forget all cached rows, pending deltas included: the store was restored."""
        self.stream.reset()

    def stats(self) -> CacheStats:
        """Counters since ``open``, over all caches."""
        return CacheStats() if not self.is_open else self.stream.stats()

    def close(self) -> None:
        """Flush and let go of cache and store; a copy of an open collection only lets go. Closing twice is fine."""
        if self._stream is not None and not self._borrowed:
            self._stream.close()
        self._stream, self._borrowed = None, False

    def _means(self, readers: Sequence[EmbeddingBagConfig | EmbeddingConfig]) -> list[bool] | None:
        """Whether each reader averages its bags; None where nothing is pooled."""
        raise NotImplementedError


#: Who has opened tables at a store. A store that has one client only does not ask whether rows are stale; two
#: collections of one process that read the same table are two clients.
_STREAMS: WeakKeyDictionary[EmbeddingStore, WeakKeyDictionary[BatchStream, set[str]]] = WeakKeyDictionary()


def _share_tables(stream: BatchStream, tables: set[str]) -> None:
    others = _STREAMS.setdefault(stream.store, WeakKeyDictionary())
    sharing = [other for other, theirs in others.items() if other.is_open and tables & theirs]
    for each in (*sharing, stream) if sharing else ():
        for group in each.groups:
            group.cache.share()
    others[stream] = tables


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
