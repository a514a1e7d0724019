"""TorchRec's own test model with our collections in the places of its own, beside the same model in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.test_utils.test_model import ModelInput, TestSparseNN

import hetrec
from cache_backend import CacheConfig, EmbeddingOptimizer, LocalStore
from hetrec import HetEmbeddingBagCollection

# Two widths, mean and sum, a table of two features, a feature that is empty at times.
TABLES = [
    EmbeddingBagConfig(name="t0", embedding_dim=8, num_embeddings=60, feature_names=["f0"]),
    EmbeddingBagConfig(name="t1", embedding_dim=8, num_embeddings=40, feature_names=["f1", "f2"]),
    EmbeddingBagConfig(name="t2", embedding_dim=12, num_embeddings=80, feature_names=["f3"], pooling=PoolingType.MEAN),
]
WEIGHTED = [EmbeddingBagConfig(name="w0", embedding_dim=8, num_embeddings=50, feature_names=["g0"])]
FLOATS = 10
CPU = torch.device("cpu")
LR = 0.1


def het(tables: list[EmbeddingBagConfig], is_weighted: bool) -> nn.Module:
    return HetEmbeddingBagCollection(device=torch.device("meta"), tables=tables, is_weighted=is_weighted)


def stock(tables: list[EmbeddingBagConfig], is_weighted: bool) -> nn.Module:
    return EmbeddingBagCollection(tables=tables, is_weighted=is_weighted)


def sparse_nn(
    collection: Callable[[list[EmbeddingBagConfig], bool], nn.Module],
    weighted: Callable[[list[EmbeddingBagConfig], bool], nn.Module] | None = None,
) -> TestSparseNN:
    """The model, its dense part always the same; ``collection`` makes the unweighted collection and, if no other is
    given, the weighted one."""
    torch.manual_seed(0)
    model = TestSparseNN(TABLES, FLOATS, WEIGHTED, sparse_device=torch.device("meta"))
    dense = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for part in (model.dense, model.over):
            for parameter in part.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=dense) * 0.4 - 0.2)
    model.sparse.ebc = collection(TABLES, False)
    model.sparse.weighted_ebc = (weighted or collection)(WEIGHTED, True)
    return model


def global_batches(count: int, ranks: int = 1, batch_size: int = 16) -> list[tuple[ModelInput, list[ModelInput]]]:
    """Batches of all ranks together, and the share of each."""
    torch.manual_seed(7)
    return [
        ModelInput.generate(batch_size, ranks, FLOATS, TABLES, WEIGHTED, pooling_avg=3, lengths_dtype=torch.int32)
        for _ in range(count)
    ]


def batches(count: int) -> list[ModelInput]:
    return [whole for whole, _ in global_batches(count)]


def once(values: list[ModelInput]) -> Iterator[ModelInput]:
    return iter(list(values))


def rows_of(collection: HetEmbeddingBagCollection) -> dict[str, torch.Tensor]:
    """All rows of every table as the store has them, read one by one."""
    training = collection.training
    collection.eval()
    found = {}
    for table in collection.embedding_bag_configs():
        names = [name for t in collection.embedding_bag_configs() for name in t.feature_names]
        first, n = table.feature_names[0], table.num_embeddings
        lengths = torch.zeros(len(names), n, dtype=torch.int32)
        lengths[names.index(first)] = 1
        weights = torch.ones(n) if collection.is_weighted() else None
        keys = KeyedJaggedTensor(names, torch.arange(n), weights=weights, lengths=lengths.flatten())
        found[table.name] = collection(keys)[first].detach().clone()
    collection.train(training)
    return found


def parallel(
    optimizer: EmbeddingOptimizer,
    cache: CacheConfig | None = None,
    store: LocalStore | None = None,
    model: nn.Module | None = None,
) -> DistributedModelParallel:
    model = model or sparse_nn(het)
    sharders = [hetrec.HetEmbeddingBagCollectionSharder(store or LocalStore(), cache, optimizer)]
    return DistributedModelParallel(model, device=CPU, sharders=sharders, plan=hetrec.plan(model, sharders))


def collections(model: DistributedModelParallel) -> list[hetrec.HetEmbeddingBagCollection]:
    sparse = model.module.sparse
    return [sparse.ebc.collection, sparse.weighted_ebc.collection]


def all_rows(model: DistributedModelParallel) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for collection in collections(model):
        collection.flush()
        found |= rows_of(collection)
    return found


class Inline:
    """What the pipelines do, without one."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._model, self._optimizer = model, optimizer

    def progress(self, data: Any) -> torch.Tensor:
        loss, predictions = self._model(next(data))
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return predictions
