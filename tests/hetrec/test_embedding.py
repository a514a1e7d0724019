"""The unpooled collection against TorchRec's own, trained by torch's optimizers."""

from __future__ import annotations

import pytest
import torch
from bags import batch, random_batch
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from cache_backend import CacheConfig, EmbeddingOptimizer, LocalStore
from hetrec import HetEmbeddingCollection


def config(name: str, features: list[str], rows: int = 60, dim: int = 4) -> EmbeddingConfig:
    return EmbeddingConfig(num_embeddings=rows, embedding_dim=dim, name=name, feature_names=features)


def opened(tables: list[EmbeddingConfig], optimizer: EmbeddingOptimizer, cache: CacheConfig) -> HetEmbeddingCollection:
    collection = HetEmbeddingCollection(tables, need_indices=True)
    collection.open(LocalStore(exclusive=False), cache, optimizer, seed=3)
    return collection


def every_row(tables: list[EmbeddingConfig]) -> KeyedJaggedTensor:
    """Each key of each table once, by the table's first feature; nothing by the other features."""
    names = sorted({name for table in tables for name in table.feature_names})
    first = {table.feature_names[0]: table.num_embeddings for table in tables}
    return batch(names, [list(range(first.get(name, 0))) for name in names])


def stored(collection: HetEmbeddingCollection) -> dict[str, torch.Tensor]:
    collection.eval()
    found = collection(every_row(collection.embedding_configs()))
    collection.train()
    names = zip(collection.embedding_configs(), collection.embedding_names_by_table(), strict=True)
    return {table.name: found[outputs[0]].values().clone() for table, outputs in names}


def reference(collection: HetEmbeddingCollection) -> EmbeddingCollection:
    plain = EmbeddingCollection(tables=collection.embedding_configs(), need_indices=True)
    for name, rows in stored(collection).items():
        plain.embeddings[name].weight.data.copy_(rows)
    return plain


@pytest.mark.parametrize("name", ["sgd", "adagrad"])
@pytest.mark.parametrize(("staleness", "rows", "depth"), [(0, 32, 1), (2, 64, 0), (100, 1000, 3)])
def test_training_is_that_of_torchrecs_collection(name: str, staleness: int, rows: int, depth: int) -> None:
    """A table of two features, a feature of two tables; bags of 0 to several keys."""
    tables = [config("a", ["x", "y"]), config("b", ["z"]), config("c", ["z", "w"])]
    optimizer = EmbeddingOptimizer(name, lr=0.1, initial_accumulator=0.1 if name == "adagrad" else 0.0, eps=1e-10)  # type: ignore[arg-type]
    collection = opened(tables, optimizer, CacheConfig(rows=rows, staleness=staleness, prefetch_depth=depth))
    plain = reference(collection)
    if name == "sgd":
        torch_optimizer: torch.optim.Optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    else:
        torch_optimizer = torch.optim.Adagrad(plain.parameters(), lr=0.1, initial_accumulator_value=0.1)
    generator = torch.Generator().manual_seed(staleness)
    batches = [random_batch(["w", "x", "y", "z"], 24, 60, generator) for _ in range(15)]
    for i, features in enumerate(batches):
        collection.begin(features, batches[i + 1 : i + 1 + depth])
        found, expected = collection(features), plain(features)
        assert found.keys() == expected.keys() == {"x", "y", "z@b", "z@c", "w"}
        torch_optimizer.zero_grad()
        for output in expected:
            torch.testing.assert_close(found[output].values(), expected[output].values(), rtol=0, atol=5e-6)
            assert torch.equal(found[output].lengths(), expected[output].lengths())
            assert torch.equal(found[output].weights(), expected[output].weights())
        for outputs in (found, expected):
            (0.05 * sum(torch.sin(jagged.values() + 1).square().sum() for jagged in outputs.values())).backward()
        collection.step(0.1)
        torch_optimizer.step()
    collection.flush()
    for table, got in stored(collection).items():
        torch.testing.assert_close(got, plain.embeddings[table].weight.detach(), rtol=0, atol=5e-6)


def test_an_empty_batch_has_no_rows() -> None:
    collection = opened([config("a", ["x", "y"])], EmbeddingOptimizer("sgd"), CacheConfig(rows=32))
    for training in (True, False):
        collection.train(training)
        found = collection(batch(["x", "y"], [[], []]))
        assert found["x"].values().shape == found["y"].values().shape == (0, 4)
        found = collection(
            KeyedJaggedTensor(["x", "y"], torch.empty(0, dtype=torch.int64), lengths=torch.empty(0).int())
        )
        assert found["x"].values().shape == (0, 4)


def test_what_an_unpooled_collection_says_about_itself() -> None:
    collection = HetEmbeddingCollection([config("a", ["x"]), config("b", ["x"])])
    assert collection.embedding_names_by_table() == [["x@a"], ["x@b"]]
    assert (collection.embedding_dim(), collection.need_indices()) == (4, False)
    assert list(collection.parameters()) == list(collection.buffers()) == []
    with pytest.raises(ValueError, match=r"must have one width, got \{'a': 4, 'b': 8\}"):
        HetEmbeddingCollection([config("a", ["x"]), config("b", ["y"], dim=8)])
