"""Which keys there are: every int64 in a table without size, those below its size in another, however far."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bags import batch, opened, stored_rows, table
from torchrec import EmbeddingConfig, KeyedJaggedTensor

from cache_backend import CacheConfig, EmbeddingOptimizer, LocalStore
from hetrec import HetEmbeddingBagCollection, HetEmbeddingCollection


def unpooled(rows: int) -> HetEmbeddingCollection:
    collection = HetEmbeddingCollection([EmbeddingConfig(rows, 4, name="t", feature_names=["x"])])
    collection.open(LocalStore(), CacheConfig(rows=64), EmbeddingOptimizer("sgd"))
    return collection


@pytest.mark.parametrize("key", [10, 11, -1, 2**31, 2**32 + 3, -(2**32) + 3, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("how", ["train", "eval", "ahead"])
@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "unpooled"])
def test_a_key_outside_a_sized_table_is_named_wherever_it_comes(pooled: bool, how: str, key: int) -> None:
    """Too large, negative, or in the table if only 32 bits were looked at: on every path the same words."""
    collection: Any = opened([table("t", ["x"], rows=10)]) if pooled else unpooled(10)
    good, bad = batch(["x"], [[3], [9]]), batch(["x"], [[3], [key]])
    message = rf"table 't' has 10 rows \(keys 0 to 9\), but feature 'x' has key {key};"
    collection.train(how != "eval")
    meet = {"ahead": lambda: collection.begin(good, [bad])}.get(how, lambda: collection(bad))
    with pytest.raises(IndexError, match=message):
        meet()
    collection.train()
    collection.discard()
    out = collection(good)  # nothing is left behind of the bad batch
    values = out.values() if pooled else out["x"].values()
    values.sum().backward()
    collection.step(lr=0.1)
    collection.flush()
    assert collection.stats().overflow == 0


@pytest.mark.parametrize("rows", [10, 0], ids=["sized", "unsized"])
def test_key_zero_is_an_ordinary_key_and_nothing_is_padding(rows: int) -> None:
    """Bags are as long as they are: what a shorter one lacks is no key, counts as zero and learns nothing."""
    collection = opened([table("t", ["x"], rows=rows)])
    bags = [[0], [], [0, 0, 5], [5]]
    features = batch(["x"], bags)
    before = collection.eval()(batch(["x"], [[0], [5]])).values()
    assert before.abs().min() > 0
    collection.train()
    pooled = collection(features).values()
    expected = torch.stack([before[0], torch.zeros(4), 2 * before[0] + before[1], before[1]])
    torch.testing.assert_close(pooled.detach(), expected)
    pooled.backward(torch.tensor([1.0, 100.0, 10.0, 1000.0])[:, None].expand(4, 4))
    collection.step(lr=1.0)
    collection.flush()
    after = collection.eval()(batch(["x"], [[0], [5]])).values()
    torch.testing.assert_close(before - after, torch.tensor([21.0, 1010.0])[:, None].expand(2, 4))


def learned(collection: HetEmbeddingBagCollection, keys: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """What each key's row gained, in the cache and in the store, from a gradient of its own."""
    features = batch(["x"], [[key] for key in keys])
    before = collection.eval()(features).values()
    collection.train()
    pooled = collection(features).values()
    assert torch.equal(pooled.detach(), before)
    pooled.backward(torch.arange(1.0, len(keys) + 1)[:, None].expand_as(pooled))
    collection.step(lr=1.0)
    cached = collection(features).values().detach()
    collection.discard()
    collection.flush()
    return before - cached, before - collection.eval()(features).values()


def test_rows_beyond_two_billion_weights() -> None:
    """Row 67,108,864 of width 32 begins at weight 2^31 of the table; twice as far, 32 bits begin again at row 0."""
    size = 2 * 67_108_864 + 1
    collection = opened([table("t", ["x"], rows=size, dim=32)], EmbeddingOptimizer("sgd"))
    keys = [67_108_864, size - 1, 67_108_863, 0, 1]
    for moved in learned(collection, keys):
        torch.testing.assert_close(moved, torch.arange(1.0, 6)[:, None].expand(5, 32))


def test_slots_beyond_two_billion_weights() -> None:
    """A cache whose rows and deltas take 3 x 2^30 floats, of which only the pages in use exist."""
    dim, rows = 16_384, 3 * 32_768
    try:
        collection = opened([table("t", ["x"], rows=0, dim=dim)], EmbeddingOptimizer("sgd"), CacheConfig(rows=rows))
    except OSError as error:
        pytest.skip(f"this host does not grant so large an address space: {error}")
    keys = list(range(40))
    for moved in learned(collection, keys):
        torch.testing.assert_close(moved, torch.arange(1.0, 41)[:, None].expand(40, dim), rtol=0, atol=1e-5)
    cache = collection.stream.groups[0].cache
    used = cache.priority.ge(0).nonzero().squeeze(1)
    assert len(used) == 40
    assert int(used.max()) * 2 * dim > 2**31  # otherwise nothing was shown


@pytest.mark.parametrize("name", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_tables_of_different_width_train_as_if_alone(name: Any) -> None:
    dims = {"a": 4, "b": 6, "c": 16, "d": 4}
    tables = [table(t, [f"{t}_keys"], dim=dim) for t, dim in dims.items()]
    names = [f"{t}_keys" for t in dims]
    optimizer = EmbeddingOptimizer(name, lr=0.1)
    together, alone = opened(tables, optimizer), [opened([config], optimizer) for config in tables]
    generator = torch.Generator().manual_seed(1)
    for _ in range(8):
        bags = [torch.randint(0, 60, (3,), generator=generator).tolist() for _ in range(5 * len(names))]
        features = batch(names, bags)
        for collection in (together, *alone):
            (collection(features).values() - 1).square().sum().backward()
            collection.step(lr=0.1)
    for config, single in zip(tables, alone, strict=True):
        together.flush()
        single.flush()
        assert torch.equal(stored_rows(together, config), stored_rows(single, config))


def test_keys_may_be_int32() -> None:
    collection = opened([table("t", ["x"], rows=10)])
    keys = torch.tensor([0, 9, 3], dtype=torch.int32)
    lengths = torch.ones(3, dtype=torch.int32)
    narrow = collection(KeyedJaggedTensor(["x"], keys, lengths=lengths)).values()
    wide = collection(KeyedJaggedTensor(["x"], keys.long(), lengths=lengths)).values()
    assert torch.equal(narrow, wide)
