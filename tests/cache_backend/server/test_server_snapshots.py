"""Snapshots written by some number of shards and read by another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from running import DIM, STATE, Program

from cache_backend.store import Check, ExchangeRequest, Fetch, Push, TableSchema
from cache_backend.stores.local import LocalStore
from cache_backend.stores.remote import RemoteStore

A = TableSchema("a", DIM, "rowwise_adagrad", 3, -0.1, 0.1, 0.5)
B = TableSchema("b", DIM, "rowwise_adagrad", 4, 0.0, 0.0, 0.0)
WIDE = TableSchema("wide", 7, "sgd", 5, -1.0, 1.0, 0.0)
N = 400


def fill(store: LocalStore | RemoteStore) -> None:
    rng = np.random.default_rng(1)
    ids = dict(zip("abw", store.open([A, B, WIDE]), strict=True))
    for dim, state_dim, names in ((DIM, STATE, "ab"), (7, 0, "w")):
        tables = np.array([ids[name] for name in rng.choice(list(names), N)], np.int32)
        keys = rng.integers(-(2**62), 2**62, N)
        clocks = rng.integers(1, 50, N)
        deltas = rng.standard_normal((N, dim + state_dim)).astype(np.float32)
        push = Push(tables, keys, np.zeros(N, np.int64), clocks, deltas)
        store.exchange(ExchangeRequest(dim, state_dim, push, Check(), Fetch(tables[:0], keys[:0])))


def everything(store: LocalStore | RemoteStore) -> list[bytes]:
    """Rows and clocks of all keys that ``fill`` wrote, by the table's name."""
    rng = np.random.default_rng(1)
    ids = dict(zip("abw", store.open([A, B, WIDE]), strict=True))
    found = []
    for dim, state_dim, names in ((DIM, STATE, "ab"), (7, 0, "w")):
        tables = np.array([ids[name] for name in rng.choice(list(names), N)], np.int32)
        keys = rng.integers(-(2**62), 2**62, N)
        rng.integers(1, 50, N), rng.standard_normal((N, dim + state_dim))
        request = ExchangeRequest(dim, state_dim, Push.nothing(dim + state_dim), Check(), Fetch(tables, keys))
        reply = store.exchange(request)
        assert not reply.fresh.any()
        found += [reply.rows.tobytes(), reply.clocks.tobytes()]
    return found


@pytest.fixture
def cluster(program: Callable[..., Program]) -> Callable[[int], RemoteStore]:
    stores = []

    def start(n: int) -> RemoteStore:
        stores.append(RemoteStore([program("--shard", f"{i}/{n}").address for i in range(n)]))
        return stores[-1]

    yield start
    for store in stores:
        store.close()


def test_one_shard_to_three_to_two(cluster: Callable[[int], RemoteStore], tmp_path: Path) -> None:
    """The exact values; the tables also get other ids on the way, and with them other shards."""
    local = LocalStore()
    fill(local)
    expected = everything(local)
    local.snapshot(tmp_path / "local")

    three = cluster(3)
    three.open([WIDE, TableSchema("other", DIM, "rowwise_adagrad", 1, 0.0, 0.0, 0.0), B])
    three.restore(tmp_path / "local")
    assert everything(three) == expected
    assert three.stats().rows == 2 * N
    three.snapshot(tmp_path / "three")

    two = cluster(2)
    two.restore(tmp_path / "three")
    assert everything(two) == expected
    assert two.stats().rows == 2 * N

    back = LocalStore()
    back.restore(tmp_path / "three")
    assert everything(back) == expected


def test_a_refused_snapshot_changes_nothing(cluster: Callable[[int], RemoteStore], tmp_path: Path) -> None:
    store = cluster(1)
    fill(store)
    expected = everything(store)
    other = LocalStore()
    other.open([TableSchema("a", DIM + 1, "rowwise_adagrad", 3, 0.0, 0.0, 0.0)])
    other.snapshot(tmp_path / "another")
    store.snapshot(tmp_path / "damaged")
    (file, *_) = sorted((tmp_path / "damaged").glob("*.parquet"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    for folder, message in (
        ("absent", "no embedding snapshot"),
        ("another", "'a' has rows of 4 weights trained by rowwise_adagrad, but 3 and rowwise_adagrad are"),
        ("damaged", "was altered"),
    ):
        with pytest.raises(Exception, match=message):
            store.restore(tmp_path / folder)
        assert everything(store) == expected
