"""Float columns that hold whole numbers only: ids with gaps, more often than measurements."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from datamodules.columns import kind_of
from datamodules.errors import DataError
from datamodules.files import ParquetFiles, open_parquet

__all__ = ["whole_float_columns"]

_ROWS = 16384


def whole_float_columns(files: ParquetFiles, names: list[str]) -> list[str]:
    """Those of the float columns ``names`` that look like ids: whole numbers, with another among them than 0 and 1.

    Looked at are the statistics of the first file in which the column is a float, and that file's first rows.

    Raises:
        DataError: those rows cannot be read.
    """
    by_file: dict[str, list[str]] = {}
    for name in names:
        file = files.columns[name].float_in
        assert file is not None
        by_file.setdefault(file, []).append(name)
    found = {name for file, columns in by_file.items() for name in _whole_in(file, columns)}
    return [name for name in names if name in found]


def _whole_in(path: str, names: list[str]) -> list[str]:
    try:
        with open_parquet(path) as file:
            names = [name for name in names if _bounds_are_whole(file.metadata, name)]
            batch = next(file.iter_batches(batch_size=_ROWS, columns=names, use_threads=False), None)
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path} cannot be read: {str(error).strip().rstrip('.')}. Write it again, or leave it out"
        ) from error
    return [] if batch is None else [name for name in names if _looks_like_ids(batch[name])]


def _bounds_are_whole(metadata: pq.FileMetaData, name: str) -> bool:
    """Whether the statistics leave it open; most fractional columns are told apart without reading a row."""
    for group in (metadata.row_group(g) for g in range(metadata.num_row_groups)):
        for column in (group.column(c) for c in range(group.num_columns)):
            statistics = column.statistics if column.path_in_schema == name else None
            if statistics is None or not statistics.has_min_max or not isinstance(statistics.min, float):
                continue  # float16's come as bytes
            if not (statistics.min.is_integer() and statistics.max.is_integer()):
                return False
    return True


def _looks_like_ids(column: pa.Array) -> bool:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    assert kind_of(column.type) == "float"
    values = column.cast(pa.float64()).to_numpy(zero_copy_only=False)  # nulls become NaN
    values = values[~np.isnan(values)]
    return bool((values == np.floor(values)).all() and np.isfinite(values).all() and not np.isin(values, (0, 1)).all())
