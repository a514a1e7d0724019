"""Synchronous steps: ranks that share a store equal one process on the batches put together, for every optimizer.

The sums of gradients are rounded in another order, so equal means to float32 rounding: 2e-6 on weights of about 0.5
after 15 steps that move them by about as much.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from bags import PlainBags, batch, opened, random_batch, stored_rows, table
from torch import Tensor
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor, PoolingType

from cache_backend import CacheConfig, EmbeddingOptimizer, EmbeddingStore, LocalStore, RemoteStore, StoreError
from cache_backend.bsp import RankGroup
from cache_backend.config import POLICIES
from hetrec import HetEmbeddingBagCollection

NAMES = ["x", "y", "z", "w"]
ATOL = 2e-6
LR = 0.1
ROWS = 2000  # of tables that the batches mostly read the first 60 of
CACHE = CacheConfig(rows=64, consistency="bsp")
Addresses = Callable[..., Sequence[str]]
OPTIMIZERS = [
    EmbeddingOptimizer("sgd", weight_decay=0.1, max_gradient=0.3),
    EmbeddingOptimizer("adagrad", initial_accumulator=0.1),
    EmbeddingOptimizer("rowwise_adagrad", weight_decay=0.01, max_gradient_norm=0.3),
    EmbeddingOptimizer("adam", eps=1e-3, weight_decay=0.01),
]


def tables(prefix: str = "") -> list[EmbeddingBagConfig]:
    """Two widths, a table read by two features, and one whose bags are averaged."""
    return [
        table(f"{prefix}a", ["x", "y"], ROWS, dim=4),
        table(f"{prefix}b", ["z"], ROWS, dim=6, pooling=PoolingType.MEAN),
        table(f"{prefix}c", ["w"], ROWS, dim=4),
    ]


def loss(pooled: Tensor, samples: int) -> Tensor:
    """A mean over samples, as every rank has one of its own; the target depends on nothing but the column."""
    return (pooled - torch.sin(torch.arange(pooled.shape[1]))).square().sum() / max(1, samples)


def train(collection: HetEmbeddingBagCollection, batches: Sequence[KeyedJaggedTensor], together: int = 1) -> None:
    """``together``: batches whose gradients make one step."""
    for i, features in enumerate(batches):
        collection.begin(features, batches[i + 1 : i + 3])
        loss(collection(features).values(), features.stride()).backward()
        if (i + 1) % together == 0:
            collection.step(LR * 0.9**i)
    collection.flush()


def expected_rows(
    prefix: str,
    optimizer: EmbeddingOptimizer,
    batches: Sequence[Sequence[KeyedJaggedTensor]],
    together: int = 1,
) -> dict[str, Tensor]:
    """Of one process on all ranks' samples, each rank's mean counting as one of ``len(batches)``."""
    plain = PlainBags(opened(tables(prefix), optimizer), optimizer, torch.float64)
    for i, parts in enumerate(zip(*batches, strict=True)):
        for features in parts:
            (loss(plain(features), features.stride()) / len(parts)).backward()
        if (i + 1) % together == 0:
            plain.step(LR * 0.9**i)
    return {name: weight.detach() for name, weight in plain.weights.items()}


def assert_trained(collections: Sequence[HetEmbeddingBagCollection], expected: dict[str, Tensor]) -> None:
    """Every rank reads the rows that are expected; closes them."""
    for collection in collections:
        for config in collection.embedding_bag_configs():
            rows = stored_rows(collection, config).double()
            torch.testing.assert_close(rows, expected[config.name], rtol=0, atol=ATOL)
        collection.close()


def train_ranks(
    stores: Sequence[EmbeddingStore],
    prefix: str,
    optimizer: EmbeddingOptimizer,
    batches: Sequence[Sequence[KeyedJaggedTensor]],
    config: CacheConfig = CACHE,
    together: int = 1,
) -> list[HetEmbeddingBagCollection]:
    """Every rank in a thread of its own: stores and batches by rank."""
    n, group = len(stores), secrets.randbits(63)

    def rank(i: int) -> HetEmbeddingBagCollection:
        collection = HetEmbeddingBagCollection(tables(prefix))
        collection.open(stores[i], config, optimizer, world_size=n, ranks=RankGroup(group, i, n))
        train(collection, batches[i], together)
        return collection

    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(rank, range(n)))


def stores_of(shard_addresses: Addresses, ranks: int, shards: int) -> Sequence[EmbeddingStore]:
    """One each, of the same tables; 0 shards: in this process."""
    if shards == 0:
        return [LocalStore(exclusive=ranks == 1)] * ranks
    return [RemoteStore(list(shard_addresses(shards))) for _ in range(ranks)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.name)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("shards", [0, 1, 2], ids=["local", "one-shard", "two-shards"])
def test_ranks_equal_one_process(
    shard_addresses: Addresses, optimizer: EmbeddingOptimizer, ranks: int, shards: int
) -> None:
    """Each rank through a cache of 32 rows a width, half of what a batch has."""
    generator = torch.Generator().manual_seed(ranks)
    batches = [[random_batch(NAMES, 8, 60, generator) for _ in range(15)] for _ in range(ranks)]
    prefix = f"{optimizer.name}-{ranks}-"
    trained = train_ranks(stores_of(shard_addresses, ranks, shards), prefix, optimizer, batches)
    assert all(collection.stats().evicted + collection.stats().bypassed > 0 for collection in trained)
    assert_trained(trained, expected_rows(prefix, optimizer, batches))


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_of_the_cache(shard_addresses: Addresses, policy: Any) -> None:
    optimizer, generator = EmbeddingOptimizer(), torch.Generator().manual_seed(1)
    batches = [[random_batch(NAMES, 8, 60, generator) for _ in range(10)] for _ in range(2)]
    config = CacheConfig(rows=64, consistency="bsp", policy=policy)
    trained = train_ranks(stores_of(shard_addresses, 2, 1), f"{policy}-", optimizer, batches, config)
    assert_trained(trained, expected_rows(f"{policy}-", optimizer, batches))


def test_rows_that_no_other_rank_steps_do_not_travel_again(shard_addresses: Addresses) -> None:
    """Rank r alone uses the rows from 10 + 10 r on, both use rows 0 to 4, and each batch holds all of a rank's rows."""
    optimizer = EmbeddingOptimizer("adam", eps=1e-3)
    batches = []
    for r in range(2):
        keys = [[key] for key in [*range(10 + 10 * r, 20 + 10 * r), *range(5)]]
        batches.append([batch(NAMES, keys * len(NAMES))] * 10)
    trained = train_ranks(
        stores_of(shard_addresses, 2, 1), "travel-", optimizer, batches, CacheConfig(consistency="bsp")
    )
    for collection in trained:
        stats = collection.stats()
        # Of three tables 15 rows each: all are new at first, and then the five that the other rank stepped come again.
        assert (stats.misses, stats.stale, stats.hits) == (3 * 15, 9 * 3 * 5, 9 * 3 * 10)
        assert stats.fetched == 3 * 15
    assert_trained(trained, expected_rows("travel-", optimizer, batches))


def test_gradients_of_several_batches_and_of_none(shard_addresses: Addresses) -> None:
    """Two batches a step, one of which has no rows on the second rank, and a step for which it has none at all."""
    optimizer, generator = EmbeddingOptimizer("adam", eps=1e-3), torch.Generator().manual_seed(2)
    batches = [[random_batch(NAMES, 8, 60, generator) for _ in range(8)] for _ in range(2)]
    none = batch(NAMES, [[]] * 8 * len(NAMES))
    batches[1][1] = batches[1][4] = batches[1][5] = none
    trained = train_ranks(stores_of(shard_addresses, 2, 2), "several-", optimizer, batches, together=2)
    assert_trained(trained, expected_rows("several-", optimizer, batches, together=2))


def test_large_shares_travel_in_pieces(shard_addresses: Addresses) -> None:
    """Messages of 4 KiB, about 70 rows; a rank has about 500."""
    optimizer, generator = EmbeddingOptimizer("adagrad"), torch.Generator().manual_seed(3)
    batches = [[random_batch(NAMES, 400, ROWS, generator, longest=2) for _ in range(4)] for _ in range(2)]
    stores = [RemoteStore(list(shard_addresses(2)), max_message_bytes=1 << 12) for _ in range(2)]
    trained = train_ranks(stores, "pieces-", optimizer, batches, CacheConfig(rows=300, consistency="bsp"))
    assert_trained(trained, expected_rows("pieces-", optimizer, batches))


def test_a_skipped_step_is_no_round(shard_addresses: Addresses) -> None:
    optimizer, generator = EmbeddingOptimizer("sgd"), torch.Generator().manual_seed(4)
    batches = [[random_batch(NAMES, 8, 60, generator) for _ in range(4)] for _ in range(2)]
    group, stores = secrets.randbits(63), stores_of(shard_addresses, 2, 1)

    def rank(i: int) -> HetEmbeddingBagCollection:
        collection = HetEmbeddingBagCollection(tables("skipped-"))
        collection.open(stores[i], CACHE, optimizer, world_size=2, ranks=RankGroup(group, i, 2))
        for skipped in batches[i]:
            collection.begin(skipped)
            loss(collection(skipped).values(), 8).backward()
            collection.discard()
        train(collection, batches[i])
        return collection

    with ThreadPoolExecutor(2) as pool:
        trained = list(pool.map(rank, range(2)))
    assert_trained(trained, expected_rows("skipped-", optimizer, batches))


def test_training_goes_on_from_a_snapshot(shard_addresses: Addresses, tmp_path: Path) -> None:
    """First within the run that wrote it, whose rounds are numbered on, then in another one with two ranks."""
    optimizer, generator = EmbeddingOptimizer("adam", eps=1e-3), torch.Generator().manual_seed(5)
    first, second = ([random_batch(NAMES, 8, 60, generator) for _ in range(5)] for _ in range(2))
    expected = expected_rows("on-", optimizer, [first + second])
    (collection,) = train_ranks(stores_of(shard_addresses, 1, 2), "on-", optimizer, [first])
    store = collection.stored_tables()[0]
    assert store is not None
    store.snapshot(tmp_path / "snapshot")

    def go_on(collection: HetEmbeddingBagCollection, batches: Sequence[KeyedJaggedTensor]) -> None:
        for i, features in enumerate(batches, 5):
            loss(collection(features).values(), 8).backward()
            collection.step(LR * 0.9**i)
        collection.flush()

    go_on(collection, second[:2])
    collection(second[0]).values().sum().backward()
    collection.step(LR)  # not sent when the rows are restored
    store.restore(tmp_path / "snapshot")
    collection.reset()
    go_on(collection, second)
    assert_trained([collection], expected)

    stores = stores_of(shard_addresses, 2, 1)
    stores[0].restore(tmp_path / "snapshot")
    halves = [[*each] for each in zip(*(halved(features) for features in second), strict=True)]
    group = secrets.randbits(63)

    def rank(i: int) -> HetEmbeddingBagCollection:
        collection = HetEmbeddingBagCollection(tables("on-"))
        collection.open(stores[i], CACHE, optimizer, world_size=2, ranks=RankGroup(group, i, 2))
        for at, features in enumerate(halves[i], 5):
            loss(collection(features).values(), features.stride()).backward()
            collection.step(LR * 0.9**at)
        collection.flush()
        return collection

    with ThreadPoolExecutor(2) as pool:
        assert_trained(list(pool.map(rank, range(2))), expected)


def halved(features: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor]:
    """The first and the last four of eight samples."""
    parts: list[list[Tensor]] = [[], []]
    lengths: list[list[Tensor]] = [[], []]
    for name in NAMES:
        values = features[name].values().split(features[name].lengths().tolist())
        for half, part in enumerate((slice(0, 4), slice(4, 8))):
            parts[half] += values[part]
            lengths[half].append(features[name].lengths()[part])
    first, last = (
        KeyedJaggedTensor(NAMES, torch.cat(p), lengths=torch.cat(n)) for p, n in zip(parts, lengths, strict=True)
    )
    return first, last


def test_a_rank_that_ends_is_named_by_the_others(shard_addresses: Addresses) -> None:
    features = batch(NAMES, [[1], [2], [3], [4]])
    addresses, ready = list(shard_addresses(1)), threading.Barrier(3, timeout=60)
    for retry_s in (0.5, 4.0):  # shorter, and longer, than one call waits
        run = secrets.randbits(63), f"ends-{retry_s}-", retry_s

        def rank(i: int, run: tuple[int, str, float] = run) -> HetEmbeddingBagCollection:
            group, prefix, retry_s = run
            store = RemoteStore(addresses, timeout_s=4.0, retry_s=retry_s)
            collection = HetEmbeddingBagCollection(tables(prefix))
            collection.open(store, CACHE, EmbeddingOptimizer("sgd"), world_size=3, ranks=RankGroup(group, i, 3))
            collection(features).values().sum().backward()
            ready.wait()
            if i != 1:
                collection.step(0.1)
                with pytest.raises(StoreError, match=r"round 1 of 3 ranks waits for rank 1, for .* store\.retry_s"):
                    collection.flush()
            return collection

        with ThreadPoolExecutor(3) as pool:
            collections = list(pool.map(rank, range(3)))
        (first, *_) = tables(run[1])
        weights = stored_rows(collections[1], first)
        assert torch.equal(weights, stored_rows(opened(tables(run[1])), first))  # nobody stepped


def test_ranks_must_be_here() -> None:
    collection = HetEmbeddingBagCollection(tables())
    with pytest.raises(ValueError, match=r"steps 2 ranks together, but torch\.distributed has 1"):
        collection.open(LocalStore(), CACHE, EmbeddingOptimizer(), world_size=2)
    with pytest.raises(ValueError, match=r"unknown cache\.consistency 'ssp'; available: het, bsp"):
        CacheConfig(consistency="ssp")  # type: ignore[arg-type]
