"""Plain torch beside the collection: dense tables, torch.nn.functional.embedding_bag, optimizers written out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor, PoolingType

from cache_backend import CacheConfig, EmbeddingOptimizer, EmbeddingStore, LocalStore
from hetrec import HetEmbeddingBagCollection


def table(
    name: str, features: Sequence[str], rows: int = 60, dim: int = 4, pooling: PoolingType = PoolingType.SUM
) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name,
        embedding_dim=dim,
        num_embeddings=rows,
        feature_names=list(features),
        pooling=pooling,
        weight_init_min=-0.5,
        weight_init_max=0.5,
    )


def opened(
    tables: list[EmbeddingBagConfig],
    optimizer: EmbeddingOptimizer | None = None,
    cache: CacheConfig | None = None,
    store: EmbeddingStore | None = None,
    is_weighted: bool = False,
    world_size: int = 1,
) -> HetEmbeddingBagCollection:
    collection = HetEmbeddingBagCollection(tables, is_weighted=is_weighted)
    collection.open(
        LocalStore() if store is None else store,
        cache or CacheConfig(rows=256),
        optimizer or EmbeddingOptimizer("sgd", lr=0.1),
        world_size=world_size,
    )
    return collection


def batch(
    features: Sequence[str], bags: Sequence[Sequence[int]], weights: Sequence[float] | None = None
) -> KeyedJaggedTensor:
    """A batch from one list of keys per bag, feature-major."""
    keys = [key for bag in bags for key in bag]
    return KeyedJaggedTensor(
        keys=list(features),
        values=torch.tensor(keys, dtype=torch.int64),
        lengths=torch.tensor([len(bag) for bag in bags], dtype=torch.int32),
        weights=None if weights is None else torch.tensor(weights),
    )


def random_batch(
    features: Sequence[str],
    samples: int,
    rows: int,
    generator: torch.Generator,
    longest: int = 3,
    is_weighted: bool = False,
) -> KeyedJaggedTensor:
    """Bags of 0 to ``longest`` keys; low keys are frequent."""
    lengths = torch.randint(0, longest + 1, (len(features) * samples,), generator=generator, dtype=torch.int32)
    n = int(lengths.sum())
    values = (torch.rand(n, generator=generator) ** 3 * rows).long()
    weights = torch.rand(n, generator=generator) if is_weighted else None
    return KeyedJaggedTensor(keys=list(features), values=values, lengths=lengths, weights=weights)


def stored_rows(collection: HetEmbeddingBagCollection, config: EmbeddingBagConfig) -> Tensor:
    """All rows of a table as evaluation sees them, (rows, dim)."""
    names = [name for t in collection.embedding_bag_configs() for name in t.feature_names]
    n = config.num_embeddings
    bags = {name: ([[key] for key in range(n)] if name == config.feature_names[0] else [[]] * n) for name in names}
    distinct = list(dict.fromkeys(names))
    every = batch(distinct, [bag for name in distinct for bag in bags[name]])
    if collection.is_weighted():
        every = KeyedJaggedTensor(distinct, every.values(), torch.ones(n), lengths=every.lengths())
    training = collection.training
    collection.eval()
    name = config.feature_names[0]
    out = collection(every)[name if names.count(name) == 1 else f"{name}@{config.name}"].clone()
    collection.train(training)
    return out


class PlainBags:
    """Every table dense. ``dtype`` float64 is the true answer, float32 the usual one."""

    def __init__(
        self, collection: HetEmbeddingBagCollection, optimizer: EmbeddingOptimizer, dtype: torch.dtype
    ) -> None:
        self.configs = collection.embedding_bag_configs()
        self.weights = {c.name: stored_rows(collection, c).to(dtype).requires_grad_() for c in self.configs}
        width = {"sgd": 0, "adagrad": None, "rowwise_adagrad": 1}[optimizer.name]
        self.states = {
            name: torch.full((w.shape[0], w.shape[1] if width is None else width), optimizer.initial_accumulator).to(
                dtype
            )
            for name, w in self.weights.items()
        }
        self.optimizer = optimizer

    def __call__(self, features: KeyedJaggedTensor) -> Tensor:
        pooled = []
        jagged = features.to_dict()
        for config in self.configs:
            for name in config.feature_names:
                weight, feature = self.weights[config.name], jagged[name]
                bag_weights = feature.weights_or_none()
                out = embedding_bag(
                    feature.values(),
                    weight,
                    feature.offsets()[:-1].long(),
                    mode="sum",
                    per_sample_weights=None if bag_weights is None else bag_weights.to(weight.dtype),
                )
                if config.pooling == PoolingType.MEAN:
                    out = out / feature.lengths().clamp(min=1)[:, None]
                pooled.append(out)
        return torch.cat(pooled, 1)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for name, w in self.weights.items():
            grad, w.grad = w.grad, None
            if grad is None:
                continue
            state = self.states[name]
            if self.optimizer.name == "sgd":
                w -= lr * grad
                continue
            state += grad.square() if self.optimizer.name == "adagrad" else grad.square().mean(1, keepdim=True)
            w -= lr * grad / (state.sqrt() + self.optimizer.eps)
