"""What lossy pushes round off: the rows that a server decodes, and what is kept, are all that was ever pushed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from frames import decode_request

from cache_backend import RemoteStore, StoreError, TableSchema, _table
from cache_backend.store import Check, ExchangeRequest, Fetch, Push
from cache_backend.stores.residuals import Residuals

DIM, STATE = 13, 1
WIDTH = DIM + STATE
CODECS = {"fp16": 1, "bf16": 2, "int8": 3}
Row = tuple[int, int]


def encode(codec: int, residuals: _table.Residuals, rows: list[Row], deltas: np.ndarray) -> bytes:
    none = np.empty(0, np.int64)
    return bytes(
        _table.encode_request(
            worker=1,
            session=1,
            sequence=1,
            generation=1,
            dim=DIM,
            state_dim=STATE,
            push_codec=codec,
            fetch_codec=0,
            push_tables=np.array([table for table, _ in rows], np.int32),
            push_keys=np.array([key for _, key in rows], np.int64),
            push_starts=np.zeros(len(rows), np.int64),
            push_clocks=np.zeros(len(rows), np.int64),
            deltas=deltas,
            check_tables=none.astype(np.int32),
            check_keys=none,
            check_clocks=none,
            check_staleness=none,
            fetch_tables=none.astype(np.int32),
            fetch_keys=none,
            residuals=residuals,
        )
    )


@pytest.mark.parametrize("codec", CODECS)
def test_what_arrived_and_what_is_kept_is_what_was_pushed(codec: str) -> None:
    rng = np.random.default_rng(CODECS[codec])
    names = [
        (int(t), int(k)) for t, k in zip(rng.integers(0, 3, 60), rng.integers(-(2**63), 2**63 - 1, 60), strict=True)
    ]
    pushed = {name: np.zeros(WIDTH) for name in names}
    arrived = {name: np.zeros(WIDTH) for name in names}
    residuals = _table.Residuals(CODECS[codec], DIM, STATE)
    for _ in range(40):
        rows = [names[i] for i in rng.integers(0, len(names), rng.integers(0, 50))]  # some of them twice
        deltas = rng.standard_normal((len(rows), WIDTH)).astype(np.float32) * 10 ** rng.uniform(-9, 1, (len(rows), 1))
        deltas = deltas.astype(np.float32)
        given = deltas.copy()
        for row, delta in zip(rows, deltas, strict=True):
            pushed[row] += delta.astype(np.float64)
        frame = decode_request(encode(CODECS[codec], residuals, rows, deltas))
        np.testing.assert_array_equal(deltas, given)  # the caller's array is left alone
        for row, delta in zip(rows, frame.deltas, strict=True):
            arrived[row] += np.array(delta, np.float64)
    tables, keys, errors = residuals.drain()
    kept = {(int(t), int(k)): e.astype(np.float64) for t, k, e in zip(tables, keys, errors, strict=True)}
    assert kept.keys() <= pushed.keys()
    assert all(error.any() for error in kept.values())
    for name in names:
        total = arrived[name] + kept.get(name, np.zeros(WIDTH))
        scale = max(np.abs(pushed[name]).max(), 1.0)
        np.testing.assert_allclose(total, pushed[name], rtol=0, atol=40 * scale * 2**-23)  # sums in float32
    assert len(residuals) == 0
    assert len(residuals.drain()[1]) == 0


def test_a_push_that_loses_nothing_keeps_nothing() -> None:
    residuals = Residuals(CODECS["fp16"])
    encode(1, residuals.of(DIM, STATE), [(0, 1), (1, 1)], np.ones((2, WIDTH), np.float32))
    assert residuals.drain() == []


def test_residuals_of_another_format_are_refused() -> None:
    for other in (_table.Residuals(2, DIM, STATE), _table.Residuals(1, DIM + 1, STATE)):
        with pytest.raises(ValueError, match="another codec or row format"):
            encode(1, other, [(0, 1)], np.ones((1, WIDTH), np.float32))


def test_a_restored_store_forgets_what_was_kept(shard_addresses: Callable, tmp_path: Path) -> None:
    store = RemoteStore(list(shard_addresses(1, "lamport")), push_codec="int8")
    (table,) = store.open([TableSchema("restored", DIM, "rowwise_adagrad", 0, 0.0, 0.0, 0.0)])
    store.snapshot(tmp_path / "empty")
    row, clock = np.array([5], np.int64), np.zeros(1, np.int64)
    deltas = np.linspace(0.1, 1, WIDTH, dtype=np.float32)[None]
    tables = np.array([table], np.int32)
    store.exchange(ExchangeRequest(DIM, STATE, Push(tables, row, clock, clock, deltas), Check(), Fetch(tables, row)))
    store.restore(tmp_path / "empty")
    store.flush()
    _, fresh = store.read(DIM, STATE, Fetch(tables, row))
    assert fresh.all()


def test_errors_that_could_not_be_sent_are_sent_later(
    shard_addresses: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RemoteStore(list(shard_addresses(1, "lamport")), push_codec="int8", timeout_s=5, retry_s=0.1)
    (table,) = store.open([TableSchema("unsent", DIM, "rowwise_adagrad", 0, 0.0, 0.0, 0.0)])
    row, clock, tables = np.array([5], np.int64), np.zeros(1, np.int64), np.array([table], np.int32)
    deltas = np.linspace(0.1, 1, WIDTH, dtype=np.float32)[None]
    store.exchange(ExchangeRequest(DIM, STATE, Push(tables, row, clock, clock, deltas), Check(), Fetch(tables, row)))
    with monkeypatch.context() as broken:
        broken.setattr(store._shards[0], "address", "grpc://127.0.0.1:1")
        store._shards[0].close()
        with pytest.raises(StoreError, match="did not answer"):
            store.flush()
    store._shards[0].close()
    for _ in range(2):  # once only
        store.flush()
        final, _ = store.read(DIM, STATE, Fetch(tables, row))
        np.testing.assert_allclose(final, deltas, rtol=1e-6)
