"""Rows of one label only: a validation whose AUC is undefined chooses by log loss, and a line says so."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hetrec.cli import main

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SMALL = ("model=deepfm", "model.mlp_sizes=[8]", "model.embedding_dim=4", "trainer.enable_progress_bar=false")


def write(path: Path, rows: int, labels: list[int | None]) -> None:
    """Ids with gaps, so floats, and labels in turn."""
    random = np.random.default_rng(rows)
    users = pa.array(random.integers(0, 20, rows).astype(float), mask=random.random(rows) < 0.1)
    drawn = [labels[i] for i in random.integers(0, len(labels), rows)]
    pq.write_table(pa.table({"clicked": pa.array(drawn, pa.int8()), "user": users}), path)


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_validation_without_a_click(recwarn: pytest.WarningsRecorder) -> None:
    """Labels -1, 1 and null; the learning rate is far too high, so the first epoch is not the best one."""
    write(Path("train.parquet"), 600, [-1, 1, None])
    write(Path("val.parquet"), 100, [-1, None])
    words = ("data=parquet", "data.path=train.parquet", "data.val_path=val.parquet", "data.label=clicked")
    labels = ("data.sparse=[user]", "data.negative_label=-1", "data.null_label=0", "data.test_fraction=0")
    stop = ("trainer.callbacks+=EarlyStopping", "trainer.callbacks.monitor=val_auc", "trainer.callbacks.mode=max")
    rates = ("optimizer.lr=0.5", "trainer.max_epochs=6", "data.batch_size=300")
    assert main(CONFIGS, [*SMALL, *words, *labels, *rates, *stop]) == 0

    said = [str(warning.message) for warning in recwarn]
    assert "val_auc is undefined (nan): the val rows do not hold both labels, 0 and 1" in said
    assert "without val_auc, the epoch with the least val_logloss is the best checkpoint" in said
    assert sum("early stopping counts an undefined val_auc as no improvement" in line for line in said) == 1
    (folder,) = Path("runs").iterdir()
    with (folder / "metrics.csv").open() as file:
        losses = {
            int(line["epoch"]): float(line["val_logloss"]) for line in csv.DictReader(file) if line["val_logloss"]
        }
    assert len(losses) == 3  # epochs: the patience of early stopping
    best = min(losses, key=losses.__getitem__)
    assert best > 0
    assert torch.load(folder / "checkpoints" / "best.ckpt", weights_only=True)["epoch"] == best
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["val_auc"] is None
    assert summary["val_logloss"] == pytest.approx(losses[2], rel=1e-4)


def test_training_rows_of_one_label_are_said_once(recwarn: pytest.WarningsRecorder) -> None:
    write(Path("train.parquet"), 300, [1])
    words = ("data=parquet", "data.path=train.parquet", "data.label=clicked", "data.sparse=[user]")
    assert main(CONFIGS, [*SMALL, *words, "data.val_fraction=0", "data.test_fraction=0", "trainer.max_epochs=2"]) == 0
    said = [str(warning.message) for warning in recwarn]
    assert sum("all 300 training rows have the label 1" in line and "'clicked'" in line for line in said) == 1


def test_labels_that_an_option_reads_are_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    for labels, option in (([-1, 1], "data.negative_label=-1"), ([0, 1, None], "data.null_label=0")):
        write(Path("train.parquet"), 100, labels)
        words = ("data=parquet", "data.path=train.parquet", "data.label=clicked", "data.sparse=[user]")
        assert main(CONFIGS, [*SMALL, *words]) == 1
        error = capfd.readouterr().err.splitlines()[-1]
        assert error.startswith("error: train.parquet: label column 'clicked' holds ")
        assert option in error
    assert not list(Path("runs").glob("*/checkpoints"))
