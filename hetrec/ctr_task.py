"""The task of click-through-rate models: a logit a row, judged by AUC and log loss."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from pytorch_lightning.callbacks import EarlyStopping
from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hetrec.data import Batch, FeatureSpec, GraphSpec
from hetrec.dense_normalizer import DenseNormalizer
from hetrec.dense_statistics import DenseStatistics
from hetrec.embedding_bag import HetEmbeddingBagCollection
from hetrec.metrics import CTRMetrics
from hetrec.tables import embedding_bag_tables
from hetrec.task import HetTask
from hetrec.trained_columns import remember_columns

__all__ = ["CTRTask"]


class CTRTask(HetTask):
    """Base of the click models (see ``HetTask``); ``forward(dense, sparse) -> logits (B,)`` is all that they add.

    Logs ``val_auc``, ``val_logloss``, ``test_auc``, ``test_logloss``; predicts click probabilities.

    Args:
        spec: columns of the data.
        embedding_dim: width of the embeddings, at least 1.
        row_init: rows start uniform in [-row_init, row_init].
        extra_columns: a row has so many columns beside the embedding.

    Raises:
        ValueError: a width or a range that is not positive; the spec of a graph.
    """

    monitor = "val_auc"

    def __init__(self, spec: FeatureSpec, embedding_dim: int, row_init: float, extra_columns: int = 0) -> None:
        if isinstance(spec, GraphSpec):
            raise ValueError(
                f"{type(self).__name__} predicts clicks, and the data are a graph: use model=graphsage, or data with "
                "rows and labels (data=criteo, data=parquet, data=synthetic)"
            )
        if embedding_dim < 1:
            raise ValueError(f"embedding_dim is {embedding_dim}; give a width of at least 1")
        self.row_width = embedding_dim + extra_columns
        tables = embedding_bag_tables(spec, self.row_width, row_init)
        super().__init__(spec, HetEmbeddingBagCollection(tables, is_weighted=spec.is_weighted), CTRMetrics)
        self.normalizer = DenseNormalizer(spec.normalize) if spec.normalize else None
        # Sum and number of the labels of the first epoch of training, of this rank; None once they were looked at.
        self._labels: Tensor | None = torch.zeros(2, dtype=torch.float64)

    def lookup(self, sparse: KeyedJaggedTensor) -> Tensor:
        """Pooled rows, float32, (B, sparse features, row width); features in the order of the tables that hold them."""
        pooled_BX = self.on_device(self.embeddings(sparse).values())
        return pooled_BX.unflatten(1, (len(self.spec.sparse), self.row_width))

    def logits(self, batch: Batch) -> Tensor:
        """Of a batch as the data module made it: dense columns that come raw are normalised first. float32, (B,)."""
        dense_BN = batch.dense_features
        return self(dense_BN if self.normalizer is None else self.normalizer(dense_BN), batch.sparse_features)

    def loss(self, batch: Batch) -> Tensor:
        logits_B = self.logits(batch)
        # A rank may get no row in its last step. The mean of none is NaN; its gradient must be zero.
        return binary_cross_entropy_with_logits(logits_B, batch.labels) if batch.batch_size else logits_B.sum()

    def on_fit_start(self) -> None:
        super().on_fit_start()
        # A checkpoint brings its own statistics: those that its weights were trained with.
        if self.normalizer is not None and not self.normalizer.fitted:
            statistics = self._dense_statistics()
            self.normalizer.fit(statistics)
            for line in self.normalizer.report(self.spec.dense, statistics):
                rank_zero_info(line)

    def _dense_statistics(self) -> DenseStatistics:
        """Of all ranks' training rows."""
        datamodule = self.trainer.datamodule  # type: ignore[attr-defined]  # Lightning sets it without declaring it
        if not hasattr(datamodule, "dense_statistics"):
            raise ValueError(
                "the dense columns are raw, and their statistics come from the data module: call trainer.fit with "
                "datamodule=..., or make the data module with normalize='none'"
            )
        own = datamodule.dense_statistics()
        shares = [self.trainer.strategy.broadcast(own, src=rank) for rank in range(self.trainer.world_size)]
        return reduce(DenseStatistics.merge, shares)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        remember_columns(checkpoint, self.spec)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        normalized = "normalizer.mean_N" in checkpoint["state_dict"]
        if normalized != (self.normalizer is not None):
            raise ValueError(
                "this checkpoint was trained with normalised dense columns: leave data.normalize=none out"
                if normalized
                else "this checkpoint was trained without normalised dense columns: set data.normalize=none"
            )
        super().on_load_checkpoint(checkpoint)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if self._labels is not None:
            self._labels = self._labels.to(batch.labels.device)
            self._labels[0] += batch.labels.sum()
            self._labels[1] += batch.batch_size
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        if self._labels is None:
            return
        total, rows = self._sum_over_ranks(self._labels).tolist()
        self._labels = None
        if rows and total in (0, rows):
            rank_zero_warn(
                f"all {rows:,.0f} training rows have the label {total / rows:.0f}, so nothing tells clicks apart: is "
                f"{self.spec.label!r} the right label column?"
            )

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        auc = self.trainer.callback_metrics.get(self.monitor)  # none where nothing is logged (barebones)
        if self.trainer.sanity_checking or auc is None or not auc.isnan():
            return
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]  # a connector of the trainer sets it
            if isinstance(callback, EarlyStopping) and callback.monitor == self.monitor and callback.check_finite:
                callback.check_finite = False  # it would stop at once, and without a word
                rank_zero_warn(
                    f"early stopping counts an undefined {self.monitor} as no improvement, and stops after "
                    f"{callback.patience} such epochs: let it watch val_logloss, with mode=min"
                )

    def evaluate(self, batch: Batch, metrics: CTRMetrics) -> Tensor:
        """Returns the logits, (B,)."""
        logits_B = self.logits(batch)
        metrics.update(logits_B, batch.labels)
        return logits_B

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Click probabilities, float32, (B,)."""
        return torch.sigmoid(self.logits(batch))
