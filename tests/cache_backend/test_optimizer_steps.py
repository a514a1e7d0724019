"""Optimizers of rows where rows of several replicas meet, and what a store knows of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from cache_backend import EmbeddingOptimizer, EmbeddingStore, LocalStore, RemoteStore, TableSchema, ops
from cache_backend._table import EmbeddingTable
from cache_backend.cache import Cache, CachePlan, UniqueRows
from cache_backend.config import OPTIMIZERS, state_dim_of
from cache_backend.store import Fetch

DIM = 3


def plan_of(cache: Cache, store: EmbeddingStore, table: int, key: int) -> CachePlan:
    rows = ops.unique_rows(torch.tensor([key]), torch.tensor([0, 1]), torch.tensor([table], dtype=torch.int32))
    plan = cache.plan(UniqueRows(*rows))
    cache.commit(plan, store.exchange(plan.request))
    cache.settle(plan)
    return plan


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_is_as_wide_as_the_native_table_has_it(name: str) -> None:
    for dim in (1, DIM, 16):
        width = state_dim_of(name, dim)
        EmbeddingTable(dim, width).declare(0, 0, 0.0, 0.0, 0.0, OPTIMIZERS[name])
        with pytest.raises(ValueError, match=f"have {width} values of state"):
            EmbeddingTable(dim, width + 3 * dim).declare(0, 0, 0.0, 0.0, 0.0, OPTIMIZERS[name])
    with pytest.raises(ValueError, match="unknown optimizer number 4"):
        EmbeddingTable(1, 0).declare(0, 0, 0.0, 0.0, 0.0, 4)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_merges_by_addition_and_only_adams_v_is_kept_from_falling_below_0(name: str) -> None:
    width = DIM + state_dim_of(name, DIM)
    table = EmbeddingTable(DIM, width - DIM)
    table.declare(0, 0, 0.0, 0.0, 0.0, OPTIMIZERS[name])
    names = np.zeros(1, np.int32), np.zeros(1, np.int64)
    rng = np.random.default_rng(3)
    expected = np.zeros(width, np.float32)
    for clock in range(1, 20):
        delta = rng.integers(-4, 4, width).astype(np.float32)
        table.push(*names, np.array([clock - 1]), np.array([clock]), delta[None])
        expected += delta
        if name == "adam":
            v = slice(2 * DIM, 3 * DIM)
            expected[v] = np.maximum(expected[v], 0)
        row = np.empty((1, width), np.float32)
        table.fetch(*names, row, np.empty(1, np.int64), np.empty(1, np.uint8))
        np.testing.assert_array_equal(row[0], expected)


def test_adam_steps_on_from_0_where_a_rebased_row_has_a_negative_v() -> None:
    """A row that comes back after others decayed its v, with what is pending here on top, can have one."""
    store = LocalStore()
    (table,) = store.open([TableSchema("t", DIM, "adam", 1, 0.5, 0.5, 0.0)])
    cache = Cache(32, DIM, EmbeddingOptimizer("adam"), store, 100)
    plan = plan_of(cache, store, table, 7)
    v = slice(2 * DIM, 3 * DIM)
    row, pending = cache.rows[plan.slots[0]]
    row[v] = torch.tensor([-1.0, 0.0, 2.0])
    cache.update_rows(plan.slots, torch.ones(1, DIM), lr=0.1)
    assert torch.isfinite(row).all()
    torch.testing.assert_close(row[v], torch.tensor([0.001, 0.001, 2 * 0.999 + 0.001]))
    torch.testing.assert_close(pending[v], torch.tensor([1.001, 0.001, -0.001]))


def test_another_optimizer_of_the_same_width_is_refused_by_name(
    make_store: Callable[..., EmbeddingStore], tmp_path: Path
) -> None:
    """Rows of one weight: Adagrad's and row-wise Adagrad's both have one value of state."""
    store, other = make_store(), LocalStore()
    store.open([TableSchema("t", 1, "adagrad", 1, 0.0, 0.0, 0.0)])
    with pytest.raises(Exception, match="1 weights trained by adagrad; 1 and rowwise_adagrad were asked for"):
        store.open([TableSchema("t", 1, "rowwise_adagrad", 1, 0.0, 0.0, 0.0)])
    (mine,) = (schema for schema in store.schemas() if schema.name.endswith("t") and schema.dim == 1)
    other.open([TableSchema(mine.name, 1, "rowwise_adagrad", 1, 0.0, 0.0, 0.0)])
    other.snapshot(tmp_path / "other")
    with pytest.raises(Exception, match="rows of 1 weights trained by rowwise_adagrad, but 1 and adagrad are expected"):
        store.restore(tmp_path / "other")
    with pytest.raises(ValueError, match="table 't' is trained by 'adamw', which is unknown here; there are sgd, adag"):
        TableSchema("t", 1, "adamw", 1, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("fetch_codec", ["fp32", "fp16"])
@pytest.mark.parametrize("push_codec", ["fp32", "fp16", "bf16", "int8"])
def test_ten_thousand_small_updates_move_a_row(
    shard_addresses: Callable[..., list[str]], push_codec: str, fetch_codec: str
) -> None:
    """1e-5 on 1.0 each, where neighbouring float16 are 1e-3 apart."""
    store = RemoteStore(list(shard_addresses(1)), push_codec=push_codec, fetch_codec=fetch_codec)  # type: ignore[arg-type]
    (table,) = store.open([TableSchema(f"small {push_codec} {fetch_codec}", DIM, "sgd", 1, 1.0, 1.0, 0.0)])
    cache = Cache(32, DIM, EmbeddingOptimizer("sgd"), store, staleness=20)
    for _ in range(500):
        plan = plan_of(cache, store, table, 5)
        for _ in range(20):
            cache.update_rows(plan.slots, torch.full((1, DIM), -1.0), lr=1e-5)
        cache.release(plan)
    cache.flush()
    store.flush()
    row, _ = store.read(DIM, 0, Fetch(np.array([table], np.int32), np.array([5])))
    np.testing.assert_allclose(row, 1.1, rtol=0, atol=1e-4)
