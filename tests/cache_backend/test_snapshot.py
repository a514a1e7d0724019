"""Snapshots: what is restored is what was saved, and nothing else is ever restored."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from cache_backend import LocalStore, SnapshotError, TableSchema
from cache_backend.store import Check, ExchangeRequest, Fetch, Push


def schema(name: str, dim: int = 4, optimizer: str = "rowwise_adagrad", seed: int = 1) -> TableSchema:
    return TableSchema(name, dim, optimizer, seed, -1.0, 1.0, 0.0)


def write(store: LocalStore, s: TableSchema, keys: list[int], clock: int = 5) -> np.ndarray:
    (table,) = store.open([s])
    n, width = len(keys), s.dim + s.state_dim
    deltas = np.random.default_rng(len(keys)).standard_normal((n, width)).astype(np.float32)
    tables, k, c = np.full(n, table, np.int32), np.array(keys, np.int64), np.full(n, clock, np.int64)
    store.exchange(
        ExchangeRequest(s.dim, s.state_dim, Push(tables, k, c, c, deltas), Check(), Fetch(tables[:0], k[:0]))
    )
    return read(store, s, keys)[0]


def read(store: LocalStore, s: TableSchema, keys: list[int]) -> tuple[np.ndarray, np.ndarray]:
    (table,) = store.open([s])
    request = Fetch(np.full(len(keys), table, np.int32), np.array(keys, np.int64))
    reply = store.exchange(ExchangeRequest(s.dim, s.state_dim, Push.nothing(s.dim + s.state_dim), Check(), request))
    assert not reply.fresh.any()
    return reply.rows, reply.clocks


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    store = LocalStore()
    rows = {
        "a": write(store, schema("a"), [1, -5, 2**62]),
        "b": write(store, schema("b", seed=2), list(range(1000))),
        "c": write(store, schema("c", dim=2, optimizer="sgd"), [7]),
    }
    store.snapshot(tmp_path / "snap")
    return tmp_path / "snap", rows


def test_round_trip_into_a_store_that_opened_tables_in_another_order(saved: tuple) -> None:
    path, rows = saved
    store = LocalStore()
    store.open([schema("new"), schema("b", seed=77), schema("c", dim=2, optimizer="sgd")])
    store.restore(path)
    np.testing.assert_array_equal(read(store, schema("a"), [1, -5, 2**62])[0], rows["a"])
    values, clocks = read(store, schema("b"), list(range(1000)))
    np.testing.assert_array_equal(values, rows["b"])
    assert (clocks == 5).all()
    np.testing.assert_array_equal(read(store, schema("c", dim=2, optimizer="sgd"), [7])[0], rows["c"])
    seeds = {s.name: s.seed for s in store.schemas()}
    assert seeds == {"new": 1, "b": 2, "c": 1, "a": 1}  # the snapshot's seed, or fresh rows would change


def test_it_is_ordinary_parquet(saved: tuple) -> None:
    path, rows = saved
    table = pq.read_table(path / "rows-4x1.parquet")
    assert table.column_names == ["bucket", "table", "key", "clock", "weight", "state"]
    assert table.num_rows == 1003
    buckets = table["bucket"].to_numpy()
    assert (np.diff(buckets) >= 0).all()
    a = table.filter(pq.filters_to_expression([("table", "=", "a"), ("key", "=", -5)]))
    np.testing.assert_array_equal(np.array(a["weight"][0].as_py() + a["state"][0].as_py(), np.float32), rows["a"][1])


def test_nothing_is_overwritten(saved: tuple) -> None:
    with pytest.raises(FileExistsError, match="never overwritten"):
        LocalStore().snapshot(saved[0])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "manifest.json").unlink(), "manifest.json is absent"),
        (lambda p: (p / "rows-4x1.parquet").unlink(), "rows-4x1.parquet is absent"),
        (lambda p: (p / "manifest.json").write_text("{"), "not a manifest"),
        (lambda p: (p / "manifest.json").write_text(json.dumps({"format": 9})), "snapshot format 9"),
        (lambda p: _flip(p / "rows-4x1.parquet"), "does not match its checksum"),
    ],
)
def test_damage_is_named_and_leaves_the_store_alone(saved: tuple, damage, message: str) -> None:  # type: ignore[no-untyped-def]
    path, _ = saved
    damage(path)
    store = LocalStore()
    before = write(store, schema("a"), [3, 4])
    with pytest.raises(SnapshotError, match=message):
        store.restore(path)
    np.testing.assert_array_equal(read(store, schema("a"), [3, 4])[0], before)


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_another_row_format_is_refused_by_name(saved: tuple) -> None:
    store = LocalStore()
    store.open([schema("a", dim=8)])
    with pytest.raises(
        ValueError, match=r"table 'a' has rows of 4 weights trained by rowwise_adagrad, but 8 and rowwise_adagrad are"
    ):
        store.restore(saved[0])
    with pytest.raises(ValueError, match="table 'a' holds rows of 8 weights"):
        store.open([schema("a", dim=16)])


KILLED = """
import sys
import numpy as np
from cache_backend import LocalStore, TableSchema
from cache_backend.store import *
store = LocalStore()
store.open([TableSchema("t", 64, "rowwise_adagrad", 0, 0.0, 0.0, 0.0)])
n = 200_000
tables, keys = np.zeros(n, np.int32), np.arange(n)
push = Push(tables, keys, keys, keys, np.ones((n, 65), np.float32))
store.exchange(ExchangeRequest(64, 1, push, Check(), Fetch(tables[:0], keys[:0])))
print("ready", flush=True)
for i in range(100):
    store.snapshot(sys.argv[1] + f"/{i}")
"""


@pytest.mark.parametrize("delay", [0.05, 0.2, 0.5])
def test_a_killed_snapshot_never_looks_complete(tmp_path: Path, delay: float) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    time.sleep(delay)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=30)
    complete = [p for p in tmp_path.iterdir() if not p.name.startswith(".")]
    for path in complete:
        store = LocalStore()
        store.restore(path)
        assert store.stats().rows == 200_000
    assert len(complete) < 100
