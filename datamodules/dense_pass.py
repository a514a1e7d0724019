"""One pass over the dense columns of some rows, for their statistics."""

from __future__ import annotations

import numpy as np

from datamodules.columns import DenseColumn
from datamodules.files import ParquetFiles
from datamodules.plan import EpochPlan, Rows, Unit
from datamodules.progress import progress_bar
from datamodules.reader import Columns, WindowReader
from hetrec.dense_statistics import DenseStatistics

__all__ = ["dense_statistics"]

_WINDOW_ROWS = 16384
_LONG = 5_000_000  # values; fewer take no time worth a bar


def dense_statistics(
    files: ParquetFiles,
    rows: Rows,
    units: tuple[Unit, ...],
    dense: tuple[DenseColumn, ...],
    rank: int = 0,
    world_size: int = 1,
) -> DenseStatistics:
    """Of one rank's share of ``rows``, which ``units`` hold. Memory is that of a few thousand rows."""
    plan = EpochPlan(units, _WINDOW_ROWS, _WINDOW_ROWS, shuffle=False, seed=0, rank=rank, world_size=world_size)
    reader = WindowReader(files, rows, Columns(dense, sparse=(), label=None), plan)
    first, last = plan.rank_range
    statistics = DenseStatistics.of(np.empty((0, len(dense))))
    bar = progress_bar("rows")
    bar.disable = rank > 0 or (last - first) * len(dense) < _LONG
    with bar:
        task = bar.add_task("statistics of the dense columns", total=last - first)
        for window in range(plan.windows):
            values = reader.read(0, window).dense.astype(np.float64, copy=False)
            statistics = statistics.merge(DenseStatistics.of(values))
            bar.advance(task, len(values))
    return statistics
