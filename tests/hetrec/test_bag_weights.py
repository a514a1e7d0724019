"""Bag weights that are learned: their gradient is torch's, through processors and attention, on every surface."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from bags import opened, stored_rows, table
from torch import Tensor, nn
from torch.nn.functional import embedding_bag
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, JaggedTensor, KeyedJaggedTensor, PoolingType
from torchrec.modules.feature_processor_ import PositionWeightedModule, PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from cache_backend import CacheConfig, EmbeddingOptimizer
from hetrec import HetEmbeddingBagCollection

SGD = EmbeddingOptimizer("sgd", lr=0.1)
ORDERS = [["x", "y", "z"], ["z", "x", "y"]]


def tables() -> list[EmbeddingBagConfig]:
    """Two widths, a table of two features."""
    return [table("a", ["x", "y"], rows=40), table("b", ["z"], rows=40, dim=8)]


def bags_of(names: Sequence[str], seed: int, samples: int = 5) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(names) * samples,), generator=generator, dtype=torch.int32)
    values = torch.randint(0, 40, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(list(names), values, lengths=lengths)


def with_weights(features: KeyedJaggedTensor, weights: Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(features.keys(), features.values(), weights, lengths=features.lengths())


class Plain(nn.Module):
    """torch.nn.functional.embedding_bag on the collection's rows."""

    def __init__(self, collection: HetEmbeddingBagCollection) -> None:
        super().__init__()
        self.configs = collection.embedding_bag_configs()
        self.rows = nn.ParameterDict({c.name: nn.Parameter(stored_rows(collection, c)) for c in self.configs})

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        jagged: dict[str, JaggedTensor] = features.to_dict()
        pooled = []
        for config in self.configs:
            for name in config.feature_names:
                bag = jagged[name]
                out = embedding_bag(
                    bag.values(), self.rows[config.name], bag.offsets()[:-1].long(), mode="sum",
                    per_sample_weights=bag.weights(),
                )  # fmt: skip
                if config.pooling == PoolingType.MEAN:
                    out = out / bag.lengths().clamp(min=1)[:, None]
                pooled.append(out)
        return torch.cat(pooled, 1)


def target(pooled: Tensor) -> Tensor:
    return (pooled - torch.cos(torch.arange(pooled.shape[1]))).square().sum()


@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN], ids=["sum", "mean"])
@pytest.mark.parametrize("names", ORDERS, ids=["in-order", "out-of-order"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_gradients_are_those_of_embedding_bag(pooling: PoolingType, names: list[str], training: bool) -> None:
    configs = tables()
    configs[0].pooling = pooling
    collection = opened(configs, SGD, CacheConfig(rows=64), is_weighted=True)
    plain = Plain(collection)
    collection.train(training)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for seed in range(4):
        features = bags_of(names, seed)
        ours, theirs = (
            torch.rand(features.values().numel(), generator=torch.Generator().manual_seed(seed)) for _ in "ab"
        )
        found = collection(with_weights(features, ours.requires_grad_())).values()
        expected = plain(with_weights(features, theirs.requires_grad_()))
        torch.testing.assert_close(found, expected, rtol=0, atol=5e-6)
        target(found).backward()
        target(expected).backward()
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=2e-5)
        if training:  # the rows step as they do when weights are data
            collection.step(0.1)
            optimizer.step()
        optimizer.zero_grad()


def processed(collection: nn.Module, kind: str) -> FeatureProcessedEmbeddingBagCollection:
    """TorchRec's position weights in front of a collection."""
    if kind == "one-module":
        processor = PositionWeightedModuleCollection(dict.fromkeys(ORDERS[0], 8))
        return FeatureProcessedEmbeddingBagCollection(collection, processor)
    modules = {name: PositionWeightedModule(8) for name in ORDERS[0]}
    return FeatureProcessedEmbeddingBagCollection(collection, modules)


@pytest.mark.parametrize("kind", ["one-module", "a-module-a-feature"])
@pytest.mark.parametrize("announced", [False, True], ids=["inline", "begun"])
def test_torchrecs_feature_processors(kind: str, announced: bool) -> None:
    """``begun``: batches are announced as they come from the data, and looked up as the processor leaves them."""
    collection = opened(tables(), SGD, CacheConfig(rows=64), is_weighted=True)
    plain = EmbeddingBagCollection(tables=tables(), is_weighted=True)
    for config in tables():
        plain.embedding_bags[config.name].weight.data.copy_(stored_rows(collection, config))
    ours, theirs = processed(collection, kind), processed(plain, kind)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (ours, theirs)]
    batches = [bags_of(ORDERS[0], seed) for seed in range(8)]
    ones = [with_weights(features, torch.ones(features.values().numel())) for features in batches]
    for i, features in enumerate(batches):
        if announced:
            collection.begin(ones[i], ones[i + 1 : i + 3])
        outputs = [model(features).to_dict() for model in (ours, theirs)]
        for name in outputs[0]:
            torch.testing.assert_close(outputs[0][name], outputs[1][name], rtol=0, atol=1e-5)
        for output, optimizer in zip(outputs, optimizers, strict=True):
            optimizer.zero_grad()
            target(torch.cat([output[name] for name in ORDERS[0]], 1)).backward()
            optimizer.step()
        collection.step(0.05)
    for mine, other in zip(
        ours.parameters(), [p for n, p in theirs.named_parameters() if "position" in n], strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)
        assert not torch.equal(mine, torch.ones_like(mine)), "the position weights were not trained"
    if announced:
        assert collection.stats().steps == len(batches), "a batch was planned again under other weights"


def test_attention_over_a_history() -> None:
    """Weights computed from the rows themselves: both gradients meet in the rows."""
    history = opened([table("t", ["history", "candidate"], rows=40)], SGD, CacheConfig(rows=64), is_weighted=True)
    plain = Plain(history)
    attention = [nn.Linear(4, 1), nn.Linear(4, 1)]
    attention[1].load_state_dict(attention[0].state_dict())
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.cat([torch.randint(1, 4, (5,), generator=generator), torch.ones(5, dtype=torch.int64)])
        values = torch.randint(0, 40, (int(lengths.sum()),), generator=generator)
        features = KeyedJaggedTensor(["history", "candidate"], values, lengths=lengths)
        gradients = []
        for model, scores in zip((history, plain), attention, strict=True):
            first = model(with_weights(features, torch.ones(values.numel())))
            pooled = first if isinstance(first, Tensor) else first.values()
            per_sample = scores(pooled[:, 4:]).sigmoid().flatten()  # of the candidate
            per_key = torch.cat([per_sample.repeat_interleave(lengths[:5]), torch.ones(5)])
            second = model(with_weights(features, per_key))
            target(second if isinstance(second, Tensor) else second.values()).backward()
            gradients.append(scores.weight.grad.clone())
            scores.zero_grad()
        torch.testing.assert_close(*gradients, rtol=0, atol=5e-5)
        history.step(0.1)
        with torch.no_grad():
            for row in plain.parameters():
                row -= 0.1 * row.grad
                row.grad = None
    history.flush()
    rows = stored_rows(history, history.embedding_bag_configs()[0])
    torch.testing.assert_close(rows, plain.rows["t"].detach(), rtol=0, atol=5e-5)


def test_a_second_derivative_is_refused() -> None:
    collection = opened(tables(), SGD, is_weighted=True)
    features = bags_of(ORDERS[0], 0)
    weights = torch.ones(features.values().numel(), requires_grad=True)
    (gradient,) = torch.autograd.grad(
        collection(with_weights(features, weights)).values().square().sum(), weights, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
