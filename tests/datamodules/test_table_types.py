"""The type of a column of text against rules written out in Python, for any mixture of values in any order."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules import table_text
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
