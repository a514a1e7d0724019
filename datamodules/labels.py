"""Label columns of any type as numbers from 0 to 1."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from datamodules.columns import kind_of
from datamodules.errors import DataError

__all__ = ["LabelRule", "label_values"]

_WORDS = {"true": 1.0, "false": 0.0, "": np.nan}


@dataclass(frozen=True)
class LabelRule:
    """What a label column's values mean, as the user says it.

    Attributes:
        negative: the value that stands for 0. Where it is not 0, every other label is 1.
        missing: what a missing label (null, NaN, an empty string) counts as; None: it is an error.
        threshold: the least value that is 1; those below are 0. None: the values are labels themselves.
    """

    negative: float = 0.0
    missing: float | None = None
    threshold: float | None = None


def label_values(column: pa.Array, name: str, where: str, rule: LabelRule | None = None) -> npt.NDArray[np.float32]:
    """Labels, float32 (n,): numbers, booleans, or strings of either (``"0"``, ``"1.0"``, ``"true"``).

    Without a ``rule`` there are no options that an error could recommend.

    Raises:
        DataError: a label cannot be read as a number, is missing, or is not in [0, 1]. ``where`` names the file.
    """
    values = _numbers(column, name, where)  # nulls are NaN
    negative = 0.0 if rule is None else rule.negative
    if rule is not None and rule.threshold is not None:
        bad = np.zeros(len(values), dtype=bool)
        values = np.where(np.isnan(values), values, values >= rule.threshold)
    elif negative != 0:
        bad = ~(np.isnan(values) | (values == negative) | (values == 1))
        values = np.where(values == negative, 0.0, values)
    else:
        bad = (values < 0) | (values > 1)
    if rule is not None and rule.missing is not None:
        values = np.where(np.isnan(values), rule.missing, values)
    bad |= np.isnan(values)
    if bool(bad.any()):
        value = column[int(np.flatnonzero(bad)[0])].as_py()
        raise DataError(
            f"{where}: label column {name!r} holds {value!r}; expected "
            f"{_expected(rule)} in every row" + _remedy(value, rule)
        )
    return values.astype(np.float32)


def _expected(rule: LabelRule | None) -> str:
    if rule is not None and rule.threshold is not None:
        return "a number"
    return "0 or 1" if rule is None or rule.negative == 0 else f"{rule.negative:g} or 1"


def _remedy(value: object, rule: LabelRule | None) -> str:
    if rule is None:
        return ""
    if value is None or value in ("", b"") or value != value:
        return ". Where a missing label means 0 (not clicked), set data.null_label=0; else leave those rows out"
    if str(value) in ("-1", "-1.0") and rule.negative == 0:
        return ". Where labels are -1 and 1, set data.negative_label=-1"
    return (
        ". Write the column as 0 and 1, name the right one with data.label, or set data.label_threshold to the least "
        "value that counts as 1"
    )


def _numbers(column: pa.Array, name: str, where: str) -> npt.NDArray[np.float64]:
    """The column as float64, NaN where a value is missing."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = kind_of(column.type)
    if kind == "string":
        encoded = column.cast(pa.large_binary()).dictionary_encode()  # a label has few values: each is read once
        table = np.array([*(_number(text, name, where) for text in encoded.dictionary.to_pylist()), np.nan])
        return table[encoded.indices.fill_null(len(table) - 1).to_numpy(zero_copy_only=False)]
    if kind not in ("integer", "float", "null"):
        raise DataError(
            f"{where}: label column {name!r} has type {column.type}; expected 0 and 1, as numbers, booleans or strings"
        )
    values: npt.NDArray[np.float64] = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return values


def _number(text: bytes, name: str, where: str) -> float:
    word = text.decode(errors="replace").strip()
    try:
        known = _WORDS.get(word.lower())
        return float(word) if known is None else known
    except ValueError:
        raise DataError(
            f"{where}: label column {name!r} holds {word!r}; expected 0 and 1, as numbers or as true and false. "
            f"Write the column so"
        ) from None
