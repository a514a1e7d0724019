"""Baselines and calibration of a click model, against scikit-learn, numpy and a regression written out in torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning import seed_everything
from pytorch_lightning.callbacks import ModelCheckpoint
from sklearn.metrics import log_loss, roc_auc_score
from torch import nn

from cache_backend import CacheConfig, EmbeddingOptimizer, LocalStore
from hetrec.callbacks import RunSummary, Worth
from hetrec.data import Batch
from hetrec.logistic_regression import StreamedLogisticRegression
from models.wdl import WDL
from tests.models.ctr import SIMPLE, loader, make_batches, make_trainer

TRAIN = make_batches(SIMPLE, 8)
TEST = make_batches(SIMPLE, 4, seed=1)


def make_task() -> WDL:
    seed_everything(0, verbose=False)
    task = WDL(SIMPLE, embedding_dim=4, mlp_sizes=(8,))
    task.connect(LocalStore(), CacheConfig(rows=256), EmbeddingOptimizer(lr=0.1))
    return task


def one_hot(batch: Batch, ids: dict[tuple[str, int], int]) -> torch.Tensor:
    """Counts of every (feature, key) in every row, and the dense columns as the regression takes them."""
    counts = torch.zeros(batch.batch_size, len(ids), dtype=torch.float64)
    for name, jagged in batch.sparse_features.to_dict().items():
        rows = torch.arange(batch.batch_size).repeat_interleave(jagged.lengths())
        for row, key in zip(rows.tolist(), jagged.values().tolist(), strict=True):
            counts[row, ids[name, key]] += 1
    dense = batch.dense_features.double()
    return torch.cat([counts, dense.sign() * dense.abs().log1p()], 1)


def test_the_regression_is_one_on_one_hot_ids() -> None:
    keys = sorted({
        (name, key)
        for batch in [*TRAIN, *TEST]
        for name, jagged in batch.sparse_features.to_dict().items()
        for key in jagged.values().tolist()
    })  # fmt: skip
    ids = {key: i for i, key in enumerate(keys)}
    plain = nn.Linear(len(ids) + len(SIMPLE.dense), 1, dtype=torch.float64)
    nn.init.zeros_(plain.weight)
    nn.init.zeros_(plain.bias)
    optimizer = torch.optim.Adagrad(plain.parameters(), lr=0.1, eps=1e-8)
    regression = StreamedLogisticRegression(SIMPLE)
    for batch in TRAIN:
        regression.update(batch)
        optimizer.zero_grad()
        logits = plain(one_hot(batch, ids)).squeeze(1)
        nn.functional.binary_cross_entropy_with_logits(logits, batch.labels.double()).backward()
        optimizer.step()
    again = StreamedLogisticRegression(SIMPLE)
    again.load_state_dict(regression.state_dict())
    for batch in TEST:
        expected = plain(one_hot(batch, ids)).squeeze(1).detach().float()
        torch.testing.assert_close(regression.logits(batch), expected, rtol=0, atol=1e-4)
        assert torch.equal(again.logits(batch), regression.logits(batch))


def test_figures_of_a_test_and_their_way_through_a_checkpoint(tmp_path: Path) -> None:
    task, saved = make_task(), ModelCheckpoint(tmp_path, filename="last")
    trainer = make_trainer(tmp_path, callbacks=[Worth(), RunSummary(), saved], enable_checkpointing=True, max_epochs=2)
    trainer.fit(task, loader(TRAIN))
    (figures,) = trainer.test(task, loader(TEST), verbose=False)

    labels = torch.cat([batch.labels for batch in TEST]).numpy()
    rate = float(torch.cat([batch.labels for batch in TRAIN]).mean())
    assert figures["test_base_rate_logloss"] == pytest.approx(log_loss(labels, np.full(len(labels), rate)), rel=1e-5)
    predicted = torch.cat(make_trainer(tmp_path).predict(task, loader(TEST))).numpy()  # type: ignore[arg-type]
    assert figures["test_calibration"] == pytest.approx(predicted.sum() / labels.sum(), rel=1e-4)
    regression = StreamedLogisticRegression(SIMPLE)
    for _ in range(2):
        for batch in TRAIN:
            regression.update(batch)
    baseline = torch.cat([regression.logits(batch).sigmoid() for batch in TEST]).numpy()
    assert figures["test_baseline_auc"] == pytest.approx(roc_auc_score(labels, baseline), abs=1e-6)
    assert figures["test_baseline_logloss"] == pytest.approx(log_loss(labels, baseline), rel=1e-4)
    assert (tmp_path / "calibration.png").stat().st_size > 5000
    assert json.loads((tmp_path / "summary.json").read_text()).items() >= figures.items()

    alone = make_trainer(tmp_path, callbacks=[Worth()])
    assert alone.test(make_task(), loader(TEST), ckpt_path=saved.best_model_path, verbose=False) == [figures]


def test_a_model_below_a_baseline_is_told_of(tmp_path: Path) -> None:
    task = make_task()
    task.connect(LocalStore(), CacheConfig(rows=256), EmbeddingOptimizer("sgd", lr=0.0))
    task.optimize_with(lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    trainer = make_trainer(tmp_path, callbacks=[Worth()])
    trainer.fit(task, loader(TRAIN))
    with pytest.warns(
        UserWarning, match=r"below a baseline: .*test_logloss is 0\.\d+, and 0\.\d+ for answering the share"
    ):
        trainer.test(task, loader(TEST), verbose=False)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_test_of_one_label(tmp_path: Path, value: float) -> None:
    def labelled(batches: list[Any]) -> list[Any]:
        return [Batch(b.dense_features, b.sparse_features, torch.full_like(b.labels, value)) for b in batches]

    task = make_task()
    trainer = make_trainer(tmp_path, callbacks=[Worth()])
    trainer.fit(task, loader(labelled(TRAIN)))
    (figures,) = trainer.test(task, loader(labelled(TEST)), verbose=False)
    assert ("test_calibration" in figures) == (value == 1.0)
    assert figures["test_base_rate_logloss"] == pytest.approx(0.0, abs=1e-5)
    assert (tmp_path / "calibration.png").is_file()
