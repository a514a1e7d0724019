"""Criteo's columns as CSV with a header, ``label,I1,...,C26``, and integers as ``260.0``: what benchmarks pass on."""

from __future__ import annotations

from pathlib import Path

from datamodules.criteo_layout import CATEGORICAL, INTEGERS, LABEL
from datamodules.table_convert import TableOptions, convert_table
from datamodules.table_sources import open_stream

__all__ = ["convert_csv", "has_csv_header"]

_HEAD_BYTES = 4096


def has_csv_header(path: Path) -> bool:
    """Whether the first line of a file names Criteo's columns, in any order and with or without others."""
    with open_stream(path) as stream:
        line = stream.read(_HEAD_BYTES).decode("utf-8-sig", errors="replace").split("\n")[0]
    return {*INTEGERS, *CATEGORICAL} <= {name.strip().strip('"') for name in line.split(",")}


def convert_csv(root: Path, sources: list[Path], final: Path) -> None:
    """Writes the rows to Parquet, once, with the integers as numbers and the categories as they stand.

    Raises:
        DataError: as :func:`datamodules.table_convert.convert_table` does.
    """
    # Hexadecimal categories of digits alone would be taken for decimal numbers.
    declared = dict.fromkeys(INTEGERS, "float") | dict.fromkeys(CATEGORICAL, "string")
    convert_table(root, sources, final, TableOptions(separator=",", label=LABEL, types=declared))
