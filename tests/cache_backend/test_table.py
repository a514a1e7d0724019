"""The native EmbeddingTable against a dictionary."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_backend._table import BUCKETS, EmbeddingTable
from cache_backend.config import OPTIMIZERS

DIM, STATE = 3, 1
ODD_KEYS = [0, 1, -1, 2**63 - 1, -(2**63), 2**32, -(2**32)]
rows_of = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(ODD_KEYS) | st.integers(-50, 50)), min_size=0, max_size=40, unique=True
)


def new_table(tables: int = 3) -> EmbeddingTable:
    table = EmbeddingTable(DIM, STATE)
    for t in range(tables):
        table.declare(
            t, 0, 0.0, 0.0, 0.0, OPTIMIZERS["rowwise_adagrad"]
        )  # rows begin at zero: the dictionary needs no generator
    return table


def arrays(rows: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([t for t, _ in rows], np.int32), np.array([k for _, k in rows], np.int64)


def fetch(table: EmbeddingTable, rows: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    values = np.full((len(rows), DIM + STATE), 77, np.float32)
    clocks, fresh = np.full(len(rows), 77, np.int64), np.empty(len(rows), np.uint8)
    table.fetch(*arrays(rows), values, clocks, fresh)
    return values, clocks, fresh


@settings(max_examples=60, deadline=None)
@given(st.lists(rows_of, max_size=6), st.sampled_from(["lamport", "sum"]), st.integers(0, 2**31))
def test_pushes_and_fetches_follow_a_dictionary(pushes: list, rule: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    table, model = new_table(), {}
    for rows in pushes:
        deltas = rng.integers(-8, 8, (len(rows), DIM + STATE)).astype(np.float32)  # whole numbers add without rounding
        starts = rng.integers(0, 5, len(rows))
        clocks = starts + rng.integers(0, 5, len(rows))
        table.push(*arrays(rows), starts, clocks, deltas, rule)
        for row, delta, start, clock in zip(rows, deltas, starts, clocks, strict=True):
            value, global_clock = model.get(row, (np.zeros(DIM + STATE), 0))
            merged = global_clock + clock - start if rule == "sum" else max(global_clock, clock)
            model[row] = value + delta, merged
    assert len(table) == len(model)
    wanted = [(t, k) for t in range(3) for k in [*ODD_KEYS, *range(-50, 51)] if t != 2 or k != 0]
    wanted = list(dict.fromkeys(wanted))
    values, clocks, fresh = fetch(table, wanted)
    for i, row in enumerate(wanted):
        assert fresh[i] == (row not in model)
        expected_value, expected_clock = model.get(row, (np.full(DIM + STATE, 77), 77))  # fresh: left untouched
        np.testing.assert_array_equal(values[i], expected_value)
        assert clocks[i] == expected_clock
    checked = np.zeros(len(wanted), np.int64)
    allowed = np.arange(len(wanted), dtype=np.int64) % 4
    stale, lags = table.stale(*arrays(wanted), checked, allowed)
    found = [model[row][1] if row in model else 0 for row in wanted]
    assert stale.tolist() == [i for i, clock in enumerate(found) if clock > allowed[i]]
    assert lags.tolist() == [sum(clock == 0 for clock in found)] + [
        sum(2 ** (i - 1) <= clock < 2**i for clock in found) for i in range(1, 18)
    ]


def test_many_rows_survive_growth_and_export() -> None:
    table = new_table(1)
    rng = np.random.default_rng(0)
    keys = rng.permutation(np.unique(rng.integers(-(2**62), 2**62, 120_000)))
    tables, zero = np.zeros(len(keys), np.int32), np.zeros(len(keys), np.int64)
    deltas = rng.standard_normal((len(keys), DIM + STATE)).astype(np.float32)
    for part in np.array_split(np.arange(len(keys)), 7):
        table.push(tables[part], keys[part], zero[part], zero[part] + 3, deltas[part])
    assert len(table) == len(keys)
    values = np.empty_like(deltas)
    clocks, fresh = np.empty(len(keys), np.int64), np.empty(len(keys), np.uint8)
    table.fetch(tables, keys, values, clocks, fresh)
    assert not fresh.any()
    assert (clocks == 3).all()
    np.testing.assert_array_equal(values, deltas)
    assert table.memory_bytes / len(keys) < 4 * (DIM + STATE) + 16 + 40  # rows, headers, index, slack of 4096 buckets

    sizes = [table.bucket_size(b) for b in range(BUCKETS)]
    assert sum(sizes) == len(keys)
    assert max(sizes) < 3 * len(keys) / BUCKETS  # the hash deals keys out evenly
    copy = new_table(1)
    for bucket, n in enumerate(sizes):
        part = np.empty(n, np.int32), np.empty(n, np.int64), np.empty(n, np.int64), np.empty((n, 4), np.float32)
        table.export_bucket(bucket, *part)
        copy.assign(*part)
    again = np.empty_like(deltas)
    copy.fetch(tables, keys, again, clocks, fresh)
    np.testing.assert_array_equal(again, deltas)
    copy.clear()
    assert len(copy) == 0


def test_a_key_beyond_two_billion_floats() -> None:
    """Row 67,108,864 of width 32 begins at float 2^31: no 32-bit offset may reach it."""
    table = EmbeddingTable(32, 0)
    table.declare(0, 0, 0.0, 0.0, 0.0, OPTIMIZERS["sgd"])
    one, key, clock = np.zeros(1, np.int32), np.array([67_108_864], np.int64), np.ones(1, np.int64)
    table.push(one, key, clock, clock, np.arange(32, dtype=np.float32)[None])
    rows, clocks, fresh = np.empty((1, 32), np.float32), np.empty(1, np.int64), np.empty(1, np.uint8)
    table.fetch(one, key, rows, clocks, fresh)
    assert not fresh[0]
    np.testing.assert_array_equal(rows[0], np.arange(32))


def test_bad_calls_change_nothing() -> None:
    table = new_table(1)
    good, bad = np.array([0], np.int32), np.array([0, 5], np.int32)
    keys, clocks = np.array([1, 2], np.int64), np.zeros(2, np.int64)
    with pytest.raises(IndexError, match="table id 5 was not opened"):
        table.push(bad, keys, clocks, clocks, np.ones((2, 4), np.float32))
    with pytest.raises(ValueError, match="tables has length 1, expected 2"):
        table.push(good, keys, clocks, clocks, np.ones((2, 4), np.float32))
    with pytest.raises(ValueError, match="a row has length 3, expected 4"):
        table.push(bad[:1], keys[:1], clocks[:1], clocks[:1], np.ones((1, 3), np.float32))
    with pytest.raises(ValueError, match="unknown clock rule 'max'"):
        table.push(bad[:1], keys[:1], clocks[:1], clocks[:1], np.ones((1, 4), np.float32), "max")
    with pytest.raises(ValueError, match="dim >= 1"):
        EmbeddingTable(0, 1)
    assert len(table) == 0


def contents(table: EmbeddingTable) -> dict[tuple[int, int], tuple[int, int, bytes]]:
    """Bucket, clock and values of every row."""
    found = {}
    for bucket in range(BUCKETS):
        n = table.bucket_size(bucket)
        tables, keys, clocks = np.empty(n, np.int32), np.empty(n, np.int64), np.empty(n, np.int64)
        rows = np.empty((n, DIM + STATE), np.float32)
        table.export_bucket(bucket, tables, keys, clocks, rows)
        for t, key, clock, row in zip(tables.tolist(), keys.tolist(), clocks.tolist(), rows, strict=True):
            found[t, key] = bucket, clock, row.tobytes()
    return found


@pytest.mark.parametrize("seed", range(3))
def test_erasing_and_assigning_where_buckets_are_not_skipped(seed: int) -> None:
    rng = np.random.default_rng(seed)
    table, model = new_table(), {}
    for n in (30_000, 5_000, 40_000):  # memory of erased rows serves again
        rows = [(int(t), int(k)) for t, k in zip(rng.integers(0, 3, n), rng.integers(0, 20_000, n), strict=True)]
        rows = list(dict.fromkeys(rows))
        values, clocks = rng.random((len(rows), DIM + STATE), np.float32), rng.integers(0, 9, len(rows))
        skip = rng.integers(0, 2, BUCKETS).astype(np.uint8)
        fresh = new_table()
        fresh.assign(*arrays(rows), clocks, values)
        assert fresh.memory_bytes > 0
        for row, (bucket, clock, value) in contents(fresh).items():
            if not skip[bucket]:
                model[row] = bucket, clock, value
        table.assign(*arrays(rows), clocks, values, skip)
        assert contents(table) == model

        erased = np.array([0, 2], np.int32)
        skip = rng.integers(0, 2, BUCKETS).astype(np.uint8)
        gone = [row for row, (bucket, *_) in model.items() if row[0] != 1 and not skip[bucket]]
        held = table.memory_bytes
        assert table.erase(erased, skip) == len(gone)
        for row in gone:
            del model[row]
        assert contents(table) == model
        assert len(table) == len(model)
        assert table.memory_bytes < held

        first, last = 100, 3000
        columns = table.rows_of(np.array([1, 2], np.int32), first, last)
        expected = {row: v for row, v in model.items() if row[0] != 0 and first <= v[0] < last}
        assert {(t, k) for t, k in zip(columns[0].tolist(), columns[1].tolist(), strict=True)} == set(expected)
        for t, key, clock, row in zip(*columns, strict=True):
            assert expected[int(t), int(key)][1:] == (clock, row.tobytes())
    with pytest.raises(IndexError, match="buckets 5 to 4097"):
        table.rows_of(np.array([1], np.int32), 5, BUCKETS + 1)
    for call in (lambda: table.erase(np.array([1, 7], np.int32)), lambda: table.rows_of(np.array([7], np.int32), 0, 1)):
        with pytest.raises(IndexError, match="table id 7 was not opened"):
            call()
    assert contents(table) == model


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_a_push_that_would_leave_a_row_not_finite_is_left_out(bad: float) -> None:
    """Of that row alone; its clock stays too. 3e38 is finite, but not when it is added twice."""
    table = new_table()
    rows = [(0, 1), (0, 2), (0, 3)]
    deltas = np.full((3, DIM + STATE), 2e38 if bad == 3e38 else 1, np.float32)
    clocks = np.full(3, 5, np.int64)
    table.push(*arrays(rows), np.zeros(3, np.int64), clocks, deltas, "lamport")
    again = np.ones((3, DIM + STATE), np.float32)
    again[1, 2] = bad
    table.push(*arrays(rows), clocks, clocks + 1, again, "lamport")
    values, found, _ = fetch(table, rows)
    np.testing.assert_array_equal(values, deltas + np.float32([[1], [0], [1]]))
    assert found.tolist() == [6, 5, 6]
    assert table.left_out == 1
