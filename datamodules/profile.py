"""What the columns of a table are: distinct values, missing ones, and how well each alone tells clicks apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from datamodules.columns import DenseColumn, SparseColumn
from datamodules.files import ParquetFiles
from datamodules.keys import MISSING_KEY, mix64
from datamodules.labels import LabelRule
from datamodules.plan import EpochPlan, Rows, make_units
from datamodules.progress import progress_bar
from datamodules.reader import Columns, Window, WindowReader
from hetrec.metrics import AUROC

__all__ = ["FEWEST", "SAMPLE", "ColumnProfile", "TableProfile"]

#: Rows that are looked at, the first ones; what they make likely is checked on all rows before a column is left out.
SAMPLE = 200_000

#: Rows; of fewer nothing is concluded.
FEWEST = 200
_IDENTIFIER = 0.9  # of the present values are distinct


@dataclass(frozen=True)
class ColumnProfile:
    """One column's values among the sampled rows.

    Attributes:
        distinct: how many distinct values, missing ones aside.
        missing: missing values; of lists, missing lists and missing elements.
        identifier: whether nearly every row of the whole table has a value of its own.
        constant: whether the whole table holds one value, with none missing; or missing ones only.
    """

    distinct: int
    missing: int
    identifier: bool = False
    constant: bool = False


class TableProfile:
    """Profiles of columns, one column in memory at a time; each is read once.

    Args:
        files: the table.
        sample: how many rows are looked at.
    """

    def __init__(self, files: ParquetFiles, sample: int = SAMPLE) -> None:
        self.rows = min(files.rows, sample)
        self.is_whole = self.rows == files.rows
        self._files = files
        self._labels: npt.NDArray[np.float32] | None = None

    def sparse(self, column: SparseColumn) -> ColumnProfile:
        """Of a column of keys. A single value a row can be an identifier.

        Raises:
            DataError: its values cannot be keys.
        """
        keys = self._keys(column)
        present = keys[keys != MISSING_KEY]
        distinct, missing = len(np.unique(present)), len(keys) - len(present)
        if self.rows < FEWEST or column.ragged:
            return ColumnProfile(distinct, missing)
        identifier = _is_identifier(distinct, len(present))
        constant = distinct + (missing > 0) == 1
        if (identifier or constant) and not self.is_whole:
            identifier, constant = self._of_all_rows(column, constant)
        return ColumnProfile(distinct, missing, identifier, constant)

    def dense(self, column: str) -> ColumnProfile:
        """Of a column of numbers, where infinite ones are missing. None is constant in a table larger than the sample.

        Raises:
            DataError: its values are no numbers.
        """
        values = self._dense(column)
        present = values[np.isfinite(values)]
        distinct, missing = len(np.unique(present)), len(values) - len(present)
        constant = self.is_whole and self.rows >= FEWEST and distinct + (missing > 0) == 1
        return ColumnProfile(distinct, missing, constant=constant)

    def auc(self, column: SparseColumn | str, label: str, rule: LabelRule) -> float:
        """The AUC of one column alone, 0.5 or more: of a dense column's value (missing ones lowest), or of a key's mean
        label, with the means of every second row judged on the others. NaN where there is none (one label, lists).

        Raises:
            DataError: labels or values cannot be read.
        """
        if isinstance(column, SparseColumn) and column.ragged:
            return float("nan")
        if self._labels is None:
            self._labels = self._window(Columns((), (), label, rule)).labels
        labels = self._labels
        if isinstance(column, SparseColumn):
            keys = np.unique(self._keys(column), return_inverse=True)[1]
            sums = np.bincount(keys[::2], labels[::2], minlength=keys.max(initial=0) + 1)
            counts = np.bincount(keys[::2], minlength=len(sums))
            # One more row with the mean label a key, so that a key seen once is less sure than one seen often.
            means = (sums + labels[::2].mean()) / (counts + 1)
            scores, labels = means[keys[1::2]], labels[1::2]
        else:
            values = self._dense(column)
            scores = np.where(np.isfinite(values), values, -np.inf)
        ranks = np.unique(scores, return_inverse=True)[1]  # torchmetrics sees no tie in two infinite scores
        metric = AUROC()
        metric.update(torch.from_numpy(ranks.astype(np.float64)), torch.from_numpy(labels))
        auc = float(metric.compute())
        return max(auc, 1 - auc)

    def _keys(self, column: SparseColumn) -> npt.NDArray[np.int64]:
        return self._window(Columns((), (column,), None)).values

    def _dense(self, column: str) -> npt.NDArray[np.float64]:
        return self._window(Columns((DenseColumn(column, raw=True),), (), None)).dense[:, 0].astype(np.float64)

    def _window(self, columns: Columns) -> Window:
        return next(self._windows(columns, self.rows, self.rows))

    def _windows(self, columns: Columns, rows: int, window: int) -> Iterator[Window]:
        every = Rows(0, rows)
        units = tuple(make_units(self._files.group_rows, every))
        plan = EpochPlan(units, window, window, shuffle=False, seed=0, rank=0, world_size=1)
        reader = WindowReader(self._files, every, columns, plan)
        return (reader.read(0, number) for number in range(plan.windows))

    def _of_all_rows(self, column: SparseColumn, constant: bool) -> tuple[bool, bool]:
        """Whether a column that looks like an identifier, or constant, in the sample is one in the whole table.

        Distinct values are counted among those whose hash falls into a share that is about as large as the sample: of
        such a value all rows are seen, so a key that comes back later counts as one.
        """
        share = np.uint64(-(-self._files.rows // self.rows))
        first: int | None = None
        kept: list[npt.NDArray[np.int64]] = []
        with progress_bar("rows") as bar:
            task = bar.add_task(f"distinct values of {column.name}", total=self._files.rows)
            for window in self._windows(Columns((), (column,), None), self._files.rows, self.rows):
                keys = window.values
                bar.advance(task, len(keys))
                if constant:
                    first = int(keys[0]) if first is None else first
                    if bool((keys != first).any()):
                        return False, False
                    continue
                present = keys[keys != MISSING_KEY]
                kept.append(present[mix64(present.view(np.uint64)) % share == 0])
        held = np.concatenate(kept) if kept else np.empty(0, dtype=np.int64)
        return not constant and _is_identifier(len(np.unique(held)), len(held)), constant


def _is_identifier(distinct: int, present: int) -> bool:
    return present >= FEWEST and distinct >= _IDENTIFIER * present
