"""Labels as exports hold them: strings, -1 and 1, gaps, soft ones; and what is no label."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest

from datamodules.errors import DataError
from datamodules.labels import LabelRule, label_values
from tests.datamodules.modules import Write, column, labels, module

NAN = float("nan")


@pytest.mark.parametrize(
    ("column", "wanted"),
    [
        (pa.array([True, False]), [1, 0]),
        (pa.array([0, 1], pa.uint8()), [0, 1]),
        (pa.array([0.25, 1.0], pa.float16()), [0.25, 1]),
        (pa.array([0.0, 0.1, 1.0]), [0, 0.1, 1]),
        (pa.array(["0", "1"]), [0, 1]),
        (pa.array(["0.0", " 1.0 ", "0.5"], pa.large_string()), [0, 1, 0.5]),
        (pa.array(["true", "False", "TRUE"]), [1, 0, 1]),
        (pa.array([b"1", b"0"]), [1, 0]),
        (pa.array(["1", "0", "1"]).dictionary_encode(), [1, 0, 1]),
        (pa.array([1, 0, 1]).dictionary_encode(), [1, 0, 1]),
    ],
)
def test_labels_of_every_type(column: pa.Array, wanted: list[float]) -> None:
    assert label_values(column, "y", "file").tolist() == pytest.approx(wanted)
    assert label_values(column.slice(1), "y", "file", LabelRule()).tolist() == pytest.approx(wanted[1:])


@pytest.mark.parametrize("column", [pa.array([-1, 1]), pa.array([-1.0, 1.0]), pa.array(["-1", "1"])])
def test_minus_one_means_zero_where_that_is_said(column: pa.Array) -> None:
    with pytest.raises(DataError, match=r"some\.parquet.*'y' holds '?-1.*expected 0 or 1.*data\.negative_label=-1"):
        label_values(column, "y", "some.parquet", LabelRule())
    assert label_values(column, "y", "file", LabelRule(negative=-1)).tolist() == [0, 1]


@pytest.mark.parametrize("value", [0, 0.5, -2, 2])
def test_labels_beside_minus_one_and_one_are_an_error(value: float) -> None:
    """0 in such data is often 'not labelled', which must not become a negative row."""
    with pytest.raises(DataError, match=rf"'y' holds {float(value)}; expected -1 or 1"):
        label_values(pa.array([-1.0, 1.0, value]), "y", "file", LabelRule(negative=-1))


@pytest.mark.parametrize(
    "column",
    [pa.array([1, None]), pa.array([True, None]), pa.array([1.0, NAN]), pa.array(["1", None]), pa.array(["true", ""])],
)
def test_missing_labels_count_as_what_is_said(column: pa.Array) -> None:
    with pytest.raises(DataError, match=r"some\.parquet.*'y' holds (None|nan|''); expected 0 or 1.*data\.null_label=0"):
        label_values(column, "y", "some.parquet", LabelRule())
    assert label_values(column, "y", "file", LabelRule(missing=0)).tolist() == [1, 0]
    assert label_values(column, "y", "file", LabelRule(negative=-1, missing=0.5)).tolist() == [1, 0.5]
    assert column.null_count == label_values(pa.nulls(column.null_count), "y", "file", LabelRule(missing=1)).sum()


@pytest.mark.parametrize(
    ("column", "held"),
    [
        (pa.array([0, 2]), "2"),
        (pa.array([0.0, 1.5]), "1.5"),
        (pa.array([-0.25]), "-0.25"),
        (pa.array([math.inf]), "inf"),
        (pa.array([2**60]), str(2**60)),
        (pa.array(["1", "7"]), "'7'"),
    ],
)
def test_labels_out_of_range_are_named(column: pa.Array, held: str) -> None:
    with pytest.raises(DataError, match=rf"some\.parquet.*'y' holds {held}; expected 0 or 1.*data\.label"):
        label_values(column, "y", "some.parquet", LabelRule(missing=0))
    with pytest.raises(DataError, match=r"in every row$"):  # no option that the data set does not have
        label_values(column, "y", "some.parquet")


@pytest.mark.parametrize(
    ("column", "what"),
    [
        (pa.array(["1", "yes"]), "holds 'yes'; expected 0 and 1, as numbers or as true and false"),
        (pa.array([[1]]), "has type list"),
        (pa.array([0], pa.date32()), "has type date32"),
    ],
)
def test_what_cannot_be_a_label_is_named(column: pa.Array, what: str) -> None:
    with pytest.raises(DataError, match=rf"some\.parquet.*'y' {what}"):
        label_values(column, "y", "some.parquet")


def test_files_may_hold_the_label_in_other_ways(write: Write) -> None:
    """Booleans, floats with gaps, no label at all: every row is read once, none is dropped."""
    path = write(
        a=pa.table({"label": [True, None], "x": [0, 1]}),
        b=pa.table({"label": [1.0, NAN], "x": [2, 3]}),
        c=pa.table({"label": pa.nulls(1), "x": [4]}),
        d=pa.table({"label": [1, -1], "x": [5, 6]}),
    )
    data = module(path, null_label=0, negative_label=-1)
    assert labels(data) == [1, 0, 1, 0, 0, 1, 0]
    assert column(data, "x") == [0, 1, 2, 3, 4, 5, 6]
    with pytest.raises(DataError, match=r"a\.parquet.*holds None"):
        labels(module(path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"negative_label": 1}, r"data\.negative_label=1; expected another number"),
        ({"null_label": 2}, r"data\.null_label=2; expected a label from 0 to 1"),
        ({"null_label": NAN}, r"data\.null_label=nan; expected a label from 0 to 1"),
    ],
)
def test_wrong_options_are_named(write: Write, options: dict[str, float], message: str) -> None:
    with pytest.raises(DataError, match=message):
        module(write(a={"label": [0], "x": [1]}), **options)
