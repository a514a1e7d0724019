"""The cache against dictionaries: which rows it keeps, what it pushes, and what several caches over one store see."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_backend import CacheConfig, EmbeddingOptimizer, LocalStore, TableSchema, ops
from cache_backend.cache import Cache, CachePlan, UniqueRows

DIM = 2


def unique(keys: list[int], tables: list[int] | None = None) -> UniqueRows:
    """Rows of a batch; with ``tables``, one table a key."""
    ids = torch.tensor(tables or [0] * len(keys), dtype=torch.int32)
    return UniqueRows(*ops.unique_rows(torch.tensor(keys, dtype=torch.int64), torch.arange(len(keys) + 1), ids))


def new_store(exclusive: bool = True, tables: int = 1, clock: str = "lamport") -> LocalStore:
    store = LocalStore(clock=clock, exclusive=exclusive)
    store.open([TableSchema(f"t{i}", DIM, 0, i, 0.0, 0.0, 0.0) for i in range(tables)])  # rows begin at zero
    return store


def new_cache(store: LocalStore, rows: int = 32, staleness: int = 100) -> Cache:
    return Cache(rows, DIM, EmbeddingOptimizer("sgd"), store, staleness)


def begin(cache: Cache, store: LocalStore, rows: UniqueRows) -> CachePlan:
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
    store = new_store()
    cache, model = new_cache(store), OrderedDict[int, None]()
    rng = np.random.default_rng(0)
    for key in (rng.random(3000) ** 2 * 80).astype(int).tolist():
        finish(cache, begin(cache, store, unique([key])))
        model[key] = None
        model.move_to_end(key)
        if len(model) > 32:
            model.popitem(last=False)
        assert cached_keys(cache) == set(model)


def test_rows_of_different_tables_with_one_key_are_different_rows() -> None:
    store = new_store(tables=3)
    cache = new_cache(store)
    keys = [7, 7, 7, -1, -1]
    tables = [0, 1, 2, 0, 2]
    plan = begin(cache, store, unique(keys, tables))
    assert plan.slots.unique().numel() == 5
    cache.update_rows(plan.slots, -torch.arange(1.0, 6)[:, None].expand(5, DIM), lr=1.0)
    cache.release(plan)
    cache.flush()
    again = begin(new_cache(store), store, unique(list(reversed(keys)), list(reversed(tables))))
    fresh = new_cache(store)
    assert values(fresh, begin(fresh, store, again.rows)) == [5, 4, 3, 2, 1]


batches = st.lists(st.lists(st.integers(0, 90), min_size=1, max_size=40), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(batches, st.sampled_from([32, 64, 256]), st.integers(0, 3), st.booleans(), st.sampled_from(["lamport", "sum"]))
def test_any_schedule_applies_every_update_once(
    schedule: list[list[int]], rows: int, staleness: int, ahead: bool, clock: str
) -> None:
    """With and without planning the next batch before this one's update. Values count updates: whole numbers."""
    store = new_store(clock=clock)
    cache = new_cache(store, rows, staleness)
    model: dict[int, int] = {}
    uniques = [unique(keys) for keys in schedule]
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
    everything = unique(list(range(91)))
    assert cache.read(everything)[:, 0].tolist() == [model.get(key, 0) for key in range(91)]
    assert store.stats().rows == len(model)
    assert cache.stats.overflow == 0 or rows < 256


@pytest.mark.parametrize("clock", ["lamport", "sum"])
def test_rows_that_came_back_are_rebased(clock: str) -> None:
    """An update between a request's cut and its reply stays pending on top of the row, and is pushed once."""
    store = new_store(exclusive=False, clock=clock)
    mine, other = new_cache(store, staleness=1), new_cache(store, staleness=1)
    for _ in range(2):
        finish(mine, begin(mine, store, unique([1])))  # two updates pending: the next use must refresh
    current = begin(mine, store, unique([1]))
    for _ in range(2):
        finish(other, begin(other, store, unique([1])), step=100)
        other.flush()
    following = mine.plan(unique([1]))  # one update to come: still valid here, but the server knows better
    reply = store.exchange(following.request)
    finish(mine, current, step=10)
    mine.commit(following, reply)
    assert values(mine, following) == [212]
    finish(mine, following, step=0)
    mine.flush()
    assert mine.read(unique([1]))[0, 0] == 212


def test_the_server_finds_rows_that_others_moved_beyond_the_bound() -> None:
    staleness = 3
    store = new_store(exclusive=False)
    reader, writer = new_cache(store, staleness=staleness), new_cache(store, staleness=0)
    reader.release(begin(reader, store, unique([5, 6])))
    for update in range(1, 8):
        finish(writer, begin(writer, store, unique([5])))
        writer.flush()
        plan = begin(reader, store, unique([5, 6]))
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
        ({"policy": "fifo"}, "unknown cache.policy 'fifo'; available: lru"),
    ):
        with pytest.raises(ValueError, match=message):
            CacheConfig(**bad)
    with pytest.raises(ValueError, match="unknown embedding optimizer 'adamw'; available: sgd, adagrad"):
        EmbeddingOptimizer("adamw")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"embedding\.lr must not be negative, got -1"):
        EmbeddingOptimizer(lr=-1)
