"""Ids as files bring them: floats with gaps, decimals, ends of the integers, strings, dates, dictionaries, lists."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datamodules.columns import SparseColumn, bags, keys
from datamodules.errors import DataError
from datamodules.keys import MISSING_KEY
from tests.datamodules.modules import Write, column, labels, module
from tests.datamodules.reference import fnv1a

NAN = float("nan")


def keys_of(values: pa.Array, **options: Any) -> list[int]:
    return keys(values, SparseColumn("x", **options), "some.parquet").tolist()


@pytest.mark.parametrize(
    ("dtype", "largest"), [(pa.float64(), 2**53 - 1), (pa.float32(), 2**24 - 1), (pa.float16(), 2**11 - 1)]
)
def test_floats_that_are_whole_numbers_are_integer_keys(dtype: pa.DataType, largest: int) -> None:
    column = pa.array(np.array([1, NAN, -0.0, largest, -largest], dtype.to_pandas_dtype()))
    assert keys_of(column) == [1, MISSING_KEY, 0, largest, -largest]
    assert keys_of(column.dictionary_encode()) == [1, MISSING_KEY, 0, largest, -largest]
    assert keys_of(pa.array([1, None, 3], pa.float32()).cast(dtype), size=4) == [1, 4, 3]


@pytest.mark.parametrize("value", [2.0**53, -(2.0**53), 1e300, float("inf")])
def test_floats_that_lost_digits_are_named(value: float) -> None:
    with pytest.raises(
        DataError, match=rf"some\.parquet.*'x' holds {value!r}.*below {2**53}. Write the ids as".replace("+", r"\+")
    ):
        keys_of(pa.array([1.0, value]))


def test_fractions_and_floats_outside_a_table_are_named() -> None:
    with pytest.raises(DataError, match=r"some\.parquet.*'x' holds 1\.5.*cannot be a key.*data\.dense"):
        keys_of(pa.array([1.0, 1.5]))
    with pytest.raises(DataError, match=r"some\.parquet.*'x'.*key 7; its table has 5 keys"):
        keys_of(pa.array([7.0, None]), size=5)


def test_whole_floats_in_a_file_are_announced_and_can_be_named(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """One file without a gap holds integers, the other floats."""
    path = write(
        a={"label": [0, 1], "user": [1, 2], "price": [0.5, 1.0], "flag": [0.0, 1.0], "none": pa.nulls(2, pa.float64())},
        b={"label": [0, 1], "user": [3.0, None], "price": [2.0, 3.0], "flag": [0.0, 1.0], "none": [None, NAN]},
    )
    data = module(path)
    assert data.spec.dense == ("user", "price", "flag", "none")
    assert "dense columns of whole numbers: user. Where" in capsys.readouterr().err
    assert module(path, dense=["user"], sparse=[]).spec.dense == ("user",)  # who names it knows
    assert capsys.readouterr().err == ""

    named = module(path, sparse=["user"])
    assert (named.spec.dense, named.spec.sparse_names) == (("price", "flag", "none"), ["user"])
    assert column(named, "user") == [1, 2, 3, MISSING_KEY]
    assert capsys.readouterr().err == ""


def test_half_floats_and_floats_behind_nested_columns_are_looked_at(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """Statistics of half floats are bytes; nested columns shift the positions of the others."""
    path = write(
        a=pa.table(
            {
                "label": [0, 1],
                "s": [{"p": 0.5, "q": 0.5}] * 2,
                "ids": [5.0, 6.0],
                "half": pa.array(np.array([3, 0.5], np.float16)),
                "d": pa.array([7.0, None]).dictionary_encode(),
            }
        )
    )
    assert module(path).spec.dense == ("ids", "half", "d")
    assert "whole numbers: ids, d. " in capsys.readouterr().err


def test_decimals_are_numbers_and_where_named_keys(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    """As databases export integers (scale 0, 38 digits) and prices."""
    ids = pa.array([Decimal(2**60 + 1), None, Decimal(-3)], pa.decimal128(38, 0))
    prices = pa.array([Decimal("1.50"), None, Decimal("2.25")], pa.decimal128(10, 2))
    path = write(
        a=pa.table({"label": [Decimal(0), Decimal(1), Decimal("0.5")], "id": ids, "k": [1, 2, 3], "p": prices})
    )
    data = module(path)
    assert data.spec.dense == ("id", "p")
    assert "whole numbers: id. Where these are ids" in (said := capsys.readouterr().err)
    assert "data.sparse=[k,id]" in said
    assert labels(data) == [0, 1, 0.5]
    named = module(path, sparse=["k", "id"])
    assert column(named, "id") == [2**60 + 1, MISSING_KEY, -3]
    assert next(iter(named.train_dataloader())).dense_features.tolist() == [[1.5], [0.0], [2.25]]
    with pytest.raises(DataError, match=r"a\.parquet: column 'p' of type decimal128\(10, 2\) cannot be keys"):
        column(module(path, sparse=["p"]), "p")
    with pytest.raises(DataError, match=r"'x' of type decimal128\(20, 0\) cannot be keys"):
        keys_of(pa.array([Decimal(2**63)], pa.decimal128(20, 0)))


def test_lists_of_whole_floats_are_bags_of_keys() -> None:
    found = bags(pa.array([[1.0, 2.0], None, [], [None, 3.0]]), None, SparseColumn("x", ragged=True), "file")
    assert found.keys.tolist() == [1, 2, MISSING_KEY, MISSING_KEY, 3]
    assert found.lengths.tolist() == [2, 1, 0, 2]


def test_the_ends_of_the_integers_are_ordinary_keys(write: Write) -> None:
    ids = [-1, -(2**63), 2**63 - 1, 0]
    assert column(module(write(a={"label": [0] * 4, "x": ids})), "x") == ids


def test_strings_are_keys_by_their_text(write: Write) -> None:
    """260, 260.0 and 0x104 are three keys; so are an empty string and a missing one."""
    texts = ["260", "260.0", "0x104", "", None, "žluťoučký 🐎", "y" * 200_000]
    found = column(module(write(a={"label": [0] * 7, "x": texts})), "x")
    assert found == [MISSING_KEY if t is None else fnv1a(t.encode()) for t in texts]
    assert len(set(found)) == 7


def test_dictionaries_that_differ_between_row_groups_and_files(write: Write) -> None:
    path = write(a={"label": [0], "x": pa.array(["first"]).dictionary_encode()})
    schema = pa.schema({"label": pa.int64(), "x": pa.dictionary(pa.int32(), pa.string())})
    with pq.ParquetWriter(path / "b.parquet", schema) as writer:
        for texts in (["a", "b"], ["b", "c"], [None, "a"]):
            writer.write_table(pa.table({"label": [0, 0], "x": pa.array(texts).dictionary_encode()}, schema=schema))
    wanted = [MISSING_KEY if t is None else fnv1a(t.encode()) for t in ("first", "a", "b", "b", "c", None, "a")]
    assert column(module(path), "x") == wanted


@pytest.mark.parametrize(
    "dtype",
    [
        pa.list_(pa.int64()),
        pa.large_list(pa.int32()),
        pa.list_(pa.bool_()),
        pa.list_(pa.large_string()),
        pa.list_(pa.int8(), 2),
    ],
)
def test_lists_of_every_kind_beside_missing_ones(write: Write, dtype: pa.DataType) -> None:
    rows: list[list[int] | None] = [[1, 0], None, [0, 0]] if pa.types.is_fixed_size_list(dtype) else [[1, 0], None, []]
    as_text = pa.types.is_large_string(dtype.value_type)
    held = [
        r and [str(v) if as_text else bool(v) if pa.types.is_boolean(dtype.value_type) else v for v in r] for r in rows
    ]
    path = write(a=pa.table({"label": [0, 0, 0], "x": pa.array(held, dtype)}))
    features = next(iter(module(path).train_dataloader())).sparse_features["x"]
    wanted = [[MISSING_KEY] if r is None else [fnv1a(str(v).encode()) if as_text else v for v in r] for r in rows]
    assert features.values().tolist() == [v for bag in wanted for v in bag]
    assert features.lengths().tolist() == [len(bag) for bag in wanted]


def test_what_is_no_feature_is_left_out_with_a_line(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    others = {
        "day": pa.array([0, 1], pa.date32()),
        "at": pa.array([0, 1], pa.timestamp("us", "UTC")),
        "nested": pa.array([[[1]], [[2]]]),
        "scores": pa.array([[0.5], [1.5]], pa.list_(pa.float32(), 1)),
        "map": pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int64())),
    }
    path = write(a=pa.table({"label": [0, 1], "x": [1, 2], **others}))
    assert module(path).spec.sparse_names == ["x"]
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "left out: day (date32), at (timestamp), nested (list), scores (fixed_size_list), map" in said
    assert "write it as numbers or strings: a date as its days" in said
    for name in ("day", "at", "nested", "map"):
        with pytest.raises(DataError, match=rf"'{name}' cannot be a sparse feature: it is .* in .*a\.parquet"):
            module(path, sparse=[name])
    with pytest.raises(DataError, match=r"a\.parquet: dense column 'day' has type date32.*a date as its days"):
        list(module(path, dense=["day"]).train_dataloader())
