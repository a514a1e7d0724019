"""Predictions as a file: Parquet or CSV."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import BasePredictionWriter
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor

from cache_backend.disk import room_for
from hetrec.callbacks.summary import run_folder

__all__ = ["PredictionWriter"]

_WRITERS: dict[str, Callable[[Path, pa.Schema], Any]] = {".parquet": pq.ParquetWriter, ".csv": arrow_csv.CSVWriter}


class PredictionWriter(BasePredictionWriter):
    """Writes what ``predict`` yields, batch by batch, in the order in which the rows were read.

    One column, ``probability``, float32, behind the rows' ids where a column of ids is named. With several ranks each
    writes its own file, ``NAME-RANK.parquet``, which in the order of the ranks hold the rows in the order of the data.
    A file of that name is whole: a run that ends early leaves none.

    Args:
        path: the file, ``.parquet`` or ``.csv``. None: ``predictions.parquet`` in the run's folder.
        id_column: a column of the data module's files, to be written beside the predictions.

    Raises:
        ValueError: ``path`` ends in something else.
    """

    def __init__(self, path: str | None = None, id_column: str | None = None) -> None:
        super().__init__(write_interval="batch")
        self.write_to(path, id_column)
        self._writer: Any = None
        self._path = Path()
        self._ids: _Values | None = None

    def write_to(self, path: str | None, id_column: str | None) -> None:
        """As the constructor's arguments."""
        if path is not None and Path(path).suffix not in _WRITERS:
            raise ValueError(f"out={path}: predictions are written as {' or '.join(_WRITERS)}; give such a name")
        self._given, self._id_column = path, id_column

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        path = Path(self._given) if self._given is not None else run_folder(trainer) / "predictions.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._said = path if trainer.world_size == 1 else path.with_stem(f"{path.stem}-RANK")
        fields = [pa.field("probability", pa.float32())]
        if self._id_column is not None:
            datamodule = trainer.datamodule  # type: ignore[attr-defined]  # Lightning sets it without declaring it
            if not hasattr(datamodule, "predict_values"):
                raise ValueError(f"id_column={self._id_column}: {type(datamodule).__name__} has no columns of rows")
            self._ids = _Values(datamodule.predict_values(self._id_column))
            fields.insert(0, pa.field(self._id_column, self._ids.dtype))
        self._schema = pa.schema(fields)
        self._path = path if trainer.world_size == 1 else path.with_stem(f"{path.stem}-{trainer.global_rank}")
        with room_for(self._path):
            self._writer = _WRITERS[path.suffix](self._unfinished, self._schema)

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        assert self._writer is not None
        assert isinstance(prediction, Tensor)
        columns = [pa.array(prediction.float().cpu().numpy())]
        if self._ids is not None:
            columns.insert(0, self._ids.take(prediction.numel()))
        with room_for(self._path):
            self._writer.write_table(pa.table(columns, schema=self._schema))

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with room_for(self._path):
            self._close()
        self._unfinished.replace(self._path)
        rank_zero_info(f"predictions are in {self._said}")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        with suppress(OSError):  # the disk may be full
            self._close()
        if self._path.name:  # it has begun
            self._unfinished.unlink(missing_ok=True)

    @property
    def _unfinished(self) -> Path:
        return self._path.with_name(f".{self._path.name}.tmp")

    def _close(self) -> None:
        self._ids = None
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()


class _Values:
    """A stream of arrays, of one type, as a stream of values."""

    def __init__(self, arrays: Iterator[pa.Array]) -> None:
        self._arrays = arrays
        self._held: pa.Array = next(arrays)
        self.dtype = self._held.type

    def take(self, count: int) -> pa.Array:
        """The next ``count`` values."""
        parts = [self._held]
        held = len(self._held)
        while held < count:
            parts.append(next(self._arrays))
            held += len(parts[-1])
        joined = pa.concat_arrays(parts)
        self._held = joined[count:]
        return joined[:count]
