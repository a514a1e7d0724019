"""Synthetic rows: shape, skew, the hidden model and its best scores, and what is kept on disk."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score

from datamodules.atomic import read_manifest
from datamodules.criteo_layout import CATEGORICAL, INTEGERS, kaggle_cardinalities
from datamodules.errors import DataError
from datamodules.files import list_parquet
from datamodules.synthetic import SyntheticDataModule
from datamodules.synthetic_rows import CHUNK_ROWS, SyntheticRows, write_synthetic

REPOSITORY = Path(__file__).resolve().parents[2]


def all_rows(rows: SyntheticRows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """True logits, labels and keys."""
    logits, labels, keys = [], [], []
    for chunk in range(-(-rows.rows // CHUNK_ROWS)):
        count = min(CHUNK_ROWS, rows.rows - chunk * CHUNK_ROWS)
        integers, key = rows.features(chunk, count)
        logits.append(rows.hidden.logits(integers, key))
        labels.append(rows.labels(chunk, logits[-1]))
        keys.append(key)
    return np.concatenate(logits), np.concatenate(labels), np.concatenate(keys)


@pytest.mark.parametrize("scale", [0.001, 1.0])
def test_the_rows_have_criteo_s_shape(tmp_path: Path, scale: float) -> None:
    rows = SyntheticRows(rows=20_000, scale=scale, skew=1.1, seed=0)
    manifest = write_synthetic(rows, tmp_path / "set")
    table = pq.read_table(list_parquet(tmp_path / "set"))
    assert table.column_names == ["label", *INTEGERS, *CATEGORICAL]
    assert table.num_rows == 20_000
    assert 0.22 < np.mean(table["label"].to_numpy()) < 0.29
    assert manifest["cardinalities"] == [max(min(c, 10), round(c * scale)) for c in kaggle_cardinalities]
    for name, size in zip(CATEGORICAL, manifest["cardinalities"], strict=True):
        values = table[name].drop_null().to_numpy()
        assert 0 <= values.min() <= values.max() < size
    missing = {name: table[name].null_count / 20_000 for name in table.column_names}
    assert missing["label"] == 0
    assert missing["C22"] == pytest.approx(0.76, abs=0.02)
    assert missing["I12"] == pytest.approx(0.76, abs=0.02)
    assert missing["I2"] == 0
    assert table["I2"].to_numpy().min() == -2


def test_keys_follow_zipf_s_law() -> None:
    rows = SyntheticRows(rows=1, scale=1.0, skew=1.1, seed=0)
    _, keys = rows.features(0, 200_000)
    for column in (2, 11, 20):  # millions of keys
        size, exponent = rows.cardinalities[column], rows.exponents[column]
        real = keys[keys[:, column] < size, column]
        counts = np.sort(np.unique(real, return_counts=True)[1])[::-1]
        k = np.arange(1, size + 2, dtype=np.float64) ** (1 - exponent)  # the law's share between ranks
        share = (k[:-1] - k[1:]) / (1 - k[-1])
        assert counts[:20] / len(real) == pytest.approx(share[:20], rel=0.2)
    assert len(set(rows.exponents)) == 26


@pytest.mark.parametrize("seed", [0, 1])
def test_the_best_scores_are_those_of_the_true_probabilities(tmp_path: Path, seed: int) -> None:
    rows = SyntheticRows(rows=40_000, scale=0.01, skew=1.1, seed=seed)
    manifest = write_synthetic(rows, tmp_path / "set")
    logits, labels, _ = all_rows(rows)
    assert (labels == pq.read_table(list_parquet(tmp_path / "set"))["label"].to_numpy()).all()
    assert manifest["best_auc"] == pytest.approx(roc_auc_score(labels, logits), abs=1e-4)
    assert manifest["best_logloss"] == pytest.approx(log_loss(labels, 1 / (1 + np.exp(-logits))), abs=1e-6)
    assert manifest["click_rate"] == pytest.approx(labels.mean())
    assert 0.77 < manifest["best_auc"] < 0.85
    # Labels are drawn with these probabilities: in every tenth of the rows their mean is that of the probabilities.
    order = np.argsort(logits).reshape(10, -1)
    probability = 1 / (1 + np.exp(-logits))
    assert labels[order].mean(axis=1) == pytest.approx(probability[order].mean(axis=1), abs=0.025)


def test_keys_that_are_paired_matter_beyond_their_own_weights() -> None:
    """The hidden model is a factorization machine: its logits are no sum over columns."""
    rows = SyntheticRows(rows=1, scale=0.01, skew=1.1, seed=0)
    integers, keys = rows.features(0, 2)
    a, b = keys[0], keys[1].copy()
    corners = [
        a,
        np.where(np.arange(26) == 0, b, a),
        np.where(np.arange(26) == 1, b, a),
        np.where(np.arange(26) < 2, b, a),
    ]
    logits = rows.hidden.logits(np.repeat(integers[:1], 4, axis=0), np.stack(corners))
    assert abs(logits[0] - logits[1] - logits[2] + logits[3]) > 1e-3


def test_a_simple_model_learns_the_signal(tmp_path: Path) -> None:
    """A logistic regression on 26 hashed columns, plain PyTorch, one pass."""
    data = SyntheticDataModule(str(tmp_path), rows=100_000, batch_size=512, val_fraction=0)
    data.prepare_data()
    data.setup("fit")
    torch.manual_seed(0)
    weights = torch.zeros(26, 1 << 14, requires_grad=True)
    dense = torch.zeros(13, requires_grad=True)
    optimizer = torch.optim.Adagrad([weights, dense], 0.05)

    def logits(batch: Any) -> torch.Tensor:
        keys = batch.sparse_features.values().view(26, -1) % (1 << 14)
        return weights.gather(1, keys).sum(0) + batch.dense_features @ dense

    for batch in data.train_dataloader():
        optimizer.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(logits(batch), batch.labels).backward()
        optimizer.step()
    test = list(data.test_dataloader())
    with torch.no_grad():
        auc = roc_auc_score(torch.cat([b.labels for b in test]), torch.cat([logits(b) for b in test]))
    assert 0.66 < auc < data.manifest["best_auc"]


def test_rows_are_a_function_of_their_parameters(tmp_path: Path) -> None:
    base = SyntheticRows(rows=2000, scale=0.01, skew=1.1, seed=0)
    write_synthetic(base, tmp_path / "a")
    write_synthetic(base, tmp_path / "b")
    first = pq.read_table(list_parquet(tmp_path / "a"))
    assert first.equals(pq.read_table(list_parquet(tmp_path / "b")))
    write_synthetic(SyntheticRows(rows=2000, scale=0.01, skew=1.1, seed=1), tmp_path / "c")
    other = pq.read_table(list_parquet(tmp_path / "c"))
    assert not first["label"].equals(other["label"])
    assert not first["C3"].equals(other["C3"])


def test_a_set_is_made_once_and_kept_while_its_parameters_match(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def prepare(**options: Any) -> SyntheticDataModule:
        data = SyntheticDataModule(str(tmp_path), rows=3000, batch_size=500, **options)
        data.prepare_data()
        data.setup("fit")
        return data

    first = prepare()
    shown = capfd.readouterr().err
    assert "3000/3000 rows" in shown
    assert f"best reachable AUC is {first.manifest['best_auc']:.4f}" in shown.replace("\n", " ")
    made = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.parquet")}
    again = prepare(seed=5)
    shown = capfd.readouterr().err
    assert "rows 0:" not in shown
    assert "best reachable AUC" in shown
    assert again.folder == first.folder
    other = prepare(rows_seed=1)
    assert other.folder != first.folder
    assert {p: p.stat().st_mtime_ns for p in made} == made


def test_the_tables_have_their_sizes_and_missing_is_the_last_row(tmp_path: Path) -> None:
    data = SyntheticDataModule(str(tmp_path), rows=5000, scale=0.001, val_fraction=0, test_fraction=0)
    assert not list(tmp_path.iterdir())  # the spec costs nothing
    sizes = [t.num_embeddings for t in data.spec.tables]
    assert sizes == [c + 1 for c in data.rows.cardinalities]
    data.setup("fit")
    keys = torch.cat([b.sparse_features.values().view(26, -1) for b in data.train_dataloader()], dim=1)
    for row, size in zip(keys, sizes, strict=True):
        assert 0 <= int(row.min()) <= int(row.max()) < size
    assert (keys[21] == sizes[21] - 1).float().mean() == pytest.approx(0.76, abs=0.03)
    batch = next(iter(data.train_dataloader()))
    assert batch.dense_features.shape == (64, 13)  # as suits 5,000 rows
    assert torch.isfinite(batch.dense_features).all()


def test_a_generation_that_was_killed_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(REPOSITORY)!r})
from pathlib import Path
from datamodules.synthetic_rows import SyntheticRows, write_synthetic
write_synthetic(SyntheticRows(rows=10_000_000, scale=0.01, skew=1.1, seed=0), Path({str(tmp_path / "set")!r}))
"""
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    work = tmp_path / ".set.partial"
    while not list(work.glob("*.parquet")):
        assert process.poll() is None
    process.kill()
    process.wait(30)
    assert not (tmp_path / "set").exists()
    assert read_manifest(tmp_path / "set") is None
    rows = SyntheticRows(rows=1000, scale=0.01, skew=1.1, seed=0)
    assert write_synthetic(rows, tmp_path / "set")["parameters"]["rows"] == 1000
    assert pq.read_table(list_parquet(tmp_path / "set")).num_rows == 1000
    assert json.loads((tmp_path / "set" / "_manifest.json").read_text())["best_auc"] > 0.7


@pytest.mark.parametrize("option", ["rows", "scale", "skew"])
def test_wrong_parameters_are_named(option: str) -> None:
    with pytest.raises(DataError, match=rf"data\.{option}=0; expected a number above 0"):
        SyntheticDataModule(**{option: 0})
