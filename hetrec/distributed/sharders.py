"""What ``DistributedModelParallel`` asks for: how our collections become sharded modules."""

from __future__ import annotations

from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import nn
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ModuleSharder, ShardedModule, ShardingEnv

from cache_backend.config import CacheConfig, EmbeddingOptimizer
from cache_backend.store import EmbeddingStore
from hetrec.collection import HetCollection
from hetrec.distributed.sharded import ShardedHetEmbeddingBagCollection, ShardedHetEmbeddingCollection
from hetrec.embedding import HetEmbeddingCollection
from hetrec.embedding_bag import HetEmbeddingBagCollection

__all__ = ["HetEmbeddingBagCollectionSharder", "HetEmbeddingCollectionSharder", "HetSharder"]

C = TypeVar("C", bound=HetCollection)


class HetSharder(ModuleSharder[C], Generic[C]):
    """Opens a collection on a store. Can be pickled; nothing connects before a module is sharded.

    Args:
        store: where the tables live. Several ranks need one that they share (``RemoteStore``).
        cache: the settings of every rank's cache.
        optimizer: trains the rows; its learning rate is that of the sharded module's ``fused_optimizer``.
        seed: of the initial rows.
    """

    UNSHARDED: type[C]
    #: What it becomes.
    SHARDED: ClassVar[type[ShardedModule[Any, Any, Any, Any]]]

    def __init__(
        self,
        store: EmbeddingStore,
        cache: CacheConfig | None = None,
        optimizer: EmbeddingOptimizer | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self._store = store
        self._cache = cache if cache is not None else CacheConfig()
        self._optimizer = optimizer if optimizer is not None else EmbeddingOptimizer()
        self._seed = seed

    def shard(
        self,
        module: C,
        params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedModule[Any, Any, Any, Any]:
        if env.world_size > 1 and self._store.exclusive:
            raise ValueError(
                f"{env.world_size} ranks cannot share a {type(self._store).__name__}, which lives in one process; use "
                "a RemoteStore"
            )
        module.open(self._store, self._cache, self._optimizer, seed=self._seed, world_size=env.world_size)
        sharded: ShardedModule[Any, Any, Any, Any] = self.SHARDED(module, self._optimizer, env, module_fqn)
        return sharded

    @property
    def module_type(self) -> type[C]:
        return self.UNSHARDED

    def shardable_parameters(self, module: C) -> dict[str, nn.Parameter]:
        """None: the rows live on the store. ``hetrec.plan`` plans them, TorchRec's planner cannot."""
        return {}


class HetEmbeddingBagCollectionSharder(HetSharder[HetEmbeddingBagCollection]):
    """Shards ``HetEmbeddingBagCollection`` (see ``HetSharder``)."""

    UNSHARDED = HetEmbeddingBagCollection
    SHARDED = ShardedHetEmbeddingBagCollection


class HetEmbeddingCollectionSharder(HetSharder[HetEmbeddingCollection]):
    """Shards ``HetEmbeddingCollection`` (see ``HetSharder``)."""

    UNSHARDED = HetEmbeddingCollection
    SHARDED = ShardedHetEmbeddingCollection
