"""Gradients that are NaN or infinite: such a row's step is left out, the others are made, and no store sees it."""

from __future__ import annotations

import math
import secrets
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from bags import PlainBags, batch, opened, stored_rows, table
from torch import Tensor
from torchrec import KeyedJaggedTensor

from cache_backend import CacheConfig, EmbeddingOptimizer, EmbeddingStore, LocalStore, RemoteStore
from cache_backend.bsp import RankGroup
from hetrec import HetEmbeddingBagCollection

BAD = 2  # the key whose gradient is not finite
OPTIMIZERS = [EmbeddingOptimizer(name) for name in ("sgd", "adagrad", "rowwise_adagrad", "adam")]
BATCHES = [batch(["x"], [[1], [BAD], [3]]), batch(["x"], [[BAD], [5], [1]])]


def train(collection: HetEmbeddingBagCollection, plain: PlainBags, value: float, accumulated: bool = False) -> None:
    """Twice two batches. In the second step one value of the gradient of row ``BAD`` is replaced: by what dense torch
    answers with the row as it was."""
    for step in range(2):
        for i, features in enumerate(BATCHES):
            for bags in (collection, plain):
                out = bags(features)
                pooled = out if isinstance(out, Tensor) else out.values()
                factor = torch.full_like(pooled, 0.5)
                if step == 1 and bags is collection:
                    factor[features.values() == BAD, 1] = value
                pooled.backward(factor)
            if accumulated and i == 0:
                continue
            collection.step(lr=0.1)
            if step == 1:
                plain.weights["t"].grad[BAD] = 0
                plain.touched["t"][BAD] = False
            plain.step(0.1)
    collection.flush()


def stored_values(store: EmbeddingStore, tables: Sequence[int] = (0,)) -> np.ndarray:
    return np.concatenate([part.rows.ravel() for part in store.export(list(tables))])


@pytest.mark.filterwarnings("ignore:step:UserWarning")
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.name)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("accumulated", [False, True], ids=["each", "accumulated"])
@pytest.mark.parametrize("consistency", ["het", "bsp"])
def test_the_row_keeps_its_values_and_the_others_are_stepped(
    optimizer: EmbeddingOptimizer, value: float, accumulated: bool, consistency: Any
) -> None:
    store = LocalStore()
    collection = opened([table("t", ["x"])], optimizer, CacheConfig(rows=64, consistency=consistency), store)
    plain = PlainBags(collection, optimizer, torch.float64)
    train(collection, plain, value, accumulated)
    rows = stored_rows(collection, collection.embedding_bag_configs()[0]).double()
    torch.testing.assert_close(rows, plain.weights["t"].detach(), rtol=0, atol=5e-6)
    assert np.isfinite(stored_values(store)).all()
    assert collection.stats().nonfinite == (1 if accumulated else 2)
    pins = collection.stream.groups[0].cache.meta.view(torch.int32)[:, 6]
    assert (pins == 0).all()


@pytest.mark.filterwarnings("ignore:step:UserWarning")
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.name)
def test_a_finite_gradient_that_would_overflow_the_row(optimizer: EmbeddingOptimizer) -> None:
    """3e38 squared is infinite, and so is 3e38 times a learning rate of 10."""
    store = LocalStore()
    collection = opened([table("t", ["x"])], optimizer, store=store)
    before = stored_rows(collection, collection.embedding_bag_configs()[0])
    pooled = collection(BATCHES[0]).values()
    pooled.backward(torch.full_like(pooled, 3e38))
    collection.step(lr=10.0)
    collection.flush()
    assert torch.equal(stored_rows(collection, collection.embedding_bag_configs()[0]), before)
    assert collection.stats().nonfinite == 3
    assert store.stats().rows == 0, "a row that was not stepped was pushed"


def test_an_option_ends_the_run_with_table_key_and_step() -> None:
    optimizer = EmbeddingOptimizer("adagrad", nonfinite="error")
    tables = [table("other", ["y"], dim=8), table("t", ["x"])]
    collection = opened(tables, optimizer)
    features = batch(["y", "x"], [[7], [8], [4], [BAD]])
    collection(features).values().sum().backward()
    collection.step(0.1)
    before = [stored_rows(collection, config) for config in tables]
    collection(features).to_dict()["x"].mul(torch.tensor([[1.0], [math.nan]])).sum().backward()
    with pytest.raises(ValueError, match=rf"step 2: the gradient of key {BAD} of table 't' is NaN or infinite"):
        collection.step(0.1)
    collection.close()  # a clean end: nothing is pinned, what was stepped is pushed
    again = opened(tables, optimizer, store=LocalStore())
    assert [rows.isfinite().all() for rows in before] == [True, True]
    again.close()


def test_it_is_said_once() -> None:
    collection = opened([table("t", ["x"])])
    collection(BATCHES[0]).values().mul(math.nan).sum().backward()
    with pytest.warns(UserWarning, match=r"step 1: the gradient of key 1 of table 't' and 2 more .* left out"):
        collection.step(0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collection(BATCHES[0]).values().mul(math.nan).sum().backward()
        collection.step(0.1)
    assert collection.stats().nonfinite == 6


@pytest.mark.filterwarnings("ignore:step:UserWarning")
@pytest.mark.parametrize("shards", [0, 2], ids=["local", "two-shards"])
def test_synchronous_ranks_leave_a_row_out_together(shard_addresses: Callable[..., Sequence[str]], shards: int) -> None:
    """The sum over ranks is not finite, as it would not be in one process: no rank moves, and all go on alike."""
    optimizer, config = EmbeddingOptimizer("adagrad"), table(f"nan-{secrets.token_hex(4)}", ["x"])
    local = LocalStore(exclusive=False)
    stores = [local if shards == 0 else RemoteStore(list(shard_addresses(shards))) for _ in range(2)]
    group = secrets.randbits(63)

    def rank(i: int) -> tuple[HetEmbeddingBagCollection, list[Tensor]]:
        collection = HetEmbeddingBagCollection([config])
        synchronous = CacheConfig(rows=64, consistency="bsp")
        collection.open(stores[i], synchronous, optimizer, world_size=2, ranks=RankGroup(group, i, 2))
        seen = []
        for step in range(4):
            features = KeyedJaggedTensor(["x"], torch.tensor([BAD, 10 + i]), lengths=torch.tensor([1, 1]))
            pooled = collection(features).values()
            seen.append(pooled.detach().clone())
            factor = torch.ones_like(pooled)
            if step == 1 and i == 0:
                factor[0, 0] = math.nan
            pooled.backward(factor)
            collection.step(0.1)
        collection.flush()
        return collection, seen

    with ThreadPoolExecutor(2) as pool:
        (first, a), (second, b) = pool.map(rank, range(2))
    plain = PlainBags(opened([replace(config)], optimizer), optimizer, torch.float64)
    expected = []
    for step in range(4):
        expected.append(plain.weights[config.name].detach()[BAD].clone())
        for i in range(2):
            plain(batch(["x"], [[BAD], [10 + i]])).sum().div(2).backward()
        if step == 1:
            plain.weights[config.name].grad[BAD] = 0
            plain.touched[config.name][BAD] = False
        plain.step(0.1)
    for step in range(4):
        for seen in (a, b):
            torch.testing.assert_close(seen[step][0].double(), expected[step], rtol=0, atol=2e-6)
    for collection in (first, second):
        rows = stored_rows(collection, config).double()
        torch.testing.assert_close(rows, plain.weights[config.name].detach(), rtol=0, atol=2e-6)
        collection.close()


def test_bag_weights_that_are_not_finite_are_refused() -> None:
    collection = opened([table("t", ["x", "y"])], is_weighted=True)
    features = batch(["x", "y"], [[1, 2], [3, 4]], weights=[1.0, 1.0, math.nan, 1.0])
    for training in (True, False):
        with pytest.raises(ValueError, match=r"feature 'y': the bag weight of key 3 is nan"):
            collection.train(training)(features)


def test_rows_that_are_not_finite_cannot_be_assigned() -> None:
    store = LocalStore()
    collection = opened([table("t", ["x"])], EmbeddingOptimizer("sgd"), store=store)
    collection(BATCHES[0]).values().sum().backward()
    collection.step(0.1)
    collection.flush()
    (rows,) = store.export([0])
    before = rows.rows.copy()
    rows.rows[list(rows.keys).index(BAD), 0] = math.inf
    with pytest.raises(ValueError, match=rf"1 of 3 rows hold NaN or infinite values, the first one key {BAD}"):
        store.assign(rows)
    np.testing.assert_array_equal(next(iter(store.export([0]))).rows, before)
