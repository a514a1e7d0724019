"""The cache against dictionaries: which rows it keeps, what it pushes, and what several caches over one store see."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache_backend import CacheConfig, EmbeddingOptimizer, EmbeddingStore, LocalStore, TableSchema, ops
from cache_backend.cache import Cache, CachePlan, UniqueRows

MakeStore = Callable[..., EmbeddingStore]
DIM = 2


def unique(ids: list[int], keys: list[int], tables: list[int] | None = None) -> UniqueRows:
    """Rows of a batch; with ``tables``, the table of each key, as a number into ``ids``."""
    of_key = torch.tensor([ids[t] for t in tables or [0] * len(keys)], dtype=torch.int32)
    return UniqueRows(*ops.unique_rows(torch.tensor(keys, dtype=torch.int64), torch.arange(len(keys) + 1), of_key))


def open_tables(store: EmbeddingStore, tables: int = 1) -> list[int]:
    return store.open([TableSchema(f"t{i}", DIM, "sgd", i, 0.0, 0.0, 0.0) for i in range(tables)])  # rows begin at zero


def new_cache(store: EmbeddingStore, rows: int = 32, staleness: int = 100, policy: str = "lru") -> Cache:
    return Cache(rows, DIM, EmbeddingOptimizer("sgd"), store, staleness, policy)


def begin(cache: Cache, store: EmbeddingStore, rows: UniqueRows) -> CachePlan:
    plan = cache.plan(rows)
    cache.commit(plan, store.exchange(plan.request))
    cache.settle(plan)
    return plan


def finish(cache: Cache, plan: CachePlan, step: float = 1.0) -> None:
    """Adds ``step`` to every weight of the batch's rows."""
    cache.update_rows(plan.slots, torch.full((plan.slots.numel(), DIM), -float(step)), lr=1.0)
    cache.release(plan)


def values(cache: Cache, plan: CachePlan) -> list[float]:
    return cache.rows[plan.slots, 0, 0].tolist()


def cached_keys(cache: Cache) -> set[int]:
    held = cache.meta.view(torch.int32)[: cache.capacity, 5] >= 0
    return set(cache.meta[: cache.capacity][held, 0].tolist())


def test_a_full_set_lets_the_least_recently_used_row_go() -> None:
    store = LocalStore()
    ids = open_tables(store)
    cache, model = new_cache(store), OrderedDict[int, None]()
    rng = np.random.default_rng(0)
    for key in (rng.random(3000) ** 2 * 80).astype(int).tolist():
        finish(cache, begin(cache, store, unique(ids, [key])))
        model[key] = None
        model.move_to_end(key)
        if len(model) > 32:
            model.popitem(last=False)
        assert cached_keys(cache) == set(model)


def test_a_full_set_lets_the_least_frequently_used_row_go() -> None:
    """In-cache frequency: a row that left starts anew. Among equals the one whose last use is longest ago goes."""
    store = LocalStore()
    ids = open_tables(store)
    cache = new_cache(store, policy="lfu")
    model: dict[int, tuple[int, int]] = {}  # key: uses, last use
    rng = np.random.default_rng(0)
    for tick, key in enumerate((rng.random(3000) ** 2 * 80).astype(int).tolist()):
        finish(cache, begin(cache, store, unique(ids, [key])))
        if key not in model and len(model) == 32:
            del model[min(model, key=model.__getitem__)]
        model[key] = (model.get(key, (0, 0))[0] + 1, tick)
        assert cached_keys(cache) == set(model)


def test_rows_of_different_tables_with_one_key_are_different_rows(make_store: MakeStore) -> None:
    store = make_store()
    ids = open_tables(store, 3)
    cache = new_cache(store)
    keys = [7, 7, 7, -1, -1]
    tables = [0, 1, 2, 0, 2]
    plan = begin(cache, store, unique(ids, keys, tables))
    assert plan.slots.unique().numel() == 5
    cache.update_rows(plan.slots, -torch.arange(1.0, 6)[:, None].expand(5, DIM), lr=1.0)
    cache.release(plan)
    cache.flush()
    again = begin(new_cache(store), store, unique(ids, list(reversed(keys)), list(reversed(tables))))
    fresh = new_cache(store)
    assert values(fresh, begin(fresh, store, again.rows)) == [5, 4, 3, 2, 1]


batches = st.lists(st.lists(st.integers(0, 90), min_size=1, max_size=40), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches, st.sampled_from([32, 64, 256]), st.integers(0, 3), st.booleans(), st.sampled_from(["lamport", "sum"]))
def test_any_schedule_applies_every_update_once(
    make_store: MakeStore, schedule: list[list[int]], rows: int, staleness: int, ahead: bool, clock: str
) -> None:
    """With and without planning the next batch before this one's update. Values count updates: whole numbers."""
    store = make_store(clock=clock)
    ids = open_tables(store)
    cache = new_cache(store, rows, staleness)
    stored = store.stats().rows
    model: dict[int, int] = {}
    uniques = [unique(ids, keys) for keys in schedule]
    planned = None
    for i, batch in enumerate(uniques):
        if planned is None:
            planned = cache.plan(batch), None
        plan, reply = planned
        cache.commit(plan, store.exchange(plan.request) if reply is None else reply)
        cache.settle(plan)
        planned = None
        if ahead and i + 1 < len(uniques):
            following = cache.plan(uniques[i + 1])
            planned = following, store.exchange(following.request)  # answered before this batch's update
        assert values(cache, plan) == [model.get(key, 0) for key in batch.keys.tolist()]  # reads its own updates
        pending = cache.meta.view(torch.int32)[plan.slots, 4]
        assert (pending <= staleness).all()
        finish(cache, plan)
        for key in batch.keys.tolist():
            model[key] = model.get(key, 0) + 1
    cache.flush()
    everything = unique(ids, list(range(91)))
    assert cache.read(everything)[:, 0].tolist() == [model.get(key, 0) for key in range(91)]
    assert store.stats().rows - stored == len(model)
    assert cache.stats.overflow == 0 or rows < 256


@pytest.mark.parametrize("clock", ["lamport", "sum"])
def test_rows_that_came_back_are_rebased(make_store: MakeStore, clock: str) -> None:
    """An update between a request's cut and its reply stays pending on top of the row, and is pushed once."""
    store = make_store(exclusive=False, clock=clock)
    ids = open_tables(store)
    mine, other = new_cache(store, staleness=1), new_cache(store, staleness=1)
    for _ in range(2):
        finish(mine, begin(mine, store, unique(ids, [1])))  # two updates pending: the next use must refresh
    current = begin(mine, store, unique(ids, [1]))
    for _ in range(2):
        finish(other, begin(other, store, unique(ids, [1])), step=100)
        other.flush()
    following = mine.plan(unique(ids, [1]))  # one update to come: still valid here, but the server knows better
    reply = store.exchange(following.request)
    finish(mine, current, step=10)
    mine.commit(following, reply)
    assert values(mine, following) == [212]
    finish(mine, following, step=0)
    mine.flush()
    assert mine.read(unique(ids, [1]))[0, 0] == 212


def test_the_server_finds_rows_that_others_moved_beyond_the_bound(make_store: MakeStore) -> None:
    staleness = 3
    store = make_store(exclusive=False)
    ids = open_tables(store)
    reader, writer = new_cache(store, staleness=staleness), new_cache(store, staleness=0)
    reader.release(begin(reader, store, unique(ids, [5, 6])))
    for update in range(1, 8):
        finish(writer, begin(writer, store, unique(ids, [5])))
        writer.flush()
        plan = begin(reader, store, unique(ids, [5, 6]))
        seen = values(reader, plan)[0]
        assert update - seen <= staleness
        reader.release(plan)
    assert reader.stats.stale == 1  # at the fourth update; from there three more are within the bound
    assert values(reader, plan) == [4, 0]


def test_settings_are_checked() -> None:
    for bad, message in (
        ({"rows": 0}, "cache.rows must be at least 1, got 0"),
        ({"fraction": 1.5}, "cache.fraction must be in"),
        ({"rows": 1, "fraction": 0.5}, "exclude each other"),
        ({"staleness": -1}, "cache.staleness must be 0 or more"),
        ({"policy": "fifo"}, "unknown cache.policy 'fifo'; available: lru, lfu"),
    ):
        with pytest.raises(ValueError, match=message):
            CacheConfig(**bad)
    with pytest.raises(ValueError, match="unknown embedding optimizer 'adamw'; available: sgd, adagrad"):
        EmbeddingOptimizer("adamw")  # type: ignore[arg-type]
    for bad, message in (
        ({"lr": -1}, r"embedding\.lr must not be negative, got -1"),
        ({"weight_decay": -0.1}, r"embedding\.weight_decay must not be negative"),
        ({"max_gradient": 0.0}, r"embedding\.max_gradient must be positive, or null"),
        ({"max_gradient_norm": -1.0}, r"embedding\.max_gradient_norm must be positive, or null"),
        ({"betas": (0.9, 1.0)}, r"embedding\.betas must be two numbers in \[0, 1\)"),
        ({"name": "adam", "initial_accumulator": 0.1}, r"embedding\.initial_accumulator=0\.1 is Adagrad's"),
    ):
        with pytest.raises(ValueError, match=message):
            EmbeddingOptimizer(**bad)
