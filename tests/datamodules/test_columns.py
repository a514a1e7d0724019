"""Columns of every type as keys, bags, dense values and labels, against plain Python."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datamodules.columns import DenseColumn, SparseColumn, bags, dense_values, keys, parse_hexadecimal
from datamodules.errors import DataError
from datamodules.keys import MISSING_KEY, hash_bytes, keys_to_uint64, uint64_to_keys
from tests.datamodules.reference import fnv1a


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_unsigned_ids_keep_their_bits_and_come_back(ids: list[int]) -> None:
    mapped = uint64_to_keys(np.array(ids, dtype=np.uint64))
    assert mapped.tolist() == [i - 2**64 if i >= 2**63 else i for i in ids]
    assert keys_to_uint64(mapped).tolist() == ids


@pytest.mark.parametrize("ids", [[12120467241726599441, 1], [2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1, 0]])
def test_unsigned_ids_of_a_column_come_back(ids: list[int]) -> None:
    mapped = keys(pa.array(ids, pa.uint64()), SparseColumn("id"), "file")
    assert len(set(mapped.tolist())) == len(ids)
    assert keys_to_uint64(mapped).tolist() == ids


@given(st.lists(st.text()), st.booleans())
def test_strings_hash_as_fnv1a(texts: list[str], many: bool) -> None:
    encoded = [t.encode() for t in texts]
    if many:  # hashed together, and not one by one
        encoded *= 20
    offsets = np.cumsum([0, *(len(t) for t in encoded)])
    assert hash_bytes(np.frombuffer(b"".join(encoded), np.uint8), offsets).tolist() == [fnv1a(t) for t in encoded]


@pytest.mark.parametrize(
    "dtype",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.binary(),
        pa.binary_view(),
        pa.dictionary(pa.int8(), pa.string()),
    ],
)
def test_a_string_has_one_key_whatever_the_column_type(dtype: pa.DataType) -> None:
    column = pa.array(["fish", "", None, "fish", "æ"], pa.string()).cast(pa.string())
    column = column.dictionary_encode().cast(dtype) if pa.types.is_dictionary(dtype) else column.cast(dtype)
    wanted = [fnv1a(b"fish"), fnv1a(b""), MISSING_KEY, fnv1a(b"fish"), fnv1a("æ".encode())]
    assert keys(column, SparseColumn("x"), "file").tolist() == wanted
    assert keys(column.slice(1, 3), SparseColumn("x"), "file").tolist() == wanted[1:4]


@pytest.mark.parametrize(
    "dtype", [pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64()]
)
def test_integers_of_every_width_are_their_own_keys(dtype: pa.DataType) -> None:
    column = pa.array([7, None, 0, 100, None], dtype)
    assert keys(column, SparseColumn("x"), "file").tolist() == [7, MISSING_KEY, 0, 100, MISSING_KEY]
    assert keys(column.slice(1, 3), SparseColumn("x", size=101), "file").tolist() == [101, 0, 100]
    assert keys(column.dictionary_encode(), SparseColumn("x", missing=-1), "file").tolist() == [7, -1, 0, 100, -1]
    assert column.to_pylist() == [7, None, 0, 100, None]  # the file's own buffer is left alone


def test_nulls_hide_in_either_half_of_a_dictionary() -> None:
    column = pa.DictionaryArray.from_arrays(pa.array([0, None, 1, 2]), pa.array([5, None, 6]))
    assert keys(column, SparseColumn("x"), "file").tolist() == [5, MISSING_KEY, MISSING_KEY, 6]


def test_bytes_of_one_length_are_strings() -> None:
    assert keys(pa.array([b"ab", None], pa.binary(2)), SparseColumn("x"), "file").tolist() == [
        fnv1a(b"ab"),
        MISSING_KEY,
    ]


def test_booleans_and_columns_without_a_value() -> None:
    assert keys(pa.array([True, None, False]), SparseColumn("x", size=2), "file").tolist() == [1, 2, 0]
    assert keys(pa.nulls(2), SparseColumn("x", missing=-1), "file").tolist() == [-1, -1]
    assert keys(pa.array([], pa.string()), SparseColumn("x"), "file").tolist() == []


def test_strings_are_hashed_into_the_size_of_a_table() -> None:
    column = pa.array([f"word {i}" for i in range(1000)] + [None])
    found = keys(column, SparseColumn("x", size=10), "file")
    assert set(found[:-1].tolist()) == set(range(10))
    assert found[-1] == 10
    again = keys(column.dictionary_encode(), SparseColumn("x", size=10), "file")
    assert again.tolist() == found.tolist()


@pytest.mark.parametrize("key", [-1, 10, 11])
def test_a_key_outside_its_table_is_named(key: int) -> None:
    with pytest.raises(DataError, match=rf"some\.parquet.*'x'.*{key}.*10 keys, 0 to 9"):
        keys(pa.array([0, 9, key]), SparseColumn("x", size=10), "some.parquet")


def test_the_key_of_missing_values_is_never_a_real_one() -> None:
    with pytest.raises(DataError, match="missing"):
        keys(pa.array([1, MISSING_KEY]), SparseColumn("x"), "file")


@pytest.mark.parametrize("column", [pa.array([1.5]), pa.array([[1]]), pa.array([{"a": 1}])])
def test_a_column_that_cannot_be_keys_is_named(column: pa.Array) -> None:
    with pytest.raises(DataError, match=r"some\.parquet.*'x'.*cannot be a key"):
        keys(column, SparseColumn("x"), "some.parquet")


@given(
    st.lists(st.one_of(st.integers(0, 2**32 - 1).map(lambda i: f"{i:08x}"), st.just(""), st.text("0aF9", max_size=8)))
)
def test_hexadecimal_numbers(texts: list[str]) -> None:
    offsets = np.cumsum([0, *(len(t) for t in texts)])
    values, bad = parse_hexadecimal(np.frombuffer("".join(texts).encode(), np.uint8), offsets)
    assert values.tolist() == [int(t or "0", 16) for t in texts]
    assert len(bad) == 0


@pytest.mark.parametrize("text", ["0000000g", "123456789", "-1", " 1", "0x12"])
@pytest.mark.parametrize("others", [["68fd1e64"], ["68fd1e64", "1f"]])
def test_what_is_not_hexadecimal_is_found(text: str, others: list[str]) -> None:
    texts = [*others, text]
    offsets = np.cumsum([0, *(len(t) for t in texts)])
    assert parse_hexadecimal(np.frombuffer("".join(texts).encode(), np.uint8), offsets)[1].tolist() == [len(others)]


lists = st.lists(st.one_of(st.none(), st.lists(st.one_of(st.none(), st.integers(-5, 5)), max_size=4)), max_size=8)


@given(
    lists,
    st.sampled_from([pa.list_(pa.int64()), pa.large_list(pa.int16()), pa.list_(pa.string()), pa.list_view(pa.int64())]),
    st.data(),
)
def test_bags_and_weights(rows: list[list[int | None] | None], dtype: pa.DataType, data: st.DataObject) -> None:
    strings = dtype.value_type == pa.string()
    drawn = [None if r is None else [None if v is None else str(v) if strings else v for v in r] for r in rows]
    weight = st.one_of(st.none(), st.integers(-3, 3).map(float))
    weights: list[list[float | None] | None] = [
        data.draw(st.one_of(st.none(), st.lists(weight, min_size=len(r or ()), max_size=len(r or ())))) for r in rows
    ]
    feature = SparseColumn("x", weight="w")
    column, weight_column = pa.array(drawn, dtype), pa.array(weights, pa.list_(pa.float64()))

    keys_wanted, lengths_wanted, weights_wanted = [], [], []
    for row, row_weights in zip(rows, weights, strict=True):
        values = [None] if row is None else row
        keys_wanted += [MISSING_KEY if v is None else fnv1a(str(v).encode()) if strings else v for v in values]
        lengths_wanted.append(len(values))
        given_weights = [None] * len(values) if row is None or row_weights is None else row_weights
        weights_wanted += [1.0 if w is None else w for w in given_weights]

    for cut in (0, len(rows) // 2):  # a slice starts inside its buffers
        if cut:
            done = sum(lengths_wanted[:cut])
            keys_wanted, weights_wanted, lengths_wanted = (
                keys_wanted[done:],
                weights_wanted[done:],
                lengths_wanted[cut:],
            )
        found = bags(column.slice(cut), weight_column.slice(cut), feature, "file")
        assert found.keys.tolist() == keys_wanted
        assert found.lengths.tolist() == lengths_wanted
        assert found.weights is not None
        assert found.weights.tolist() == weights_wanted


def test_weights_of_another_length_are_named() -> None:
    with pytest.raises(DataError, match=r"some\.parquet.*2 keys in 'x' and 1 weights in 'w'"):
        bags(pa.array([[1, 2]]), pa.array([[1.0]]), SparseColumn("x", weight="w"), "some.parquet")


def test_dense_values() -> None:
    column = pa.array([1, None, -3, 9], pa.int32())
    assert dense_values(column, DenseColumn("d"), "file").tolist() == [1, 0, -3, 9]
    logs = dense_values(column, DenseColumn("d", log=True), "file")
    np.testing.assert_allclose(logs, np.log([2, 1, 1, 10]), rtol=1e-6)
    assert dense_values(pa.array([1.5, None, float("nan")]), DenseColumn("d"), "file").tolist() == [1.5, 0, 0]
    assert dense_values(pa.nulls(2), DenseColumn("d"), "file").tolist() == [0, 0]
    assert dense_values(pa.array([True, False]), DenseColumn("d"), "file").tolist() == [1, 0]
    with pytest.raises(DataError, match=r"some\.parquet.*'d'.*infinite"):
        dense_values(pa.array([float("inf")]), DenseColumn("d"), "some.parquet")
    with pytest.raises(DataError, match=r"some\.parquet.*'d'.*string"):
        dense_values(pa.array(["1"]), DenseColumn("d"), "some.parquet")
