"""CSV and Parquet files as chunks of NumPy columns, with errors that name file and column."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from datamodules.errors import DataError

__all__ = ["column_chunks", "headerless", "integers"]

_PARQUET = (".parquet", ".pq")
_BLOCK_BYTES = 16 << 20


def column_chunks(path: Path, columns: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    """The named columns of a CSV file (``.gz`` or not; the first line names the columns) or Parquet file, in chunks.

    Raises:
        DataError: the file cannot be read, or lacks a column.
    """
    try:
        if path.stat().st_size == 0:
            raise DataError(f"{path} is empty; expected a line with the columns {', '.join(columns)}, and lines below")
        if path.suffix in _PARQUET:
            with pq.ParquetFile(path) as file:
                _check_columns(path, columns, file.schema_arrow.names)
                yield from file.iter_batches(columns=list(columns))
        else:
            with pa.csv.open_csv(path, _read_options()) as reader:
                _check_columns(path, columns, reader.schema.names)
                for batch in reader:
                    yield batch.select(list(columns))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def headerless(path: Path, dtype: pa.DataType) -> Iterator[npt.NDArray[np.generic]]:
    """The rows of a CSV file without a header, all columns of one type, as (n, columns) chunks.

    Raises:
        DataError: the file is absent or holds something else.
    """
    try:
        with pa.csv.open_csv(path, _read_options()) as reader:
            width = len(reader.schema)
    except pa.ArrowInvalid:  # an empty file has no columns
        return
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    types = {f"f{i}": dtype for i in range(width)}
    try:
        options = pa.csv.ConvertOptions(column_types=types)
        with pa.csv.open_csv(path, _read_options(header=False), convert_options=options) as reader:
            for batch in reader:
                if pa.types.is_integer(dtype) and any(column.null_count for column in batch.columns):
                    raise DataError(f"{path} has lines with missing values; every line needs {width} integers")
                yield np.stack([column.to_numpy(zero_copy_only=False) for column in batch.columns], axis=1)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def integers(column: pa.Array, name: str, path: Path) -> npt.NDArray[np.int64]:
    """A column of ids, none of them missing.

    Raises:
        DataError: it holds something else.
    """
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        wrong = next(
            (v for v in column.to_pylist() if v is not None and not v.strip().removeprefix("-").isdigit()), None
        )
        if wrong is not None:
            raise DataError(
                f"{path}: column {name!r} holds no integers: {wrong!r}; nodes are numbered from 0: give every name a "
                f"number first, as pandas.factorize does"
            )
    if column.null_count:
        raise DataError(f"{path}: column {name!r} has {column.null_count} missing values; every id must be there")
    try:
        return np.asarray(pc.cast(column, pa.int64()).to_numpy(zero_copy_only=False))
    except pa.ArrowInvalid as error:
        raise DataError(f"{path}: column {name!r} holds no integers: {error}; nodes are numbered from 0") from error


def _read_options(header: bool = True) -> pa.csv.ReadOptions:
    # Without threads an error tells the row.
    return pa.csv.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES, autogenerate_column_names=not header)


def _check_columns(path: Path, wanted: tuple[str, ...], present: list[str]) -> None:
    absent = [name for name in wanted if name not in present]
    if absent:
        raise DataError(f"{path} has no column {', '.join(absent)}; it has: {', '.join(map(repr, present))}")
