"""Arrow columns to numpy: keys, bags of keys, dense values, labels.

Each function takes one column of one record batch, of whatever type the file holds, and returns arrays of the one type
that the batches are made of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from datamodules.errors import DataError
from datamodules.keys import MISSING_KEY, hash_bytes, mix64

__all__ = [
    "Bags",
    "DenseColumn",
    "Kind",
    "SparseColumn",
    "bags",
    "dense_values",
    "keys",
    "kind_of",
    "parse_hexadecimal",
]

Kind = Literal[
    "null", "integer", "float", "string", "list<integer>", "list<string>", "list<float>", "list<null>", "other"
]


_TEXTS = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_string_view,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
    pa.types.is_fixed_size_binary,
)
_LISTS = (
    pa.types.is_list,
    pa.types.is_large_list,
    pa.types.is_fixed_size_list,
    pa.types.is_list_view,
    pa.types.is_large_list_view,
)


def kind_of(dtype: pa.DataType) -> Kind:
    """What a column of this Arrow type can be used as."""
    if pa.types.is_dictionary(dtype):
        return kind_of(dtype.value_type)
    if pa.types.is_null(dtype):
        return "null"
    if pa.types.is_integer(dtype) or pa.types.is_boolean(dtype):
        return "integer"
    if pa.types.is_floating(dtype) or pa.types.is_decimal(dtype):
        return "float"
    if any(is_text(dtype) for is_text in _TEXTS):
        return "string"
    if any(is_list(dtype) for is_list in _LISTS):
        inner = kind_of(dtype.value_type)
        if inner in ("integer", "string", "float", "null"):
            return f"list<{inner}>"  # type: ignore[return-value]
    return "other"


@dataclass(frozen=True)
class SparseColumn:
    """How one sparse feature is read.

    Attributes:
        name: the column, and the feature.
        ragged: whether the column holds lists (bags); else there is one key a row.
        weight: the column of bag weights.
        size: rows of the feature's table that are real keys; missing is key ``size``, strings are hashed into
            ``0 .. size - 1``. None: missing is ``missing``, strings are hashed into all of int64.
        missing: the key of a missing value in a table without a size.
        hexadecimal: whether strings are hexadecimal numbers (then the number is the key) and not hashed.
    """

    name: str
    ragged: bool = False
    weight: str | None = None
    size: int | None = None
    missing: int = MISSING_KEY
    hexadecimal: bool = False

    @property
    def missing_key(self) -> int:
        return self.missing if self.size is None else self.size


@dataclass(frozen=True)
class DenseColumn:
    """How one dense column is read.

    Attributes:
        log: as ``log(1 + max(x, 0))``. Missing values are 0.
        raw: as it is, for a model that normalises it: missing values are NaN, infinite ones stay.
    """

    name: str
    log: bool = False
    raw: bool = False


def keys(column: pa.Array, feature: SparseColumn, where: str) -> npt.NDArray[np.int64]:
    """One key per row, int64 (n,).

    Raises:
        DataError: the type cannot be a key, or a value is the reserved ``MISSING_KEY``. ``where`` names the file.
    """
    dtype = column.type
    if pa.types.is_dictionary(dtype):
        # The dictionary is small: convert its values once and look them up. A null may hide in either half.
        codes = column.indices
        table = np.append(keys(column.dictionary, feature, where), feature.missing_key)
        return table[codes.fill_null(len(table) - 1).to_numpy(zero_copy_only=False)]
    if pa.types.is_null(dtype):
        return np.full(len(column), feature.missing_key, dtype=np.int64)
    kind = kind_of(dtype)
    if kind == "integer":
        return _integer_keys(column, feature, where)
    if kind == "string":
        return _string_keys(column, feature, where)
    if kind == "float":
        return _integer_keys(_whole_numbers(column, feature, where), feature, where)
    raise DataError(
        f"{where}: column {feature.name!r} has type {dtype}, which cannot be a key; expected integers, strings or "
        f"lists of them. Cast the column, or name it under dense instead of sparse"
    )


def _whole_numbers(column: pa.Array, feature: SparseColumn, where: str) -> pa.Array:
    """Floats as integers, NaN as null: what integers with gaps become in pandas; and decimals, as databases export."""
    if pa.types.is_decimal(column.type):
        try:
            return column.cast(pa.int64())
        except pa.ArrowInvalid as error:
            raise DataError(
                f"{where}: column {feature.name!r} of type {column.type} cannot be keys: {error}. Name the column "
                f"under data.dense, or write integers or strings"
            ) from error
    values = column.to_numpy(zero_copy_only=False)  # nulls become NaN
    missing = np.isnan(values)
    values = np.where(missing, 0, values)
    # From here on whole numbers lie further apart than 1, so an id that was rounded on the way looks like another.
    limit = 2 ** (np.finfo(values.dtype).nmant + 1)
    fraction, large = values != np.floor(values), np.abs(values) >= limit
    if bool((fraction | large).any()):
        value = float(values[fraction | large][0])
        raise DataError(
            f"{where}: column {feature.name!r} holds {value!r} as {column.type}, which cannot be a key: "
            + (
                f"{column.type} tells whole numbers apart only below {limit}. Write the ids as int64 or as strings"
                if abs(value) >= limit
                else "it is no whole number. Name the column under data.dense, or write integers or strings"
            )
        )
    return pa.array(values.astype(np.int64), mask=missing)


def _integer_keys(column: pa.Array, feature: SparseColumn, where: str) -> npt.NDArray[np.int64]:
    # Filling before the change of type keeps the fast path of primitive arrays; the filler is put in afterwards.
    nulls = column.is_null().to_numpy(zero_copy_only=False) if column.null_count else None
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    if nulls is not None:
        column = column.fill_null(0)
    values = column.to_numpy(zero_copy_only=True)
    result: npt.NDArray[np.int64] = values.view(np.int64) if values.dtype == np.uint64 else values.astype(np.int64)
    if feature.size is not None:
        outside = (result < 0) | (result >= feature.size)
        if bool(outside.any()):
            raise DataError(
                f"{where}: column {feature.name!r} holds the key {result[outside][0]}; its table has "
                f"{feature.size} keys, 0 to {feature.size - 1}. Give the table a larger size, or none"
            )
    if feature.size is None and feature.missing == MISSING_KEY and bool((result == MISSING_KEY).any()):
        raise DataError(
            f"{where}: column {feature.name!r} holds the id {MISSING_KEY}, which is the key of missing values; "
            f"give the feature's table a size, or replace that id"
        )
    if nulls is not None:
        result = result if result.flags.writeable else result.copy()
        result[nulls] = feature.missing_key
    return result


def _string_keys(column: pa.Array, feature: SparseColumn, where: str) -> npt.NDArray[np.int64]:
    encoded = column.cast(pa.large_binary()).dictionary_encode()
    distinct = encoded.dictionary
    offsets = np.frombuffer(distinct.buffers()[1], dtype=np.int64)[
        distinct.offset : distinct.offset + len(distinct) + 1
    ]
    data = np.frombuffer(distinct.buffers()[2] or b"", dtype=np.uint8)
    if feature.hexadecimal:
        table, bad = parse_hexadecimal(data, offsets)
        if len(bad):
            raise DataError(
                f"{where}: column {feature.name!r} holds {distinct[int(bad[0])].as_py()!r}; "
                f"expected 1 to 8 hexadecimal digits"
            )
        table[np.diff(offsets) == 0] = feature.missing_key
    else:
        table = hash_bytes(data, offsets)
        if feature.size is not None:
            table = (mix64(table.view(np.uint64)) % np.uint64(feature.size)).astype(np.int64)
    table = np.append(table, feature.missing_key)
    return table[encoded.indices.fill_null(len(table) - 1).to_numpy(zero_copy_only=False)]


_NIBBLE = np.full(256, 255, dtype=np.uint8)
_NIBBLE[[ord(c) for c in "0123456789abcdef"]] = np.arange(16)
_NIBBLE[[ord(c) for c in "ABCDEF"]] = np.arange(10, 16)


def parse_hexadecimal(
    data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Hexadecimal strings, back to back, as numbers.

    Returns:
        The numbers, int64 (n,), 0 for an empty string; and the indices of the strings that are not 0 to 8 digits.
    """
    lengths = np.diff(offsets)
    values = np.zeros(len(lengths), dtype=np.int64)
    bad = lengths > 8
    whole = lengths == 8
    if bool((whole | (lengths == 0)).all()):  # the common case, without index arithmetic
        digits = _NIBBLE[data[offsets[0] : offsets[-1]].reshape(-1, 8)]
        bad[whole] = (digits == 255).any(axis=1)
        # Two digits a byte, the bytes read as one big-endian number.
        pairs = (digits[:, 0::2] << 4) | (digits[:, 1::2] & 15)
        values[whole] = np.ascontiguousarray(pairs).view(">u4").ravel()
        return values, np.flatnonzero(bad)
    starts = offsets[:-1]
    for position in range(8):
        here = np.flatnonzero((lengths > position) & ~bad)
        digit = _NIBBLE[data[starts[here] + position]]
        bad[here[digit == 255]] = True
        values[here] = (values[here] << 4) | (digit & 15)
    return values, np.flatnonzero(bad)


@dataclass
class Bags:
    """A ragged column: keys (total,), lengths (n,) int64, and weights (total,) float32 or None."""

    keys: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32] | None = None


def bags(column: pa.Array, weights: pa.Array | None, feature: SparseColumn, where: str) -> Bags:
    """One bag of keys per row. A missing list is a bag that holds the missing key; an empty list is an empty bag.

    Weights are 1 where the list of weights, or a weight in it, is missing.

    Raises:
        DataError: as in :func:`keys`, or the lists of keys and of weights differ in length.
    """
    if pa.types.is_null(column.type):
        column = pa.nulls(len(column), pa.large_list(pa.int64()))
    elif not kind_of(column.type).startswith("list"):
        column = pa.LargeListArray.from_arrays(pa.array(np.arange(len(column) + 1)), column)
    flat, lengths, nulls = _flatten(column)
    values = keys(flat, feature, where)
    flat_weights: npt.NDArray[np.float32] | None = None
    if feature.weight is not None:
        flat_weights = np.ones(len(values), dtype=np.float32)
        if weights is not None and not pa.types.is_null(weights.type):
            present = slice(None) if nulls is None else ~nulls  # what a missing list weighs does not matter
            rows = weights if nulls is None else weights.filter(pa.array(~nulls))
            flat_weights = _bag_weights(rows, lengths[present], feature, where)
    if nulls is not None:
        at = np.cumsum(lengths)[nulls]
        values = np.insert(values, at, feature.missing_key)
        if flat_weights is not None:
            flat_weights = np.insert(flat_weights, at, np.float32(1))
        lengths[nulls] = 1
    return Bags(values, lengths, flat_weights)


def _flatten(column: pa.Array) -> tuple[pa.Array, npt.NDArray[np.int64], npt.NDArray[np.bool_] | None]:
    """The elements of all lists, the lists' lengths (0 where missing), and which are missing (None: none is)."""
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    nulls = column.is_null().to_numpy(zero_copy_only=False) if column.null_count else None
    return column.flatten(), lengths, nulls


def _bag_weights(
    weights: pa.Array, lengths: npt.NDArray[np.int64], feature: SparseColumn, where: str
) -> npt.NDArray[np.float32]:
    if not kind_of(weights.type).startswith("list"):
        weights = pa.LargeListArray.from_arrays(pa.array(np.arange(len(weights) + 1)), weights)
    flat, weight_lengths, missing = _flatten(weights)
    wanted = lengths if missing is None else np.where(missing, 0, lengths)
    differ = np.flatnonzero(weight_lengths != wanted)
    if len(differ):
        row = int(differ[0])
        raise DataError(
            f"{where}: a row has {lengths[row]} keys in {feature.name!r} and {weight_lengths[row]} weights in "
            f"{feature.weight!r}; each key needs one weight"
        )
    given = pc.fill_null(flat.cast(pa.float32()), 1.0).to_numpy(zero_copy_only=False)
    if missing is None:
        return given
    result = np.ones(int(lengths.sum()), dtype=np.float32)
    result[np.repeat(~missing, lengths)] = given
    return result


def dense_values(column: pa.Array, dense: DenseColumn, where: str) -> npt.NDArray[np.float32] | npt.NDArray[np.float64]:
    """Dense values, float32 (n,), missing and NaN are 0; raw ones float64, missing ones NaN.

    Raises:
        DataError: the column is not numeric, or holds an infinite value and is not raw.
    """
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = kind_of(column.type)
    if kind == "null":
        return np.full(len(column), np.nan) if dense.raw else np.zeros(len(column), dtype=np.float32)
    if kind not in ("integer", "float"):
        raise DataError(
            f"{where}: dense column {dense.name!r} has type {column.type}; expected numbers. "
            f"Write it as numbers (a date as its days), or name it under sparse if it holds strings or lists"
        )
    if dense.raw:
        raw: npt.NDArray[np.float64] = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        return raw
    column = column.cast(pa.float32(), safe=False)
    values = column.fill_null(0).to_numpy(zero_copy_only=False) if column.null_count else column.to_numpy()
    if kind == "float":
        values = np.nan_to_num(values, nan=0.0, posinf=np.inf, neginf=-np.inf)
        if bool(np.isinf(values).any()):
            raise DataError(f"{where}: dense column {dense.name!r} holds an infinite value; replace it by a finite one")
    return np.log1p(np.maximum(values, 0)) if dense.log else values
