"""The collection against plain torch: training through any cache is training without one."""

from __future__ import annotations

import dataclasses
import itertools
import signal
import threading

import pytest
import torch
from bags import PlainBags, batch, opened, random_batch, stored_rows, table
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType

from cache_backend import CacheConfig, EmbeddingOptimizer, ExchangeReply, ExchangeRequest, LocalStore, ops
from cache_backend.cache import Bags, UniqueRows
from cache_backend.config import POLICIES
from hetrec import HetEmbeddingBagCollection
from hetrec.features import FeatureGroup

# After 25 steps at lr 0.1 on values of about 1. Against float64 the error is that of float32 arithmetic; the float32
# reference rounds in another order, so it gets the same room.
TOLERANCE = {torch.float64: 5e-6, torch.float32: 5e-6}

OPTIMIZERS = [
    EmbeddingOptimizer("sgd", lr=0.1),
    EmbeddingOptimizer("adagrad", lr=0.1, initial_accumulator=0.1),
    EmbeddingOptimizer("rowwise_adagrad", lr=0.1),
    EmbeddingOptimizer("adam", lr=0.1, eps=1e-3),
]
# Every option beside the plain rules; the clipping bites: gradients are about 0.1.
WITH_OPTIONS = [
    EmbeddingOptimizer("sgd", lr=0.1, weight_decay=0.1, max_gradient=0.05),
    EmbeddingOptimizer("adagrad", lr=0.1, initial_accumulator=0.1, weight_decay=0.1, max_gradient_norm=0.1),
    EmbeddingOptimizer("rowwise_adagrad", lr=0.1, weight_decay=0.1, max_gradient=0.08, max_gradient_norm=0.1),
    EmbeddingOptimizer("adam", lr=0.1, eps=1e-3, betas=(0.5, 0.9), weight_decay=0.1, max_gradient_norm=0.1),
]


def train(
    collection: HetEmbeddingBagCollection,
    plain: PlainBags,
    batches: list[KeyedJaggedTensor],
    depth: int = 1,
    lr: float = 0.1,
) -> None:
    """Trains both on the same batches, ``depth`` of which are known ahead, and compares outputs and final rows."""
    collection.train()
    for i, features in enumerate(batches):
        collection.begin(features, batches[i + 1 : i + 1 + depth])
        out, expected = collection(features).values(), plain(features)
        torch.testing.assert_close(out.to(expected.dtype), expected, rtol=0, atol=TOLERANCE[expected.dtype])
        for pooled in (out, expected):
            target = torch.sin(torch.arange(pooled.numel()).view_as(pooled) + i).to(pooled.dtype)
            (0.05 * (pooled - target).square().sum()).backward()
        collection.step(lr)
        plain.step(lr)
    collection.flush()
    for config in plain.configs:
        expected = plain.weights[config.name].detach()
        got = stored_rows(collection, config).to(expected.dtype)
        torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE[expected.dtype])


def tables_of_every_kind() -> list[EmbeddingBagConfig]:
    """Sum and mean side by side, two widths, a table read by two features, a feature that reads two tables."""
    return [
        table("a", ["x", "y"], dim=4),
        table("b", ["z"], dim=6, pooling=PoolingType.MEAN),
        table("c", ["z", "w"], dim=4, pooling=PoolingType.MEAN),
    ]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize(("staleness", "rows"), [(0, 64), (0, 1000), (1, 64), (3, 96), (100, 64), (100, 1000)])
def test_training_through_the_cache_is_training_without_one(
    optimizer: EmbeddingOptimizer, dtype: torch.dtype, depth: int, staleness: int, rows: int
) -> None:
    """64 rows for two widths: 32 each, fewer than a batch has unique keys."""
    generator = torch.Generator().manual_seed(staleness * 1000 + rows)
    config = CacheConfig(rows=rows, staleness=staleness, prefetch_depth=depth)
    collection = opened(tables_of_every_kind(), optimizer, config, store=LocalStore(exclusive=False))
    batches = [random_batch(["x", "y", "z", "w"], 24, 60, generator) for _ in range(25)]
    train(collection, PlainBags(collection, optimizer, dtype), batches, depth)
    stats = collection.stats()
    assert stats.steps == 25
    assert (stats.overflow > 0) == (rows < 100)
    assert (stats.hits > 0) == (staleness > 0)  # at s = 0 every row was updated at its last use
    assert stats.unique == stats.hits + stats.misses + stats.stale
    for group in collection.stream.groups:
        answers_due = group.cache.meta.view(torch.int32)[:, 7]
        assert not answers_due.any()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("staleness", [0, 3])
def test_every_policy_trains_as_no_cache_does(policy: str, prefetch: int, staleness: int) -> None:
    """Rows that pass through without a slot are fetched, updated, pushed, and found again while in flight."""
    optimizer = EmbeddingOptimizer("rowwise_adagrad", lr=0.1)
    names = ["x", "y", "z", "w"]
    tables = [dataclasses.replace(config, num_embeddings=200) for config in tables_of_every_kind()]
    config = CacheConfig(rows=128, staleness=staleness, policy=policy, prefetch_depth=prefetch)
    collection = opened(tables, optimizer, config)
    generator = torch.Generator().manual_seed(prefetch)
    batches = [random_batch(names, 6, 200, generator) for _ in range(40)]
    train(collection, PlainBags(collection, optimizer, torch.float64), batches, depth=6)
    stats = collection.stats()
    assert stats.evicted > 0
    assert (stats.bypassed > 0) == (policy in ("tiny_lfu", "lookahead"))


def test_a_batch_is_made_unique_once_however_long_it_is_in_view(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    original = FeatureGroup.rows_and_bags

    def counted(group: FeatureGroup, features: KeyedJaggedTensor) -> tuple[UniqueRows, Bags]:
        seen.append(id(features))
        return original(group, features)

    monkeypatch.setattr(FeatureGroup, "rows_and_bags", counted)
    collection = opened([table("t", ["x"])], cache=CacheConfig(rows=32, policy="lookahead"))
    generator = torch.Generator().manual_seed(0)
    batches = [random_batch(["x"], 6, 60, generator) for _ in range(90)]
    for i, features in enumerate(batches):
        collection.begin(features, batches[i + 1 : i + 81])  # further than the policy looks
        collection(features).values().sum().backward()
        collection.step(0.1)
    assert seen == [id(features) for features in batches]


def test_other_batches_than_announced_may_come() -> None:
    optimizer = EmbeddingOptimizer("adagrad", lr=0.1)
    collection = opened([table("t", ["x"], rows=200)], optimizer, CacheConfig(rows=64, policy="lookahead"))
    plain = PlainBags(collection, optimizer, torch.float64)
    generator = torch.Generator().manual_seed(0)
    batches = [random_batch(["x"], 24, 200, generator) for _ in range(40)]
    collection.train()
    for i, features in enumerate(batches):
        told = [batches[i + 1 : i + 9], batches[i + 2 : i + 9], (), batches[:5]][i % 4]
        collection.begin(features, told)
        out, expected = collection(features).values(), plain(features)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=5e-6)
        for pooled in (out, expected):
            (pooled - 0.1).square().sum().backward()
        collection.step(0.1)
        plain.step(0.1)


@pytest.mark.parametrize("optimizer", WITH_OPTIONS, ids=lambda o: o.name)
@pytest.mark.parametrize(("staleness", "rows"), [(0, 64), (3, 96), (100, 1000)])
def test_decay_and_clipping_through_the_cache(optimizer: EmbeddingOptimizer, staleness: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    collection = opened(tables_of_every_kind(), optimizer, CacheConfig(rows=rows, staleness=staleness), world_size=2)
    batches = [random_batch(["x", "y", "z", "w"], 24, 60, generator) for _ in range(25)]
    train(collection, PlainBags(collection, optimizer, torch.float64, world_size=2), batches)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.name)
@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN], ids=["sum", "mean"])
def test_weighted_bags(optimizer: EmbeddingOptimizer, pooling: PoolingType) -> None:
    generator = torch.Generator().manual_seed(5)
    collection = opened([table("t", ["x", "y"], pooling=pooling)], optimizer, is_weighted=True)
    batches = [random_batch(["x", "y"], 16, 60, generator, is_weighted=True) for _ in range(15)]
    train(collection, PlainBags(collection, optimizer, torch.float64), batches)


def test_bag_weights_count_in_training_and_in_evaluation() -> None:
    """Row i = [i, i, i, i], ids [1, 2], weights [10, 100]: 210 everywhere."""
    collection = opened([table("t", ["x"])], EmbeddingOptimizer("sgd"), is_weighted=True)
    features = batch(["x"], [[1, 2]], weights=[10.0, 100.0])
    every = batch(["x"], [[i] for i in range(3)], weights=[1.0] * 3)
    rows = stored_rows(collection, collection.embedding_bag_configs()[0])[:3]
    wanted = torch.arange(3.0)[:, None].expand(3, 4)
    collection(every).values().backward(rows - wanted)  # one step of SGD at lr 1 moves row i to [i, i, i, i]
    collection.step(lr=1.0)
    expected = torch.full((1, 4), 210.0)
    torch.testing.assert_close(collection(features).values().detach(), expected, rtol=1e-5, atol=0)
    collection.discard()
    collection.flush()
    collection.eval()
    torch.testing.assert_close(collection(features).values(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dim", [1, 5, 16, 17, 32, 128])
@pytest.mark.parametrize("single", [True, False], ids=["single-key", "multi-key"])
def test_every_width_and_bag_shape(dim: int, single: bool) -> None:
    optimizer = EmbeddingOptimizer("rowwise_adagrad", lr=0.1)
    generator = torch.Generator().manual_seed(dim)
    collection = opened([table("t", ["x", "y"], dim=dim)], optimizer, CacheConfig(rows=32, staleness=2))
    batches = []
    for _ in range(8):
        features = random_batch(["x", "y"], 20, 60, generator)
        if single:
            values = torch.randint(0, 60, (40,), generator=generator)
            features = KeyedJaggedTensor(["x", "y"], values, lengths=torch.ones(40, dtype=torch.int32))
        batches.append(features)
    train(collection, PlainBags(collection, optimizer, torch.float64), batches)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.name)
def test_duplicates_make_one_update_with_the_summed_gradient(optimizer: EmbeddingOptimizer) -> None:
    collection = opened([table("t", ["x"])], optimizer)
    plain = PlainBags(collection, optimizer, torch.float64)
    train(collection, plain, [batch(["x"], [[3], [3], [3]]), batch(["x"], [[3, 3, 3]])], depth=0)
    assert collection.stats().unique == 2


def test_gradients_of_all_features_of_a_table_are_summed_before_the_step() -> None:
    optimizer = EmbeddingOptimizer("adagrad", lr=0.1)
    collection = opened([table("t", ["x", "y", "z"])], optimizer)
    plain = PlainBags(collection, optimizer, torch.float64)
    train(collection, plain, [batch(["x", "y", "z"], [[7], [7], [7]])] * 3, depth=0)


def test_empty_features_and_empty_batches() -> None:
    optimizer = EmbeddingOptimizer("adagrad", lr=0.1)
    collection = opened(tables_of_every_kind(), optimizer)
    names = ["x", "y", "z", "w"]
    batches = [
        batch(names, [[1], [], [2, 3], [], [], [], [4], [5]]),  # z is empty throughout
        batch(names, [[]] * 8),  # nothing at all
        batch(names, [[1], [2], [3], [4], [1], [2], [3], [4]]),
    ]
    train(collection, PlainBags(collection, optimizer, torch.float64), batches)
    before = stored_rows(collection, collection.embedding_bag_configs()[0])
    none = batch(names, [])
    for training in (True, False):
        collection.train(training)
        out = collection(none).values()
        assert out.shape == (0, 2 * 4 + 6 + 2 * 4)
    collection.train()
    collection(none).values().sum().backward()
    collection.step(lr=0.1)
    collection.flush()
    assert torch.equal(stored_rows(collection, collection.embedding_bag_configs()[0]), before)


def test_output_follows_torchrec() -> None:
    """Names, widths and order are those of TorchRec's own collection, also for a batch in another order."""
    configs = tables_of_every_kind()
    theirs = EmbeddingBagCollection(tables=configs)
    collection = opened(configs)
    with torch.no_grad():
        for config in configs:
            theirs.embedding_bags[config.name].weight.copy_(stored_rows(collection, config))
    features = random_batch(["w", "unused", "x", "z", "y"], 9, 60, torch.Generator().manual_seed(1))
    expected = theirs(features)
    for training in (True, False):
        out = collection.train(training)(features)
        assert out.keys() == expected.keys()
        assert out.length_per_key() == expected.length_per_key()
        torch.testing.assert_close(out.values(), expected.values(), rtol=0, atol=1e-6)


MALFORMED = {
    "more keys than lengths": (KeyedJaggedTensor(["x"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 1])),
                               ValueError, "lengths sum to 2, but there are 3 keys"),
    "more lengths than keys": (KeyedJaggedTensor(["x"], torch.tensor([1]), lengths=torch.tensor([1, 1])), ValueError,
                               "lengths sum to 2, but there are 1 keys"),
    "a negative length": (KeyedJaggedTensor(["x"], torch.tensor([1, 2]), lengths=torch.tensor([3, -1])), ValueError,
                          "length -1"),
    "offsets that go back": (KeyedJaggedTensor(["x"], torch.tensor([1, 2]), offsets=torch.tensor([0, 3, 2])),
                             ValueError, "length -1"),
    "keys that are no integers": (KeyedJaggedTensor(["x"], torch.tensor([1.0]), lengths=torch.tensor([1])), TypeError,
                                  "keys must be int64 or int32, got torch.float32"),
    "a feature that is absent": (KeyedJaggedTensor(["y"], torch.tensor([1]), lengths=torch.tensor([1])), KeyError,
                                 "no feature 'x'; it has: y"),
    "a key equal to the size": (KeyedJaggedTensor(["x"], torch.tensor([3, 10]), lengths=torch.tensor([1, 1])),
                                IndexError, r"table 't' has 10 rows \(keys 0 to 9\), but feature 'x' has key 10"),
    "a negative key": (KeyedJaggedTensor(["x"], torch.tensor([-1]), lengths=torch.tensor([1])), IndexError, "key -1"),
}  # fmt: skip


@pytest.mark.parametrize("kind", MALFORMED)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_malformed_batches_are_refused_before_anything_is_read(kind: str, training: bool) -> None:
    features, error, message = MALFORMED[kind]
    collection = opened([table("t", ["x"], rows=10)])
    good = batch(["x"], [[1], [2]])
    collection(good).values().sum().backward()
    collection.step(lr=0.1)
    collection.flush()
    before = stored_rows(collection, collection.embedding_bag_configs()[0])
    collection.train(training)
    with pytest.raises(error, match=message):
        collection(features)
    collection.train()
    collection.flush()
    assert torch.equal(stored_rows(collection, collection.embedding_bag_configs()[0]), before)
    collection(good).values().sum().backward()  # and training goes on
    collection.step(lr=0.1)


def test_weights_are_asked_for() -> None:
    collection = opened([table("t", ["x"])], is_weighted=True)
    with pytest.raises(ValueError, match="the batch has no weights"):
        collection(batch(["x"], [[1]]))


def test_a_table_without_size_takes_every_key() -> None:
    collection = opened([table("t", ["x"], rows=0)])
    keys = [0, -1, 2**63 - 1, -(2**63), 67_108_864 * 32]
    features = batch(["x"], [[key] for key in keys])
    initial = collection(features).values().detach().clone()
    assert len(initial.unique(dim=0)) == len(keys)
    collection(features).values().backward(torch.ones(len(keys), 4))
    collection.step(lr=0.5)
    collection.flush()
    collection.eval()
    torch.testing.assert_close(collection(features).values(), initial - 0.5, rtol=0, atol=1e-6)


def test_evaluation_changes_nothing() -> None:
    """Neither rows, clocks nor the order of eviction; unknown keys get their first row."""
    collection = opened([table("t", ["x"], rows=0)], cache=CacheConfig(rows=32, staleness=5))
    seen, unseen = batch(["x"], [[i] for i in range(40)]), batch(["x"], [[i] for i in range(1000, 1100)])
    initial = collection.eval()(unseen).values().clone()
    collection.train()
    for _ in range(2):
        collection(seen).values().sum().backward()
        collection.step(lr=0.1)
    collection.flush()
    (group,) = collection.stream.groups
    cache, store = group.cache, collection.stored_tables()[0]
    state = [t.clone() for t in (cache.tags, cache.priority, cache.meta, cache.rows)]
    stats, stored = collection.stats(), store.stats()
    collection.eval()
    assert torch.equal(collection(unseen).values(), initial)
    collection(seen)
    for before, after in zip(state, (cache.tags, cache.priority, cache.meta, cache.rows), strict=True):
        assert torch.equal(before, after)
    assert collection.stats() == stats
    assert store.stats() == stored


@pytest.mark.parametrize("overlap", [0, 16, 32])
def test_rows_in_use_are_never_evicted_by_prefetch(overlap: int) -> None:
    """A cache of exactly one batch: the prefetched batch must not take the current one's rows away."""
    optimizer = EmbeddingOptimizer("sgd", lr=0.1)
    collection = opened([table("t", ["x"], rows=100)], optimizer, CacheConfig(rows=32))
    first, second = list(range(32)), list(range(32 - overlap, 64 - overlap))
    batches = [batch(["x"], [[k] for k in keys]) for keys in (first, second, first, second)]
    train(collection, PlainBags(collection, optimizer, torch.float64), batches)
    assert collection.stats().overflow >= 32 - overlap


@pytest.mark.parametrize("all_miss", [True, False])
def test_all_rows_miss_or_none(all_miss: bool) -> None:
    optimizer = EmbeddingOptimizer("adagrad", lr=0.1)
    collection = opened([table("t", ["x"], rows=600)], optimizer, CacheConfig(rows=10_000))
    batches = [batch(["x"], [[(100 * i if all_miss else 0) + j] for j in range(100)]) for i in range(6)]
    train(collection, PlainBags(collection, optimizer, torch.float64), batches)
    stats = collection.stats()
    assert stats.misses == (600 if all_miss else 100)
    assert stats.hits == (0 if all_miss else 500)


def test_a_batch_of_criteo_size_through_a_small_cache() -> None:
    """2,048 samples of 26 features through 1,000 rows: identical to a cache that holds everything, and counted."""
    generator = torch.Generator().manual_seed(0)
    names = [f"c{i}" for i in range(26)]
    values = [(torch.rand(2048 * 26, generator=generator) ** 4 * 40_000).long() for _ in range(4)]
    results = []
    for rows in (1_000, 200_000):
        collection = opened([table("t", names, rows=40_000)], OPTIMIZERS[2], CacheConfig(rows=rows))
        batches = [KeyedJaggedTensor(names, v, lengths=torch.ones(2048 * 26, dtype=torch.int32)) for v in values]
        for i, features in enumerate(batches):
            collection.begin(features, batches[i + 1 : i + 2])
            (collection(features).values() - 0.1).square().sum().backward()
            collection.step(lr=0.1)
        stats = collection.stats()
        collection.flush()
        results.append((stored_rows(collection, collection.embedding_bag_configs()[0]), stats))
    (small, small_stats), (large, large_stats) = results
    torch.testing.assert_close(small, large, rtol=0, atol=1e-6)
    assert small_stats.unique == large_stats.unique > 4 * 10_000
    assert small_stats.overflow > 4 * 9_000
    assert large_stats.overflow == 0


def test_accumulated_gradients_make_one_step() -> None:
    """Two batches and one step are one batch of both, also where a row is in both and the cache is too small."""
    for optimizer, rows in itertools.product(OPTIMIZERS + WITH_OPTIONS, (32, 1000)):
        collection = opened([table("t", ["x"])], optimizer, CacheConfig(rows=rows, staleness=0))
        plain = PlainBags(collection, optimizer, torch.float64)
        parts = [batch(["x"], [[k] for k in keys]) for keys in (range(40), range(20, 60))]
        for _ in range(3):
            for features in parts:
                collection(features).values().square().sum().backward()
                plain(features).square().sum().backward()
            collection.step(lr=0.1)
            plain.step(0.1)
        collection.flush()
        got = stored_rows(collection, collection.embedding_bag_configs()[0])
        torch.testing.assert_close(got.double(), plain.weights["t"].detach(), rtol=0, atol=5e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.name)
def test_a_step_in_backward_is_the_step_after_it(optimizer: EmbeddingOptimizer) -> None:
    generator = torch.Generator().manual_seed(3)
    batches = [random_batch(["x", "y", "z", "w"], 24, 60, generator) for _ in range(10)]
    rows = []
    for in_backward in (False, True):
        collection = opened(tables_of_every_kind(), optimizer, CacheConfig(rows=64, staleness=2))
        lr = 0.0
        if in_backward:
            collection.step_in_backward(lambda: lr)  # noqa: B023  # the value of the moment is what is wanted
        for i, features in enumerate(batches):
            collection.begin(features, batches[i + 1 :])
            lr = 0.1 * (i % 3)
            collection(features).values().square().sum().backward()
            if not in_backward:
                collection.step(lr)
        collection.flush()
        rows.append([stored_rows(collection, config) for config in collection.embedding_bag_configs()])
        assert collection.stats().steps == 10
    for after, in_it in zip(*rows, strict=True):
        assert torch.equal(after, in_it)


def test_a_step_in_backward_happens_once() -> None:
    collection = opened(tables_of_every_kind(), EmbeddingOptimizer("sgd"))
    collection.step_in_backward(lambda: 0.1)
    features = batch(["x", "y", "z", "w"], [[1], [2], [3], [4]])
    loss = collection(features).values().square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="went through backward again"):
        loss.backward()
    collection(features)  # no gradient comes
    collection(batch(["x", "y", "z", "w"], [[9]] * 4))
    for group in collection.stream.groups:
        in_use = group.cache.meta.view(torch.int32)[:, 6].sum()
        assert int(in_use) == (2 if group.cache.dim == 4 else 1)  # of the last batch alone: row 9 of each table


def test_a_skipped_step_leaves_rows_and_clocks() -> None:
    collection = opened([table("t", ["x"])], cache=CacheConfig(rows=32))
    features = batch(["x"], [[k] for k in range(50)])
    before = stored_rows(collection, collection.embedding_bag_configs()[0])
    collection(features).values().sum().backward()
    collection.discard()
    collection.flush()
    assert torch.equal(stored_rows(collection, collection.embedding_bag_configs()[0]), before)
    assert collection.stored_tables()[0].stats().rows == 0
    pins = collection.stream.groups[0].cache.meta.view(torch.int32)[:, 6]
    assert (pins == 0).all()


def test_a_prefetched_batch_that_does_not_come() -> None:
    optimizer = EmbeddingOptimizer("sgd", lr=0.1)
    collection = opened([table("t", ["x"])], optimizer, CacheConfig(rows=32))
    plain = PlainBags(collection, optimizer, torch.float64)
    first, announced, other = (batch(["x"], [[k] for k in keys]) for keys in (range(20), range(20, 60), range(10, 30)))
    for features, upcoming in ((first, [announced]), (other, [announced]), (first, [])):
        collection.begin(features, upcoming)
        collection(features).values().square().sum().backward()
        plain(features).square().sum().backward()
        collection.step(lr=0.1)
        plain.step(0.1)
    collection.flush()
    got = stored_rows(collection, collection.embedding_bag_configs()[0])
    torch.testing.assert_close(got.double(), plain.weights["t"].detach(), rtol=0, atol=5e-6)


def test_gradients_are_a_mean_over_ranks() -> None:
    moved = []
    for world_size in (1, 4):
        collection = opened([table("t", ["x"])], world_size=world_size)
        before = stored_rows(collection, collection.embedding_bag_configs()[0])
        collection(batch(["x"], [[1, 2], [2]])).values().sum().backward()
        collection.step(lr=1.0)
        collection.flush()
        moved.append(stored_rows(collection, collection.embedding_bag_configs()[0]) - before)
    torch.testing.assert_close(moved[0], moved[1] * 4, rtol=1e-5, atol=1e-7)
    assert moved[0][2, 0] == pytest.approx(-2.0)


class Flaky(LocalStore):
    """A store that answers so many exchanges more, and fails once, when told so."""

    fails_after: int | None = None

    def exchange(self, request: ExchangeRequest) -> ExchangeReply:
        if self.fails_after is not None:
            self.fails_after -= 1
            if self.fails_after < 0:
                self.fails_after = None
                raise ConnectionError("the store is not there")
        return super().exchange(request)


def test_a_failed_exchange_is_repeated_without_loss() -> None:
    store = Flaky()
    collection = opened([table("t", ["x"], rows=200)], store=store)
    first, second = batch(["x"], [[k] for k in range(100)]), batch(["x"], [[k] for k in range(50, 150)])
    before = stored_rows(collection, collection.embedding_bag_configs()[0])
    for features, upcoming in ((first, [second]), (second, [])):
        try:
            collection.begin(features, upcoming)
        except ConnectionError:
            collection.begin(features, upcoming)
        store.fails_after = 0 if features is first else None
        collection(features).values().sum().backward()
        collection.step(lr=1.0)
    collection.flush()
    moved = stored_rows(collection, collection.embedding_bag_configs()[0]) - before
    expected = torch.zeros(200)
    expected[:100] -= 1
    expected[50:150] -= 1
    torch.testing.assert_close(moved, expected[:, None].expand(200, 4), rtol=0, atol=1e-5)


class Gated(LocalStore):
    """A store that answers one exchange for every time it is told to, and notes the first key that each fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.allow = threading.Semaphore(0)
        self.answered: list[int] = []
        self.fail_at: int | None = None

    def exchange(self, request: ExchangeRequest) -> ExchangeReply:
        assert self.allow.acquire(timeout=60)
        first = int(request.fetch.keys[0])
        if first == self.fail_at:
            self.fail_at = None
            raise ConnectionError("the store is not there")
        self.answered.append(first)
        return super().exchange(request)


@pytest.mark.parametrize("depth", [1, 3])
def test_a_step_waits_for_its_own_exchange_only(depth: int) -> None:
    store = Gated()
    collection = opened([table("t", ["x"], rows=200)], cache=CacheConfig(prefetch_depth=depth), store=store)
    batches = [batch(["x"], [[10 * i + j] for j in range(10)]) for i in range(8)]
    for i, features in enumerate(batches):
        store.allow.release()
        collection.begin(features, batches[i + 1 :])
        collection(features).values().sum().backward()
        collection.step(lr=1.0)
        assert store.answered == [10 * j for j in range(i + 1)]
        assert len(collection.stream.ahead) == min(depth, len(batches) - 1 - i)
    store.allow.release()
    assert collection.stats().misses == 80


def test_no_exchange_overtakes_one_that_failed() -> None:
    """Its pushes are missing at the store until it is repeated, and later fetches may ask for the same rows."""
    store = Gated()
    for _ in range(100):
        store.allow.release()
    collection = opened([table("t", ["x"], rows=200)], cache=CacheConfig(prefetch_depth=3), store=store)
    batches = [batch(["x"], [[10 * i + j] for j in range(10)]) for i in range(8)]
    store.fail_at = 20
    failures = 0
    for i, features in enumerate(batches):
        try:
            collection.begin(features, batches[i + 1 :])
        except ConnectionError:
            failures += 1
            collection.begin(features, batches[i + 1 :])
        collection(features).values().sum().backward()
        collection.step(lr=1.0)
    assert failures == 1
    assert store.answered == [10 * j for j in range(8)]


def test_a_failed_flush_is_repeated_without_loss() -> None:
    store = Flaky()
    collection = opened([table("t", ["x"])], store=store)
    before = stored_rows(collection, collection.embedding_bag_configs()[0])
    features = batch(["x"], [[1], [2]])
    for _ in range(2):
        collection(features).values().sum().backward()
        collection.step(lr=1.0)
        store.fails_after = 0
        with pytest.raises(ConnectionError):
            collection.flush()
    collection.flush()
    moved = stored_rows(collection, collection.embedding_bag_configs()[0]) - before
    assert moved[:, 0].tolist() == pytest.approx([0, -2, -2] + [0] * 57)


def test_no_slot_is_given_away_while_a_failed_flush_waits() -> None:
    """Its answer is written into the slots that were cut, so these must not hold other rows by then."""
    store = Flaky()
    collection = opened([table("t", ["x"], rows=200)], cache=CacheConfig(rows=32), store=store)
    before = stored_rows(collection, collection.embedding_bag_configs()[0])
    for first in (0, 100):
        collection(batch(["x"], [[first + k] for k in range(32)])).values().sum().backward()
        collection.step(lr=1.0)
        store.fails_after = 0
        with pytest.raises(ConnectionError):
            collection.flush()
    collection.flush()
    moved = stored_rows(collection, collection.embedding_bag_configs()[0]) - before
    expected = torch.zeros(200)
    expected[:32] = expected[100:132] = -1
    torch.testing.assert_close(moved, expected[:, None].expand(200, 4), rtol=0, atol=1e-5)


def test_what_the_store_has_answered_is_not_sent_again() -> None:
    """A batch has a request for each width; the second one fails."""
    store = Flaky()
    tables = [table("a", ["x"], dim=4), table("b", ["y"], dim=2)]
    collection = opened(tables, cache=CacheConfig(staleness=0), store=store)
    before = [stored_rows(collection, config) for config in tables]
    features = batch(["x", "y"], [[1], [1]])
    for step in range(3):
        store.fails_after = 1 if step == 1 else None
        if step == 1:
            with pytest.raises(ConnectionError):
                collection.begin(features)
        collection(features).values().sum().backward()
        collection.step(lr=1.0)
    collection.flush()
    for config, rows in zip(tables, before, strict=True):
        assert (stored_rows(collection, config) - rows)[1].tolist() == pytest.approx([-3.0] * config.embedding_dim)


@pytest.mark.parametrize("op", ["cache_plan", "cache_cut"])
def test_ctrl_c_while_deltas_leave_the_cache_loses_none(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python raises KeyboardInterrupt as the op returns, with what it cut in nobody's hands."""
    store = LocalStore()
    collection = opened([table("t", ["x"])], cache=CacheConfig(staleness=0), store=store)
    before = stored_rows(collection, collection.embedding_bag_configs()[0])
    features = batch(["x"], [[1], [2]])
    cut = getattr(ops, op)

    def cut_and_ctrl_c(*args: object) -> object:
        result = cut(*args)
        if interrupt:
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(ops, op, cut_and_ctrl_c)
    interrupt = False
    for _ in range(2):
        collection(features).values().sum().backward()
        collection.step(lr=1.0)
    interrupt = True
    with pytest.raises(KeyboardInterrupt):
        {"cache_plan": lambda: collection.begin(features), "cache_cut": collection.flush}[op]()
    interrupt = False
    collection.close()  # as a run that ends does
    collection.open(store, CacheConfig(), EmbeddingOptimizer("sgd"))
    moved = stored_rows(collection, collection.embedding_bag_configs()[0]) - before
    assert moved[:, 0].tolist() == pytest.approx([0, -2, -2] + [0] * 57)


def test_a_bound_for_a_single_table() -> None:
    """Table a is refreshed at every use after an update, table c, of the same width, never."""
    tables = [table("a", ["x"]), table("c", ["y"])]
    collection = opened(tables, cache=CacheConfig(staleness=100, table_staleness={"a": 0}))
    features = batch(["x", "y"], [[1, 2, 3], [4]])
    for _ in range(5):
        collection(features).values().sum().backward()
        collection.step(lr=0.1)
    stats = collection.stats()
    assert (stats.misses, stats.stale, stats.hits) == (4, 3 * 4, 4)
    with pytest.raises(ValueError, match="names b, z, but there are these tables: a, c"):
        opened(tables, cache=CacheConfig(table_staleness={"z": 1, "b": 1, "a": 2}))
    with pytest.raises(ValueError, match=r"table_staleness\[a\] must be 0 or more updates, got -1"):
        CacheConfig(table_staleness={"a": -1})


def test_life_cycle_errors() -> None:
    collection = HetEmbeddingBagCollection([table("t", ["x"])])
    with pytest.raises(RuntimeError, match="not open"):
        collection(batch(["x"], [[1]]))
    assert list(collection.parameters()) == list(collection.buffers()) == []
    collection = opened([table("t", ["x"])])
    with pytest.raises(RuntimeError, match="already open"):
        collection.open(collection.stored_tables()[0], CacheConfig(), EmbeddingOptimizer())
    collection.close()
    collection.close()
    assert not collection.is_open
    with pytest.raises(ValueError, match="more than once: t"):
        HetEmbeddingBagCollection([table("t", ["x"]), table("t", ["y"])])
    with pytest.raises(ValueError, match=r"cache\.fraction=0\.1 .* nobody knows how many these have: t"):
        opened([table("t", ["x"], rows=0)], cache=CacheConfig(fraction=0.1))


def test_cache_size_is_a_share_of_the_rows() -> None:
    tables = [table("a", ["x"], rows=64_000, dim=4), table("b", ["y"], rows=32_000, dim=8)]
    collection = opened(tables, cache=CacheConfig(fraction=0.1))
    assert [group.cache.capacity for group in collection.stream.groups] == [6_400, 3_200]
    unsized = HetEmbeddingBagCollection([table("t", ["x"], rows=0)])
    unsized.open(LocalStore(), CacheConfig(fraction=0.5), EmbeddingOptimizer(), expected_rows={"t": 6_400})
    assert unsized.stream.groups[0].cache.capacity == 3_200
