"""The collections as TorchRec's sharded modules: input stays where it is, rows come from the store.

``input_dist`` plans a batch and launches its exchange in the background; ``compute`` waits for it and looks up.
TorchRec's pipelines call ``input_dist`` of batch t+1 before ``compute`` of batch t, so the exchange runs while batch t
computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList, ShardedEmbeddingModule
from torchrec.distributed.train_pipeline.runtime_forwards import BaseForward
from torchrec.distributed.types import Awaitable, LazyAwaitable, NoWait, ShardingEnv
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.streamable import Multistreamable
from typing_extensions import Self

from cache_backend.config import EmbeddingOptimizer
from hetrec.collection import HetCollection, StoredTable
from hetrec.distributed.fused_optimizer import HetFusedOptimizer
from hetrec.distributed.state_dict import assign_share, part_names, read_share, write_shares
from hetrec.embedding import HetEmbeddingCollection
from hetrec.embedding_bag import HetEmbeddingBagCollection

__all__ = ["HetContext", "ShardedHetEmbeddingBagCollection", "ShardedHetEmbeddingCollection"]

Out = TypeVar("Out")


@dataclass
class HetContext(Multistreamable):
    """What a pipeline keeps for a batch between its ``input_dist`` and its ``compute``."""

    features: KeyedJaggedTensor | None = None
    #: TorchRec goes through these, one per sharding type with an all-to-all; there is none.
    sharding_contexts: list[Any] = field(default_factory=list)

    def record_stream(self, stream: torch.Stream) -> None:
        """Everything here lives in host memory."""


class _Output(LazyAwaitable[Out]):
    def __init__(self, make: Callable[[], Out]) -> None:
        super().__init__()
        self._make = make

    def _wait_impl(self) -> Out:
        return self._make()


class _ShardedHetCollection(
    ShardedEmbeddingModule[KJTList, list[Tensor], Out, HetContext], FusedOptimizerModule, Generic[Out]
):
    """Args:
    collection: open.
    optimizer: trains the rows; they are stepped in backward.
    env: the ranks.
    fqn: the module's name in the model.
    """

    #: What TorchRec's own module calls its tables.
    TABLES: ClassVar[str]

    def __init__(
        self, collection: HetCollection, optimizer: EmbeddingOptimizer, env: ShardingEnv, fqn: str | None
    ) -> None:
        super().__init__()
        self.collection = collection
        self._optimizer = HetFusedOptimizer(
            optimizer, [f"{self.TABLES}.{name}.weight" for name in collection.table_names()]
        )
        self._env = env
        self._fqn = fqn
        collection.step_in_backward(lambda: self._optimizer.lr)

    @property
    def fused_optimizer(self) -> HetFusedOptimizer:
        return self._optimizer

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        return type(self.collection)

    def train(self, mode: bool = True) -> Self:
        """Entering evaluation is collective: afterwards all ranks read the same rows."""
        if self.training and not mode:
            self.synchronise()
        return super().train(mode)

    def synchronise(self) -> None:
        """Push what every rank's cache holds back (collective)."""
        self.collection.flush()
        self._wait_for_all()

    def _wait_for_all(self) -> None:
        if self._env.process_group is not None and self._env.world_size > 1:
            dist.barrier(self._env.process_group)

    def _of_all(self, mine: list[str]) -> list[list[str]]:
        """What every rank says, by rank."""
        if self._env.process_group is None or self._env.world_size == 1:
            return [mine]
        said: list[list[str]] = [[]] * self._env.world_size
        dist.all_gather_object(said, mine, self._env.process_group)
        return said

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """This rank's share of the rows (collective)."""
        self.synchronise()
        store, tables = self.collection.stored_tables()
        write_shares(store, tables, self._env.rank, self._env.world_size, destination, f"{prefix}{self.TABLES}")
        self._wait_for_all()  # whoever goes on training pushes

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Replace all rows of the tables by the shares of all ranks together (collective).

        A table is loaded if every rank's share of it is there and fits, and otherwise left as it is. Batches under way
        are given up; a pipeline plans anew what it has prefetched.
        """
        store, tables = self.collection.stored_tables()
        within = f"{prefix}{self.TABLES}"
        shares: list[dict[str, Tensor] | None] = []
        found: list[str] = []  # of each table: there, absent or wrong
        for table in tables:
            errors: list[str] = []
            shares.append(read_share(table, state_dict, within, missing_keys, errors))
            found.append("there" if shares[-1] is not None else "wrong" if errors else "absent")
            error_msgs += errors
        loaded: list[tuple[StoredTable, dict[str, Tensor]]] = []
        for table, share, by_rank in zip(tables, shares, zip(*self._of_all(found), strict=True), strict=True):
            if share is not None and set(by_rank) == {"there"}:
                loaded.append((table, share))
            elif len(set(by_rank)) > 1:
                others = ", ".join(f"{rank} ({what})" for rank, what in enumerate(by_rank) if what != "there")
                error_msgs.append(f"{within}.{table.name} is not loaded, because of the state dicts of ranks {others}")
        if strict:
            known = {f"{within}.{table.name}.{part}" for table in tables for part in part_names(table)}
            unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in known]
        if not loaded:
            return
        self.synchronise()  # there may be tables that are not loaded; and from here on nobody pushes
        self.collection.reset()
        if self._env.rank == 0:
            store.erase([table.id for table, _ in loaded])
        self._wait_for_all()
        for table, share in loaded:
            assign_share(store, table, share)
        self._wait_for_all()

    def create_context(self) -> HetContext:
        return HetContext()

    def input_dist(self, ctx: HetContext, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KJTList]]:
        ctx.features = features
        if self.training:
            self.collection.prefetch(features)
        # Pipelines take these apart and build their own awaitables around the innermost ones.
        return KJTListSplitsAwaitable([NoWait(NoWait(features))], ctx, self._fqn, ["data_parallel"])

    def compute(self, ctx: HetContext, dist_input: KJTList) -> list[Tensor]:
        (features,) = dist_input
        return self.collection.lookup(features)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A pipeline puts an object in the place of `forward` that answers with the batch it prefetched, whatever it is
        # asked about: evaluating the model between two training steps would eat the next training batch.
        forward = self.__dict__.get("forward")
        if isinstance(forward, BaseForward):
            ctx = forward.get_context().module_contexts.get(forward.name)
            if not isinstance(ctx, HetContext) or not any(features is ctx.features for features in args):
                return type(self).forward(self, *args, **kwargs)
        return super().__call__(*args, **kwargs)


class ShardedHetEmbeddingBagCollection(_ShardedHetCollection[KeyedTensor]):
    """``HetEmbeddingBagCollection`` under ``DistributedModelParallel``."""

    TABLES = "embedding_bags"
    collection: HetEmbeddingBagCollection

    def output_dist(self, ctx: HetContext, output: list[Tensor]) -> LazyAwaitable[KeyedTensor]:
        return _Output(lambda: self.collection.output(output))


class ShardedHetEmbeddingCollection(_ShardedHetCollection[dict[str, JaggedTensor]]):
    """``HetEmbeddingCollection`` under ``DistributedModelParallel``."""

    TABLES = "embeddings"
    collection: HetEmbeddingCollection

    def output_dist(self, ctx: HetContext, output: list[Tensor]) -> LazyAwaitable[dict[str, JaggedTensor]]:
        features = ctx.features
        assert features is not None
        return _Output(lambda: self.collection.output(features, output))
