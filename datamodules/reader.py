"""Reads the windows of an epoch: bounded memory, one row group at a time, everything vectorised over rows.

Imports neither Lightning nor TorchRec, so that worker processes start quickly.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from datamodules.columns import Bags, DenseColumn, SparseColumn, bags, dense_values, keys
from datamodules.errors import DataError
from datamodules.files import ParquetFiles, open_parquet, stamp
from datamodules.labels import LabelRule, label_values
from datamodules.plan import EpochPlan, Rows, Unit

__all__ = ["Columns", "Window", "WindowReader"]

_CHUNK_ROWS = 16384  # rows decoded at a time: bounds the memory of one huge row group
_OPEN_FILES = 32


@dataclass(frozen=True)
class Columns:
    """What to read. ``label`` None: labels are NaN (prediction). ``label_rule``: see :func:`label_values`."""

    dense: tuple[DenseColumn, ...]
    sparse: tuple[SparseColumn, ...]
    label: str | None
    label_rule: LabelRule | None = None

    @property
    def names(self) -> list[str]:
        names = [c.name for c in self.dense]
        for feature in self.sparse:
            names += [feature.name] if feature.weight is None else [feature.name, feature.weight]
        return list(dict.fromkeys(names if self.label is None else [*names, self.label]))


@dataclass
class Window:
    """The batches of a window, batch after batch.

    Attributes:
        bounds: batch b holds the rows ``bounds[b]:bounds[b + 1]``.
        labels: float32 (n,).
        dense: float32 (n, dense columns); float64 where columns are raw.
        values: int64, all keys: per batch feature-major, as a KeyedJaggedTensor wants them.
        value_bounds: batch b holds ``values[value_bounds[b]:value_bounds[b + 1]]``.
        lengths: int32 (n * features,), per batch feature-major; None: every bag holds one key.
        weights: float32 like ``values``, or None where no feature has weights.
    """

    bounds: list[int]
    labels: npt.NDArray[np.float32]
    dense: npt.NDArray[np.float32] | npt.NDArray[np.float64]
    values: npt.NDArray[np.int64]
    value_bounds: list[int]
    lengths: npt.NDArray[np.int32] | None
    weights: npt.NDArray[np.float32] | None


class WindowReader:
    """Reads windows of ``plan`` from ``files``. Reading windows in order decodes every row group once.

    Out of order, or in the middle of a row group, it decodes from the row group's start.
    """

    def __init__(self, files: ParquetFiles, rows: Rows, columns: Columns, plan: EpochPlan) -> None:
        self.files = files
        self.rows = rows
        self.columns = columns
        self.plan = plan
        self._open: OrderedDict[int, pq.ParquetFile] = OrderedDict()
        self._cursor: _Cursor | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_open": OrderedDict(), "_cursor": None}

    def read(self, epoch: int, window: int) -> Window:
        """One window, shuffled where the plan says so."""
        bounds = self.plan.window_bounds(window)
        count = bounds[-1]
        labels = np.full(count, np.nan, dtype=np.float32)
        raw = any(c.raw for c in self.columns.dense)
        dense = np.zeros((count, len(self.columns.dense)), dtype=np.float64 if raw else np.float32)
        single = not any(c.ragged or c.weight for c in self.columns.sparse)
        matrix = np.empty((len(self.columns.sparse) if single else 0, count), dtype=np.int64)
        pieces: list[list[Bags]] = [[] for _ in self.columns.sparse]
        at = 0
        for file, batch in self._chunks(epoch, window):
            where, end = self.files.paths[file], at + len(batch)
            if self.columns.label is not None:
                label = self.columns.label
                labels[at:end] = label_values(batch[label], label, where, self.columns.label_rule)
            for i, column in enumerate(self.columns.dense):
                dense[at:end, i] = dense_values(batch[column.name], column, where)
            for i, feature in enumerate(self.columns.sparse):
                if single:
                    matrix[i, at:end] = keys(batch[feature.name], feature, where)
                elif feature.ragged or feature.weight:
                    weights = batch[feature.weight] if feature.weight else None
                    pieces[i].append(bags(batch[feature.name], weights, feature, where))
                else:
                    values = keys(batch[feature.name], feature, where)
                    pieces[i].append(Bags(values, np.ones(len(values), dtype=np.int64)))
            at = end
        assert at == count

        order = self.plan.window_permutation(epoch, window)
        if order is not None:
            labels, dense = labels[order], dense[order]
        if single:
            values = np.empty(matrix.size, dtype=np.int64)
            for low, high in pairwise(bounds):
                out = values[low * len(matrix) : high * len(matrix)].reshape(len(matrix), high - low)
                if order is None:
                    out[:] = matrix[:, low:high]
                else:
                    np.take(matrix, order[low:high], axis=1, out=out, mode="clip")
            return Window(bounds, labels, dense, values, [b * len(matrix) for b in bounds], None, None)
        weighted = any(c.weight for c in self.columns.sparse)
        columns = [_permute(_concatenate(p, weighted), order) for p in pieces]
        return Window(bounds, labels, dense, *_interleave(columns, bounds, weighted))

    def _chunks(self, epoch: int, window: int) -> Iterator[tuple[int, dict[str, pa.Array]]]:
        for piece in self.plan.window_slices(epoch, window):
            if self._cursor is None or not self._cursor.can_reach(piece.unit, piece.start):
                self._cursor = _Cursor(piece.unit, self._readable(piece.unit))
            for batch in self._cursor.take(piece.start, piece.stop):
                yield piece.unit.file, self._complete(piece.unit.file, batch)

    def _readable(self, unit: Unit) -> Iterator[pa.RecordBatch]:
        """The rows of a unit that belong to the split; what goes wrong in the file is said in its name."""
        path = self.files.paths[unit.file]
        try:
            self._check_unchanged(unit.file)
            yield from self._batches(unit)
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"{path} cannot be read: {error}. It is damaged, or was changed or removed since the start"
            ) from error
        raise DataError(f"{path} has fewer rows than its footer said at the start; start again when it is complete")

    def _check_unchanged(self, file: int) -> None:
        """Rows of a file that was written anew are not those that the splits were drawn from."""
        path, then = self.files.paths[file], self.files.stamps[file]
        now = stamp(path)
        if now != then:
            raise DataError(
                f"{path} was changed since the start ({then[0]:,} bytes then, {now[0]:,} now); start again when it is "
                f"complete"
            )

    def _batches(self, unit: Unit) -> Iterator[pa.RecordBatch]:
        """The rows of a unit that belong to the split, a chunk at a time."""
        own = self.files.names[unit.file]
        position = unit.position
        for batch in self._file(unit.file).iter_batches(
            batch_size=_CHUNK_ROWS,
            row_groups=range(unit.first_group, unit.first_group + unit.groups),
            columns=[n for n in self.columns.names if n in own],
            use_threads=False,
        ):
            self._check_unchanged(unit.file)
            kept = self.rows.mask(position, batch.num_rows)
            position += batch.num_rows
            if isinstance(kept, slice):
                yield batch.slice(kept.start, kept.stop - kept.start)
            else:
                yield batch.filter(pa.array(kept))

    def _complete(self, file: int, batch: pa.RecordBatch) -> _Batch:
        """Adds the columns that the file does not hold: from its folder's name, else missing."""
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        for name in self.columns.names:
            if name not in columns:
                value = self.files.partitions[file].get(name)
                columns[name] = pa.nulls(batch.num_rows) if value is None else pa.repeat(value, batch.num_rows)
        return _Batch(columns, batch.num_rows)

    def _file(self, index: int) -> pq.ParquetFile:
        if index in self._open:
            self._open.move_to_end(index)
        else:
            self._open[index] = open_parquet(self.files.paths[index])
            if len(self._open) > _OPEN_FILES:
                self._open.popitem(last=False)[1].close()
        return self._open[index]


class _Batch(dict[str, pa.Array]):
    """Columns by name, and the number of rows as length."""

    def __init__(self, columns: dict[str, pa.Array], rows: int) -> None:
        super().__init__(columns)
        self._rows = rows

    def __len__(self) -> int:
        return self._rows


class _Cursor:
    """A position within a unit that only moves forward."""

    def __init__(self, unit: Unit, batches: Iterator[pa.RecordBatch]) -> None:
        self._unit = unit
        self._batches = batches
        self._batch: pa.RecordBatch | None = None
        self._begin = 0  # position of the batch's first row among the unit's kept rows

    def can_reach(self, unit: Unit, start: int) -> bool:
        return unit == self._unit and start >= self._begin

    def take(self, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        """The rows ``start .. stop``."""
        while start < stop:
            if self._batch is None or start >= self._begin + self._batch.num_rows:
                self._begin += 0 if self._batch is None else self._batch.num_rows
                self._batch = next(self._batches)
                continue
            end = min(stop, self._begin + self._batch.num_rows)
            yield self._batch.slice(start - self._begin, end - start)
            start = end


def _concatenate(pieces: list[Bags], weighted: bool) -> Bags:
    values = np.concatenate([p.keys for p in pieces]) if pieces else np.empty(0, dtype=np.int64)
    lengths = np.concatenate([p.lengths for p in pieces]) if pieces else np.empty(0, dtype=np.int64)
    if not weighted:
        return Bags(values, lengths)
    ones = [np.ones(len(p.keys), dtype=np.float32) if p.weights is None else p.weights for p in pieces]
    return Bags(values, lengths, np.concatenate(ones) if ones else np.empty(0, dtype=np.float32))


def _permute(column: Bags, order: npt.NDArray[np.int64] | None) -> Bags:
    """The bags in another order."""
    if order is None:
        return column
    lengths = column.lengths[order]
    starts = (np.cumsum(column.lengths) - column.lengths)[order]
    first = np.cumsum(lengths) - lengths  # where each bag begins afterwards
    index = np.arange(int(lengths.sum())) + np.repeat(starts - first, lengths)
    return Bags(column.keys[index], lengths, None if column.weights is None else column.weights[index])


def _interleave(
    columns: list[Bags], bounds: list[int], weighted: bool
) -> tuple[npt.NDArray[np.int64], list[int], npt.NDArray[np.int32], npt.NDArray[np.float32] | None]:
    """Values, value bounds, lengths and weights of a window, per batch feature-major, from columns over the window."""
    ends = [np.concatenate([[0], np.cumsum(c.lengths)]) for c in columns]
    values, lengths, weights, value_bounds = [], [], [], [0]
    for low, high in pairwise(bounds):
        total = 0
        for column, end in zip(columns, ends, strict=True):
            part = slice(int(end[low]), int(end[high]))
            values.append(column.keys[part])
            lengths.append(column.lengths[low:high])
            if column.weights is not None:
                weights.append(column.weights[part])
            total += part.stop - part.start
        value_bounds.append(value_bounds[-1] + total)
    none = np.empty(0)
    return (
        np.concatenate([none.astype(np.int64), *values]),
        value_bounds,
        np.concatenate([none.astype(np.int32), *lengths]).astype(np.int32),
        np.concatenate([none.astype(np.float32), *weights]) if weighted else None,
    )
