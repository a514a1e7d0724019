"""The type of a column, by all of its values: what was seen of them is summed up block by block, and file by file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from datamodules.columns import kind_of
from datamodules.errors import DataError

__all__ = ["MISSING_WORDS", "Evidence", "seen_in_objects", "seen_in_texts", "seen_in_typed"]

#: What stands for a missing number; in a column of text only the empty value does.
MISSING_WORDS = [
    *("", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "1.#IND", "1.#QNAN", "-NaN", "-nan", "NaN", "nan"),
    *("N/A", "n/a", "NA", "<NA>", "NULL", "Null", "null", "None", "none", "\\N"),
]
_MISSING = pa.array(MISSING_WORDS)
_FIRST = 100  # values that are looked at first: to cast a column of text to numbers takes long, and fails


@dataclass
class Evidence:
    """What is known of a column.

    Attributes:
        flags: of its values: ``integer``, ``negative``, ``above_int64``, ``above_uint64``, ``leading_zero`` (an id like
            ``007``), ``fraction``, ``boolean``, ``text``, ``bytes`` (text that is not UTF-8), ``struct``. None: all
            are missing.
        items: the same of the elements, if the values are lists.
    """

    flags: set[str] = field(default_factory=set)
    items: Evidence | None = None

    def add(self, other: Evidence) -> None:
        self.flags |= other.flags
        if other.items is not None:
            self.items = self.items or Evidence()
            self.items.add(other.items)

    def declare(self, name: str, what: str) -> None:
        """Makes the type what the user says it is: ``string``, ``float`` or ``integer``; of a list, its elements'.

        Raises:
            DataError: values are something else.
        """
        flags = (self.items or self).flags
        if what == "string":
            flags.add("text")
            return
        others = {"text", "bytes", "boolean", "struct"} | ({"fraction"} if what == "integer" else set())
        if flags & others:
            raise DataError(
                f"column {name!r} holds {' and '.join(sorted(flags & others))} values; data.types says {what}. Mend "
                f"them, or set data.types={{{name}: string}}"
            )
        flags -= {"leading_zero"}
        flags |= {"fraction" if what == "float" else "integer"}

    def to_json(self) -> list[Any]:
        return [sorted(self.flags), self.items and self.items.to_json()]

    @classmethod
    def from_json(cls, content: list[Any]) -> Evidence:
        return cls(set(content[0]), cls.from_json(content[1]) if content[1] else None)

    def arrow_type(self, name: str) -> pa.DataType | None:
        """The narrowest type that holds all values; None where there is none that could be used.

        Raises:
            DataError: some values are lists and some are not.
        """
        if self.items is not None:
            if self.flags - {"struct"}:
                raise DataError(
                    f"column {name!r} holds lists in some rows and single values in others; write it with one type"
                )
            items = self.items.arrow_type(name)
            return None if items is None or "struct" in self.flags else pa.list_(items)
        flags = self.flags
        if "struct" in flags:
            return None
        if not flags:
            return pa.null()
        if "bytes" in flags:
            return pa.binary()
        if "text" in flags:
            return pa.string()
        if "boolean" in flags:
            return pa.bool_() if flags == {"boolean"} else pa.string()
        if "fraction" in flags:
            return pa.float64()
        if flags & {"leading_zero", "above_uint64"} or flags >= {"negative", "above_int64"}:
            return pa.string()
        return pa.uint64() if "above_int64" in flags else pa.int64()


def seen_in_texts(texts: pa.Array, known: set[str] | None = None) -> set[str]:
    """Flags of values as they stand in a text file, binary (n,); those that add something to the ``known`` ones."""
    try:
        values = texts.cast(pa.string())
    except pa.ArrowInvalid:
        return {"text", "bytes"}
    if known and "text" in known:
        return set()
    values = values.filter(pc.invert(pc.is_in(values, _MISSING))).drop_null()
    if not len(values):
        return set()
    if _cast(values[:_FIRST], pa.float64()) is None or (flags := _of_digits(values)) is None:
        flags = _of_others(values)
    return flags


def _of_others(values: pa.Array) -> set[str]:
    if _cast(values[:_FIRST], pa.float64()) is None or _cast(values, pa.float64()) is None:
        trimmed = pc.utf8_trim_whitespace(values)
        return {"text"} if trimmed.equals(values) else seen_in_texts(trimmed.cast(pa.binary()))
    is_integer = pc.match_substring_regex(values, r"^-?\d+$")
    if pc.all(is_integer).as_py():
        return {flag for text in values.to_pylist() for flag in _of_integer(int(text))}
    return {"fraction"} | seen_in_texts(values.filter(is_integer).cast(pa.binary()))


def _of_digits(values: pa.Array) -> set[str] | None:
    """Flags of integers as text, where they all fit an int64 or all fit a uint64."""
    zeros = pc.and_(pc.starts_with(values, "0"), pc.greater(pc.binary_length(values), 1))
    integers = _cast(values, pa.int64())
    if integers is not None:
        flags = _of_integers(integers)
    elif _cast(values, pa.uint64()) is not None:
        flags = {"integer", "above_int64"}
    else:
        return None
    return flags | ({"leading_zero"} if pc.any(zeros).as_py() else set())


def _cast(values: pa.Array, dtype: pa.DataType) -> pa.Array | None:
    try:
        return values.cast(dtype)
    except pa.ArrowInvalid:
        return None


def _of_integers(values: pa.Array) -> set[str]:
    return {"integer", "negative"} if pc.min(values).as_py() < 0 else {"integer"}


def _of_integer(value: int) -> set[str]:
    flags = {"integer", "negative"} if value < 0 else {"integer"}
    if value >= 2**63:
        flags.add("above_int64")
    if value >= 2**64 or value < -(2**63):
        flags.add("above_uint64")
    return flags


def seen_in_typed(column: pa.Array | pa.ChunkedArray) -> Evidence | None:
    """Of values that were read from JSON as the type of ``column``; None where that type may have cost digits."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if pa.types.is_list(column.type):
        items = seen_in_typed(column.flatten())
        return None if items is None else Evidence(items=items)
    values = column.drop_null()
    if not len(values):
        return Evidence()
    if pa.types.is_boolean(column.type):
        return Evidence({"boolean"})
    kind = kind_of(column.type)
    if kind == "integer":
        return Evidence(_of_integers(values))
    if kind == "float":
        return None if pc.max(pc.abs(values)).as_py() >= 2**63 else Evidence({"fraction"})
    return Evidence({"struct"} if pa.types.is_struct(column.type) else {"text"})


def seen_in_objects(values: Iterable[Any]) -> Evidence:
    """Of values of Python, as its JSON reader makes them."""
    seen = Evidence()
    for value in values:
        if isinstance(value, bool):
            seen.flags.add("boolean")
        elif isinstance(value, int):
            seen.flags |= _of_integer(value)
        elif isinstance(value, float):
            seen.flags.add("fraction")
        elif isinstance(value, str):
            seen.flags.add("text")
        elif isinstance(value, list):
            seen.add(Evidence(items=seen_in_objects(value)))
        elif value is not None:
            seen.flags.add("struct")
    return seen
