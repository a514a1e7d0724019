"""Criteo's columns, shared by the converter, the data module and the synthetic rows."""

from __future__ import annotations

__all__ = ["CATEGORICAL", "INTEGERS", "LABEL", "MISSING", "kaggle_cardinalities"]

LABEL = "label"
INTEGERS = tuple(f"I{i}" for i in range(1, 14))
CATEGORICAL = tuple(f"C{i}" for i in range(1, 27))

# Categories are 32-bit hexadecimal numbers, so a negative key is never a real one.
MISSING = -1

# Distinct values of C1 .. C26 in the training set of the Kaggle display advertising challenge.
kaggle_cardinalities = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
