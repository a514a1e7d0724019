"""Rows exported, assigned and erased: the same on every store, and from one number of shards to another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pytest

from cache_backend import EmbeddingStore, LocalStore, RemoteStore, StoredRows, TableSchema
from cache_backend.store import Check, ExchangeRequest, Fetch, Push

A = TableSchema("a", 3, "rowwise_adagrad", 3, -0.1, 0.1, 0.5)
B = TableSchema("b", 3, "rowwise_adagrad", 4, -1.0, 1.0, 0.0)
WIDE = TableSchema("wide", 7, "sgd", 5, -1.0, 1.0, 0.0)
TABLES = [A, B, WIDE]
N = 500
COLUMNS = ("tables", "keys", "clocks", "rows")

#: A row by (table's place in TABLES, key): its clock and values.
Model = dict[tuple[int, int], tuple[int, bytes]]


def random_rows(seed: int, n: int = N) -> Model:
    rng = np.random.default_rng(seed)
    places = rng.integers(0, len(TABLES), n)
    keys = np.concatenate([[-(2**63), 2**63 - 1, 0], rng.integers(-(2**62), 2**62, n - 3)])
    found: Model = {}
    for place, key in zip(places.tolist(), keys.tolist(), strict=True):
        schema = TABLES[place]
        values = rng.standard_normal(schema.dim + schema.state_dim).astype(np.float32)
        found[place, key] = int(rng.integers(0, 2**48)), values.tobytes()
    return found


def as_rows(model: Model, ids: Sequence[int]) -> Iterable[StoredRows]:
    for dim, state_dim in ((3, 1), (7, 0)):
        chosen = {name: row for name, row in model.items() if TABLES[name[0]].dim == dim}
        yield StoredRows(
            dim,
            state_dim,
            np.array([ids[place] for place, _ in chosen], np.int32),
            np.array([key for _, key in chosen], np.int64),
            np.array([clock for clock, _ in chosen.values()], np.int64),
            np.frombuffer(b"".join(v for _, v in chosen.values()), np.float32).reshape(-1, dim + state_dim),
        )


def fill(store: EmbeddingStore, model: Model) -> list[int]:
    ids = store.open(TABLES)
    for rows in as_rows(model, ids):
        store.assign(rows)
    return ids


def exported(store: EmbeddingStore, ids: Sequence[int], **part: int) -> Model:
    found: Model = {}
    for rows in store.export(ids, **part):
        rows.check()
        for table, key, clock, values in zip(
            rows.tables.tolist(), rows.keys.tolist(), rows.clocks.tolist(), rows.rows, strict=True
        ):
            assert (ids.index(table), key) not in found
            found[ids.index(table), key] = clock, values.tobytes()
    return found


def written(store: EmbeddingStore, ids: Sequence[int], model: Model) -> Model:
    """Those of the model's rows that the store has, asked for one by one."""
    found: Model = {}
    for rows in as_rows(model, ids):
        reply = store.exchange(
            ExchangeRequest(
                rows.dim,
                rows.state_dim,
                Push.nothing(rows.dim + rows.state_dim),
                Check(),
                Fetch(rows.tables, rows.keys),
            )
        )
        for i in np.flatnonzero(reply.fresh == 0):
            name = ids.index(rows.tables[i]), int(rows.keys[i])
            found[name] = int(reply.clocks[i]), reply.rows[i].tobytes()
    return found


def test_what_is_assigned_is_read_and_exported_bit_for_bit(make_store: Callable[..., EmbeddingStore]) -> None:
    store = make_store()
    model = random_rows(1)
    ids = fill(store, model)
    assert written(store, ids, model) == model
    assert exported(store, ids) == model
    again = dict(random_rows(2).items()) | {name: (7, model[name][1]) for name in [*model][:50]}
    fill(store, again)
    assert exported(store, ids) == model | again


def test_pushed_rows_are_exported_with_their_clocks(make_store: Callable[..., EmbeddingStore]) -> None:
    store = make_store()
    (table,) = store.open([B])
    keys = np.arange(10)
    tables, starts = np.full(10, table, np.int32), np.zeros(10, np.int64)
    push = Push(tables, keys, starts, keys + 1, np.ones((10, 4), np.float32))
    store.exchange(ExchangeRequest(3, 1, push, Check(), Fetch(tables[:0], keys[:0])))
    expected, _ = store.read(3, 1, Fetch(tables, keys))
    pieces = list(store.export([table]))
    rows = StoredRows(3, 1, *(np.concatenate([getattr(piece, name) for piece in pieces]) for name in COLUMNS))
    order = np.argsort(rows.keys)
    np.testing.assert_array_equal(rows.keys[order], keys)
    np.testing.assert_array_equal(rows.clocks[order], keys + 1)
    np.testing.assert_array_equal(rows.rows[order], expected)


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 4096])
def test_the_parts_are_the_whole(make_store: Callable[..., EmbeddingStore], parts: int) -> None:
    store = make_store()
    model = random_rows(3)
    ids = fill(store, model)
    some = range(parts) if parts < 10 else [0, 1, 2047, 4095]
    shares = [exported(store, ids, part=part, parts=parts) for part in some]
    together = {name: row for share in shares for name, row in share.items()}
    assert sum(map(len, shares)) == len(together)
    if parts < 10:
        assert together == model
        assert all(shares)


def test_only_the_tables_that_are_asked_for(make_store: Callable[..., EmbeddingStore]) -> None:
    store = make_store()
    model = random_rows(4)
    ids = fill(store, model)
    assert exported(store, [ids[1]]) == {(0, key): row for (place, key), row in model.items() if place == 1}
    assert exported(store, []) == {}


def test_erased_rows_are_fresh_and_others_stay(make_store: Callable[..., EmbeddingStore]) -> None:
    store = make_store()
    model = random_rows(5)
    ids = fill(store, model)
    rows_before = store.stats().rows
    store.erase([ids[0], ids[2]])
    kept = {name: row for name, row in model.items() if name[0] == 1}
    assert written(store, ids, model) == kept
    assert exported(store, ids) == kept
    assert store.stats().rows == rows_before - len(model) + len(kept)
    # Their places serve again.
    more = random_rows(6)
    fill(store, more)
    assert written(store, ids, model | more) == kept | more
    store.erase(ids)
    assert exported(store, ids) == {}
    fill(store, model)
    assert exported(store, ids) == model


def test_from_one_number_of_shards_to_another(shard_addresses: Callable[[int], Sequence[str]]) -> None:
    """Tables have other ids there, and rows with them other shards."""
    names = [f"rows between shards {i}" for i in range(3)]
    schemas = [TableSchema(n, s.dim, s.optimizer, s.seed, -1.0, 1.0, 0.0) for n, s in zip(names, TABLES, strict=True)]
    model = random_rows(7)
    stores: list[EmbeddingStore] = [LocalStore(), *(RemoteStore(list(shard_addresses(n))) for n in (3, 1))]
    stores.append(LocalStore())
    held = model
    for store in stores:
        ids = store.open(schemas)
        for rows in as_rows(held, ids):
            store.assign(rows)
        held = exported(store, ids)
        assert held == model


def test_messages_are_split_to_fit(shard_addresses: Callable[[int], Sequence[str]]) -> None:
    (table,) = RemoteStore(list(shard_addresses(1))).open([TableSchema("split rows", 40, "sgd", 1, 0.0, 0.0, 0.0)])
    store = RemoteStore(list(shard_addresses(1)), max_message_bytes=4096)
    keys = np.arange(1000)
    values = np.random.default_rng(0).standard_normal((1000, 40)).astype(np.float32)
    store.assign(StoredRows(40, 0, np.full(1000, table, np.int32), keys, keys, values))
    pieces = list(store.export([table]))
    assert max(len(piece) for piece in pieces) * 160 < 10_000
    found = np.concatenate([piece.keys for piece in pieces])
    np.testing.assert_array_equal(np.sort(found), keys)
    np.testing.assert_array_equal(np.concatenate([piece.rows for piece in pieces]), values[found])
    store.erase([table])


def test_what_makes_no_sense_is_an_error(make_store: Callable[..., EmbeddingStore]) -> None:
    store = make_store()
    model = random_rows(8)
    ids = fill(store, model)
    unknown = 60_000
    for part in ({"part": 2, "parts": 2}, {"part": -1, "parts": 2}, {"part": 0, "parts": 5000}):
        with pytest.raises(ValueError, match="give 0 <= part < parts <= 4096"):
            store.export(ids, **part)
    with pytest.raises(ValueError, match="table id 60000 was not opened"):
        store.export([unknown])
    with pytest.raises(Exception, match="table id 60000 was not opened"):
        store.erase([ids[0], unknown])
    one, two = np.zeros((1, 4), np.float32), np.zeros((2, 4), np.float32)
    table, key, clock = np.array([ids[0]], np.int32), np.array([1]), np.array([0])
    for wrong, message in (
        (StoredRows(3, 1, table, key, clock, two), r"rows of shape \(2, 4\); \(1, 4\) is expected"),
        (StoredRows(3, 1, table, key, clock, one[:, :3]), r"rows of shape \(1, 3\)"),
        (StoredRows(3, 1, table, key, clock - 1, one), "clocks are 0 to"),
        (StoredRows(3, 1, table, key, clock + 2**48, one), "clocks are 0 to"),
        (StoredRows(3, 1, np.array([unknown, ids[0]], np.int32), np.array([1, 2]), np.zeros(2, np.int64), two),
         "table id 60000 was not opened"),
        (StoredRows(9, 9, table, key, clock, np.zeros((1, 18), np.float32)), "9 weights and 9 optimizer values"),
    ):  # fmt: skip
        with pytest.raises(Exception, match=message):
            store.assign(wrong)
    assert exported(store, ids) == model
