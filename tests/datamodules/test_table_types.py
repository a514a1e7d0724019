"""The type of a column against rules written out in Python, for any mixture of values in any order."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules import table_json, table_text
from datamodules.errors import DataError
from datamodules.table_convert import TableOptions, convert_table

MISSING = ["", "NA", "NaN", "null", "\\N"]
INTEGERS = ["0", "5", "-3", str(2**63 - 1), str(-(2**63))]
LONG = [str(2**63), str(2**64 - 1)]
OTHERS = [str(2**64), str(-(2**63) - 1), "007", "00", "1.5", "-2e3", "inf", "+5", " 4", "x", "0x1F", "1_0", "é"]


def reference(values: list[str]) -> tuple[str, list[object]]:
    """Type and values that a column shall have."""
    present = [v.strip() for v in values if v not in MISSING]
    whole = [v for v in present if re.fullmatch(r"-?\d+", v)]
    texts: list[object] = [None if v == "" else v for v in values]

    def numbers(kind: type) -> list[object]:
        return [None if v in MISSING else kind(v) for v in values]

    if not present:
        return "null", [None] * len(values)
    if any(not re.fullmatch(r"[+-]?(\d+(\.\d+)?(e\d+)?|inf)", v) for v in present):
        return "string", texts
    if len(whole) < len(present):
        return "double", numbers(float)
    integers = [int(v) for v in whole]
    if any(len(v) > 1 and v.startswith("0") for v in whole):
        return "string", texts
    if min(integers) >= -(2**63) and max(integers) < 2**63:
        return "int64", numbers(int)
    if min(integers) >= 0 and max(integers) < 2**64:
        return "uint64", numbers(int)
    return "string", texts


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([*MISSING, *INTEGERS, *LONG]) | st.sampled_from(OTHERS), min_size=1, max_size=6))
def test_the_type_is_the_narrowest_that_holds_all_values(values: list[str]) -> None:
    repeated = values[:1] * 20 + values  # several blocks
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_text, "_BLOCK_BYTES", 64)
        path = Path(folder, "a.csv")
        path.write_text("label,c\n" + "".join(f"1,{value}\n" for value in repeated))
        convert_table(path, [path], path.with_suffix(".out"), TableOptions())
        found = pq.read_table(path.with_suffix(".out") / "a.csv.parquet")["c"]
        assert (str(found.type), found.to_pylist()) == reference(repeated)


SCALARS = [None, 1, -5, 2**63, 2**64 - 1, 2**64, -(2**63) - 1, 1.5, 1e300, True, "x", "", "007", "2020-01-01"]
JSON = [*SCALARS, [], [1], [2**63], ["a", None], [1.5, 2], {"a": 1}, [{}]]


def json_reference(values: list[Any]) -> str | None:
    """The type that a column of JSON values shall have; None for a column that is left out."""
    present = [v for v in values if v is not None]
    if any(isinstance(v, dict) for v in present):
        return None
    if any(isinstance(v, list) for v in present):
        items = json_reference([item for v in present for item in v])
        return items and f"list<element: {items}>"
    kinds = {type(v) for v in present}
    if not kinds:
        return "null"
    if kinds == {bool}:
        return "bool"
    if kinds & {str, bool}:
        return "string"
    if float in kinds:
        return "double"
    if min(present) >= -(2**63) and max(present) < 2**63:
        return "int64"
    return "uint64" if min(present) >= 0 and max(present) < 2**64 else "string"


def as_type(value: Any, dtype: str) -> Any:
    if value is None:
        return None
    if dtype.startswith("list"):
        return [as_type(item, dtype.removeprefix("list<element: ").removesuffix(">")) for item in value]
    if dtype == "string" and not isinstance(value, str):
        return json.dumps(value)
    return float(value) if dtype == "double" else value


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.sampled_from(JSON), min_size=1, max_size=3, unique_by=str).flatmap(
        lambda pool: st.lists(st.sampled_from(pool), min_size=1, max_size=8)
    )
)
def test_the_type_of_json_values_too(values: list[Any]) -> None:
    present = [v for v in values if v is not None and not isinstance(v, dict)]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_json, "_BLOCK_BYTES", 64)
        path = Path(folder, "a.jsonl")
        path.write_text("\n".join(json.dumps({"label": 1, "c": value}) for value in values))
        if len({isinstance(v, list) for v in present}) == 2:
            with pytest.raises(DataError, match="column 'c' holds lists in some rows and single values in others"):
                convert_table(path, [path], path.with_suffix(".out"), TableOptions())
            return
        convert_table(path, [path], path.with_suffix(".out"), TableOptions())
        table = pq.read_table(path.with_suffix(".out") / "a.jsonl.parquet")
    dtype = json_reference(values)
    assert ("c" in table.column_names) == (dtype is not None)
    if dtype is not None:
        assert str(table["c"].type) == dtype
        assert table["c"].to_pylist() == [as_type(value, dtype) for value in values]
