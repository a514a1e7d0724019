"""The collections as TorchRec's sharded modules: input stays where it is, rows come from the store.

``input_dist`` plans a batch and launches its exchange in the background; ``compute`` waits for it and looks up.
TorchRec's pipelines call ``input_dist`` of batch t+1 before ``compute`` of batch t, so the exchange runs while batch t
computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

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

from hetrec.collection import HetCollection
from hetrec.distributed.fused_optimizer import HetFusedOptimizer
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
    optimizer: says the learning rate; rows are stepped in backward.
    env: the ranks.
    fqn: the module's name in the model.
    """

    def __init__(
        self, collection: HetCollection, optimizer: HetFusedOptimizer, env: ShardingEnv, fqn: str | None
    ) -> None:
        super().__init__()
        self.collection = collection
        self._optimizer = optimizer
        self._env = env
        self._fqn = fqn
        collection.step_in_backward(lambda: optimizer.lr)

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
        if self._env.process_group is not None and self._env.world_size > 1:
            dist.barrier(self._env.process_group)

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

    collection: HetEmbeddingBagCollection

    def output_dist(self, ctx: HetContext, output: list[Tensor]) -> LazyAwaitable[KeyedTensor]:
        return _Output(lambda: self.collection.output(output))


class ShardedHetEmbeddingCollection(_ShardedHetCollection[dict[str, JaggedTensor]]):
    """``HetEmbeddingCollection`` under ``DistributedModelParallel``."""

    collection: HetEmbeddingCollection

    def output_dist(self, ctx: HetContext, output: list[Tensor]) -> LazyAwaitable[dict[str, JaggedTensor]]:
        features = ctx.features
        assert features is not None
        return _Output(lambda: self.collection.output(features, output))
