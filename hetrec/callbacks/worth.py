"""What a click model was worth: beside baselines that cost nothing, and whether its probabilities are true."""

from __future__ import annotations

import math
from typing import Any

import torch
from matplotlib.figure import Figure
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor

from hetrec.callbacks.figures import save_figure
from hetrec.callbacks.summary import run_folder
from hetrec.ctr_task import CTRTask
from hetrec.logistic_regression import StreamedLogisticRegression
from hetrec.metrics import CTRMetrics

__all__ = ["Worth", "reliability_figure"]

_BINS = 20


class Worth(Callback):
    """Trains a logistic regression on the batches of a fit, and tests it beside the model. Click models only.

    Logs ``test_baseline_auc`` and ``test_baseline_logloss`` (of the regression), ``test_base_rate_logloss`` (of
    answering the training rows' share of clicks for every row) and ``test_calibration`` (the sum of predicted
    probabilities over that of the labels: 1 is true), and draws ``calibration.png``. The regression goes with the
    checkpoints. With several ranks each trains one on its own share of the rows.
    """

    def __init__(self) -> None:
        self._regression: StreamedLogisticRegression | None = None
        self._labels = torch.zeros(2, dtype=torch.float64)  # sum and number of those that were trained on
        self._metrics = CTRMetrics()
        self._bins = torch.zeros(3, _BINS, dtype=torch.float64)  # rows, predicted, observed, by predicted probability

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if isinstance(pl_module, CTRTask) and self._regression is None:
            self._regression = StreamedLogisticRegression(pl_module.spec)

    def state_dict(self) -> dict[str, Any]:
        if self._regression is None:
            return {}
        return {"labels": self._labels.clone(), "regression": self._regression.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict and self._regression is not None:
            self._labels = state_dict["labels"].clone()
            self._regression.load_state_dict(state_dict["regression"])

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._regression is not None:
            self._regression.update(batch)
            self._labels += torch.tensor([float(batch.labels.sum()), batch.batch_size], dtype=torch.float64)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._bins.zero_()

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._regression is None or not batch.batch_size:
            return
        assert isinstance(outputs, Tensor)
        labels = batch.labels.cpu().float()
        predicted = outputs.detach().cpu().double().sigmoid().nan_to_num(0.0)
        bins = (predicted * _BINS).long().clamp(max=_BINS - 1)
        for of_bin, values in zip(self._bins, (torch.ones_like(predicted), predicted, labels.double()), strict=True):
            of_bin.index_add_(0, bins, values)
        if self._labels[1]:
            self._metrics.update(self._regression.logits(batch), labels)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not isinstance(pl_module, CTRTask):
            return
        bins, trained = (trainer.strategy.reduce(t.to(pl_module.device), reduce_op="sum").cpu() for t in
                         (self._bins.clone(), self._labels.clone()))  # fmt: skip
        rows, predicted, observed = bins.sum(1).tolist()
        figures = {"calibration": predicted / observed} if observed else {}
        if trained[1]:
            figures |= {f"baseline_{name}": value for name, value in self._metrics.compute_and_reset().items()}
            rate = min(max(float(trained[0] / trained[1]), 1e-7), 1 - 1e-7)
            figures["base_rate_logloss"] = -(observed * math.log(rate) + (rows - observed) * math.log(1 - rate)) / rows
        for name, value in figures.items():
            pl_module.log(f"test_{name}", value, sync_dist=True)
        if rows:
            path = run_folder(trainer) / "calibration.png"
            save_figure(trainer, path, "calibration", reliability_figure(bins))

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        found = {name: float(value) for name, value in trainer.callback_metrics.items()}
        pairs = [("auc", "baseline_auc", 1, "a logistic regression on the same batches"),
                 ("logloss", "baseline_logloss", -1, "a logistic regression on the same batches"),
                 ("logloss", "base_rate_logloss", -1, "answering the share of clicks for every row")]  # fmt: skip
        worse = [
            f"test_{name} is {found[f'test_{name}']:.4f}, and {found[f'test_{other}']:.4f} for {what}"
            for name, other, better, what in pairs
            if better * found.get(f"test_{name}", math.nan) < better * found.get(f"test_{other}", math.nan)
        ]
        if worse:
            rank_zero_warn(
                f"the model is below a baseline: {'; '.join(worse)}. Try fewer or more epochs, a smaller "
                "data.batch_size or another learning rate"
            )


def _wilson(rate: Tensor, rows: Tensor) -> Tensor:
    """How far Wilson's 95 % interval of a share reaches below and above it: (2, n)."""
    z2 = 1.96**2
    middle = (rate + z2 / (2 * rows)) / (1 + z2 / rows)
    half = (z2 * (rate * (1 - rate) / rows + z2 / (4 * rows.square()))).sqrt() / (1 + z2 / rows)
    return torch.stack([rate - middle + half, middle + half - rate]).clamp(min=0)


def reliability_figure(bins: Tensor) -> Figure:
    """Observed over predicted share of clicks, and how many rows there are of each prediction.

    Args:
        bins: float64 (3, bins): rows, the sum of their predicted probabilities, the sum of their labels.
    """
    rows, predicted, observed = bins[:, bins[0] > 0]
    figure = Figure(figsize=(5, 6), layout="constrained")
    curve, histogram = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    curve.plot([0, 1], [0, 1], color="#888888", linestyle="--", label="calibrated")
    rate = observed / rows
    curve.errorbar(
        predicted / rows, rate, yerr=_wilson(rate, rows), color="#4c72b0", marker="o", capsize=2,
        label="test rows, 95 % interval",
    )  # fmt: skip
    curve.set_ylabel("observed share of clicks")
    curve.set_title(f"Calibration: predicted / observed = {float(predicted.sum() / observed.sum()):.3f}"
                    if observed.sum() else "Calibration: no clicks")  # fmt: skip
    curve.legend()
    histogram.bar(predicted / rows, rows, width=0.8 / bins.size(1), color="#4c72b0")
    histogram.set_yscale("log")
    histogram.set_xlabel("predicted probability of a click")
    histogram.set_ylabel("rows")
    return figure
