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
        self,
        collection: HetEmbeddingBagCollection,
        optimizer: EmbeddingOptimizer,
        dtype: torch.dtype,
        world_size: int = 1,
    ) -> None:
        self.scale = 1 / world_size
        self.configs = collection.embedding_bag_configs()
        self.weights = {c.name: stored_rows(collection, c).to(dtype).requires_grad_() for c in self.configs}
        self.rows = {name: PlainOptimizer(optimizer, weight) for name, weight in self.weights.items()}
        self.touched = {name: torch.zeros(len(weight), dtype=torch.bool) for name, weight in self.weights.items()}

    def __call__(self, features: KeyedJaggedTensor) -> Tensor:
        pooled = []
        jagged = features.to_dict()
        for config in self.configs:
            for name in config.feature_names:
                weight, feature = self.weights[config.name], jagged[name]
                self.touched[config.name][feature.values()] = True
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

    def step(self, lr: float) -> None:
        for name, weight in self.weights.items():
            if weight.grad is not None:
                self.rows[name].step(weight.grad * self.scale, self.touched[name], lr)
            weight.grad = None
            self.touched[name][:] = False


class PlainOptimizer:
    """The formulas of ``EmbeddingOptimizer``'s docstring on a dense table, in its dtype; rows that no batch touched
    stay as they are."""

    def __init__(self, optimizer: EmbeddingOptimizer, weight: Tensor) -> None:
        self.optimizer = optimizer
        self.weight = weight.detach()
        self.accumulator = torch.full_like(self.weight, optimizer.initial_accumulator)  # Adagrad's
        self.m, self.v = torch.zeros_like(self.weight), torch.zeros_like(self.weight)  # Adam's
        self.steps = torch.zeros_like(self.weight[:, :1])

    def step(self, grad: Tensor, touched: Tensor, lr: float) -> None:
        o, w, g = self.optimizer, self.weight[touched], grad[touched]
        if o.max_gradient is not None:
            g = g.clamp(-o.max_gradient, o.max_gradient)
        if o.max_gradient_norm is not None:
            norm = g.norm(dim=1, keepdim=True)
            g = torch.where(norm > o.max_gradient_norm, g * o.max_gradient_norm / norm, g)
        if o.name == "adam":
            self.steps[touched] += 1
            t = self.steps[touched].double()  # 1 - beta^t would lose digits
            (beta1, beta2), m, v = o.betas, self.m[touched], self.v[touched]
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g.square()
            self.m[touched], self.v[touched] = m, v
            m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
            self.weight[touched] = (w - lr * (m_hat / (v_hat.sqrt() + o.eps) + o.weight_decay * w)).to(w.dtype)
            return
        g = g + o.weight_decay * w
        if o.name == "sgd":
            self.weight[touched] = w - lr * g
            return
        square = g.square() if o.name == "adagrad" else g.square().mean(1, keepdim=True)
        self.accumulator[touched] += square
        self.weight[touched] = w - lr * g / (self.accumulator[touched].sqrt() + o.eps)
