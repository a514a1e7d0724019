"""Predictions as Parquet."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import BasePredictionWriter
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor

from cache_backend.disk import room_for
from hetrec.callbacks.summary import run_folder

__all__ = ["PredictionWriter"]

SCHEMA = pa.schema({"probability": pa.float32()})


class PredictionWriter(BasePredictionWriter):
    """Writes what ``predict`` yields to ``predictions.parquet`` in the run's folder, batch by batch.

    One column, ``probability``, float32, in the order in which the rows were read; with several ranks each writes its
    own ``predictions-RANK.parquet``, which in the order of the ranks hold the rows in the order of the data. A file of
    that name is whole: a run that ends early leaves none.
    """

    def __init__(self) -> None:
        super().__init__(write_interval="batch")
        self._writer: pq.ParquetWriter | None = None
        self._path = Path()

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        name = "predictions" if trainer.world_size == 1 else f"predictions-{trainer.global_rank}"
        folder = run_folder(trainer)
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{name}.parquet"
        with room_for(self._path):
            self._writer = pq.ParquetWriter(self._unfinished, SCHEMA)

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
        with room_for(self._path):
            self._writer.write_table(pa.table([pa.array(prediction.float().cpu().numpy())], schema=SCHEMA))

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with room_for(self._path):
            self._close()
        self._unfinished.replace(self._path)
        name = "predictions.parquet" if trainer.world_size == 1 else "predictions-RANK.parquet"
        rank_zero_info(f"predictions are in {self._path.with_name(name)}")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        with suppress(OSError):  # the disk may be full
            self._close()
        if self._path.name:  # it has begun
            self._unfinished.unlink(missing_ok=True)

    @property
    def _unfinished(self) -> Path:
        return self._path.with_name(f".{self._path.name}.tmp")

    def _close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()
