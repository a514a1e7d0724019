"""Every op's schema, fake kernel and dispatch, as torch.library.opcheck sees them, on inputs that move real rows."""

from __future__ import annotations

import pytest
import torch

from cache_backend import EmbeddingOptimizer, LocalStore, TableSchema, ops
from cache_backend.cache import Cache, CachePlan, UniqueRows
from cache_backend.config import OPTIMIZERS

DIM = 4
FEATURES, SAMPLES = 2, 3


def unique(keys: torch.Tensor) -> UniqueRows:
    splits = torch.arange(0, keys.numel() + 1, keys.numel() // FEATURES)
    return UniqueRows(*ops.unique_rows(keys, splits, torch.zeros(FEATURES, dtype=torch.int32)))


def planned() -> tuple[Cache, CachePlan]:
    """A cache that holds one updated batch, with a second batch planned, committed and not yet updated."""
    store = LocalStore()
    store.open([TableSchema("t", DIM, "rowwise_adagrad", 3, -1.0, 1.0, 0.0)])
    cache = Cache(32, DIM, EmbeddingOptimizer(), store, staleness=0, policy="lookahead")
    for keys in ([1, 2, 3, 3, 4, 5], [1, 2, 9, 9, 7, 8]):
        plan = cache.plan(unique(torch.tensor(keys)))
        cache.commit(plan, store.exchange(plan.request))
        if keys[2] == 3:
            cache.update_rows(plan.slots, torch.ones(plan.slots.numel(), DIM), lr=0.1)
            cache.release(plan)
    return cache, plan


def cases() -> dict[str, tuple]:
    cache, plan = planned()
    keys, splits = torch.tensor([1, 2, 9, 9, 7, 8]), torch.tensor([0, 3, 6])
    rows, offsets = plan.rows, torch.arange(FEATURES * SAMPLES + 1)
    mean = torch.tensor([0, 1], dtype=torch.uint8)
    grad = torch.randn(SAMPLES, FEATURES * DIM)
    bag_of = torch.arange(FEATURES * SAMPLES, dtype=torch.int32)
    weights = torch.rand(FEATURES * SAMPLES)
    reply_rows, clocks = torch.randn(plan.slots.numel(), DIM + 1), torch.ones(plan.slots.numel(), dtype=torch.int64)
    fresh = torch.tensor([1, 0, 0, 1, 0], dtype=torch.uint8)
    seeds, values = torch.tensor([3]), torch.tensor([[-1.0, 1.0, 0.0]])
    window = torch.zeros(2, 8, 2, dtype=torch.int64)
    ops.cache_reveal(cache.tags, cache.priority, cache.meta, window, rows.keys, rows.tables, 9)
    state = (cache.tags, cache.priority, cache.meta, cache.rows, cache.sketch, window)
    unplaced = torch.full_like(plan.slots, -1)
    bags = (bag_of, offsets, weights, mean)
    adagrad = (OPTIMIZERS["rowwise_adagrad"], 0.1, torch.tensor(EmbeddingOptimizer().settings()))
    graph = (torch.tensor([0, 4, 7, 7, 8, 11]), torch.tensor([1, 2, 3, 4, 0, 2, 3, 0, 0, 1, 3]))
    return {
        "check_keys": (keys, splits, torch.tensor([5, 0])),
        "unique_rows": (keys, splits, torch.tensor([0, 0], dtype=torch.int32)),
        "cache_plan": (*state, rows.keys, rows.tables, 4, 9, 500, torch.tensor([0]), True),
        "cache_reveal": (cache.tags, cache.priority, cache.meta, window, rows.keys, rows.tables, 11),
        "cache_unreveal": (cache.priority, window),
        "cache_spill": (cache.meta, unplaced, rows.keys, rows.tables, cache.capacity),
        "cache_cut": (cache.meta, cache.rows, plan.slots),
        "cache_answered": (cache.meta, plan.slots, torch.tensor([0, 2], dtype=torch.int32)),
        "cache_commit": (cache.meta, cache.rows, plan.slots, 2, reply_rows, clocks, fresh, seeds, values, DIM),
        "cache_release": (cache.meta, cache.priority, plan.slots),
        "init_rows": (reply_rows, fresh, rows.keys, rows.tables, seeds, values, DIM),
        "bag_lookup": (cache.rows, plan.slots, rows.inverse, *bags, DIM),
        "bag_grad": (grad, rows.order, rows.splits, *bags, DIM, 0.5),
        "bag_weight_grad": (cache.rows, plan.slots, rows.inverse, bag_of, offsets, mean, grad, DIM),
        "bag_update": (
            *(cache.rows, cache.meta, cache.priority, plan.slots, grad, rows.order, rows.splits),
            *(*bags, DIM, 0.5, *adagrad),
        ),
        "sample_neighbors": (*graph, torch.tensor([4, 1]), [2, -1], 7, 1, 3),
        "row_update": (cache.rows, cache.meta, plan.slots, torch.randn(plan.slots.numel(), DIM), DIM, *adagrad, True),
    }


@pytest.mark.parametrize("name", ops.__all__)
def test_opcheck(name: str) -> None:
    result = torch.library.opcheck(getattr(ops, name), cases()[name])
    assert set(result.values()) == {"SUCCESS"}


def test_no_op_is_left_out() -> None:
    registered = {
        name.split("::")[1].split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("hetrec::")
    }
    assert registered == set(ops.__all__) == set(cases())


def test_wrong_dtype_and_layout_are_refused() -> None:
    keys, splits, tables = torch.tensor([1, 2]), torch.tensor([0, 2]), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="keys must be int64"):
        ops.unique_rows(keys.int(), splits, tables)
    with pytest.raises(RuntimeError, match="keys must be contiguous"):
        ops.unique_rows(torch.tensor([1, 2, 3, 4])[::2], splits, tables)
    with pytest.raises(RuntimeError, match="do not cover"):
        ops.unique_rows(keys, torch.tensor([0, 1]), tables)
