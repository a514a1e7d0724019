"""AUC and log loss over a whole evaluation, against scikit-learn; speed and traffic of training."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score, log_loss, roc_auc_score

from cache_backend import CacheStats
from hetrec.metrics import CTRMetrics, NodeMetrics, TrainingMeter


def test_whole_epoch_not_the_mean_of_batches() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1000, generator=generator)
    labels = (torch.rand(1000, generator=generator) < torch.sigmoid(logits)).float()
    order = labels.argsort()  # batches of one class, and one of both
    metrics = CTRMetrics()
    for rows in order.split(300):
        metrics.update(logits[rows], labels[rows])
    figures = metrics.compute_and_reset()
    probabilities = torch.sigmoid(logits).double().numpy()
    assert figures["auc"] == pytest.approx(roc_auc_score(labels.numpy(), probabilities), abs=1e-6)
    assert figures["logloss"] == pytest.approx(log_loss(labels.numpy(), probabilities), abs=1e-6)


def test_ties_count_half() -> None:
    metrics = CTRMetrics()
    metrics.update(torch.tensor([0.0, 0.0, 0.0, 1.0]), torch.tensor([0.0, 1.0, 1.0, 1.0]))
    assert metrics.compute_and_reset()["auc"] == pytest.approx((0.5 + 0.5 + 1) / 3)


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_one_class_has_no_auc_but_a_log_loss(label: float) -> None:
    metrics = CTRMetrics()
    metrics.update(torch.tensor([0.0, 0.0]), torch.full((2,), label))
    figures = metrics.compute_and_reset()
    assert math.isnan(figures["auc"])
    assert figures["logloss"] == pytest.approx(math.log(2))


def test_two_clicks_in_a_thousand_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50_000, generator=generator) - 6
    labels = (torch.rand(50_000, generator=generator) < 0.002 * torch.exp(logits + 6).clamp(max=5)).float()
    assert 50 < labels.sum() < 300
    metrics = CTRMetrics()
    for rows in torch.arange(50_000).split(512):  # most batches hold no click
        metrics.update(logits[rows], labels[rows])
    figures = metrics.compute_and_reset()
    probabilities = torch.sigmoid(logits).double().numpy()
    assert figures["auc"] == pytest.approx(roc_auc_score(labels.numpy(), probabilities), abs=1e-5)
    assert figures["logloss"] == pytest.approx(log_loss(labels.numpy(), probabilities), abs=1e-6)


def test_soft_labels_count_as_the_nearer_class_in_the_auc_and_as_they_are_in_the_loss() -> None:
    logits, labels = torch.tensor([2.0, -1.0, 0.5, 1.0]), torch.tensor([0.9, 0.1, 0.5, 0.3])
    metrics = CTRMetrics()
    metrics.update(logits, labels)
    figures = metrics.compute_and_reset()
    assert figures["auc"] == pytest.approx(roc_auc_score([1, 0, 1, 0], logits.numpy()))
    p, y = torch.sigmoid(logits).double(), labels.double()
    assert figures["logloss"] == pytest.approx(float(-(y * p.log() + (1 - y) * (1 - p).log()).mean()), abs=1e-6)


def test_empty_batches_change_nothing_and_a_reset_forgets() -> None:
    metrics = CTRMetrics()
    metrics.update(torch.tensor([9.0, 9.0]), torch.tensor([0.0, 1.0]))
    metrics.compute_and_reset()
    metrics.update(torch.tensor([-1.0, 1.0]), torch.tensor([0.0, 1.0]))
    metrics.update(torch.zeros(0), torch.zeros(0))
    assert metrics.compute_and_reset() == {"auc": 1.0, "logloss": pytest.approx(math.log(1 + math.exp(-1)))}


def test_node_metrics_agree_with_sklearn() -> None:
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(300, 4)), rng.integers(0, 4, 300)
    labels[labels == 3] = 1  # a class that never occurs
    metrics = NodeMetrics(4)
    for part in np.array_split(np.arange(300), 7):
        metrics.update(torch.tensor(logits[part]), torch.tensor(labels[part]))
    metrics.update(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))
    found, predicted = metrics.compute_and_reset(), logits.argmax(1)
    assert found["accuracy"] == pytest.approx(accuracy_score(labels, predicted))
    assert found["macro_f1"] == pytest.approx(f1_score(labels, predicted, average="macro", zero_division=0))
    assert all(math.isnan(value) for value in metrics.compute_and_reset().values())


def test_a_loss_that_is_not_a_number_shows() -> None:
    metrics = CTRMetrics()
    metrics.update(torch.tensor([math.nan, 1.0]), torch.tensor([0.0, 1.0]))
    assert math.isnan(metrics.compute_and_reset()["logloss"])


def test_rates_are_of_the_window_and_row_counts_since_the_start() -> None:
    stats = CacheStats()
    meter = TrainingMeter(lambda: CacheStats() + stats, lambda values: values)
    meter.resume()
    stats.steps, stats.unique, stats.hits, stats.fetched, stats.bytes_sent = 2, 100, 50, 50, 2000
    meter.add(64)
    first = meter.window()
    stats.steps, stats.unique, stats.hits, stats.fetched, stats.bytes_received = 3, 200, 140, 60, 500
    second, total = meter.window(), meter.total()
    assert (first["hit_rate"], first["rows_fetched"], first["bytes_per_step"]) == (0.5, 50, 1000)
    assert (second["hit_rate"], second["rows_fetched"], second["bytes_per_step"]) == (0.9, 60, 500)
    assert (total["hit_rate"], total["rows_fetched"]) == (0.7, 60)
    assert total["bytes_per_step"] == pytest.approx(2500 / 3)
    assert first["samples_per_s"] > 0
    assert second["samples_per_s"] == 0


def test_ranks_add_up() -> None:
    stats = CacheStats()
    meter = TrainingMeter(lambda: CacheStats() + stats, lambda values: values * 4)  # four ranks, all alike
    one = TrainingMeter(lambda: CacheStats() + stats, lambda values: values)
    stats.steps, stats.unique, stats.hits, stats.pushed, stats.bytes_sent = 2, 100, 50, 7, 600
    for m in (meter, one):
        m._seconds = 2.0  # no clock in tests
        m.add(1000)
    figures = meter.total()
    assert figures["samples_per_s"] == pytest.approx(4 * one.total()["samples_per_s"])
    assert figures["samples_per_s"] == pytest.approx(2000)
    assert (figures["hit_rate"], figures["rows_pushed"], figures["bytes_per_step"]) == (0.5, 28, 300)


def test_staleness_quantiles_are_the_ends_of_their_bins() -> None:
    stats = CacheStats()
    meter = TrainingMeter(lambda: CacheStats() + stats, lambda values: values * 2)
    assert "staleness_p50" not in meter.total()
    stats.lags.update({0: 60, 3: 39, 7: 1})  # lags of 0, 4 to 7, 64 to 127
    figures = meter.total()
    assert (figures["staleness_p50"], figures["staleness_p99"]) == (0, 7)
    assert meter.lags() == [120, 0, 0, 78, 0, 0, 0, 2] + [0] * 10
    meter.window()
    stats.lags.update({7: 5})
    assert meter.window()["staleness_p50"] == 127


def test_the_share_of_time_that_steps_waited() -> None:
    stats = CacheStats()
    meter = TrainingMeter(lambda: CacheStats() + stats, lambda values: values * 2)
    meter._seconds = 4.0  # no clock in tests
    stats.wait_s = 1.0
    assert meter.total()["exchange_wait"] == pytest.approx(0.25)


def test_auc_of_many_random_samples_agrees_with_sklearn() -> None:
    rng = np.random.default_rng(0)
    for size in (2, 10, 333):
        probabilities = rng.integers(0, 20, size) / 20  # many ties
        labels = np.arange(size) % 2
        metrics = CTRMetrics()
        metrics.update(torch.logit(torch.tensor(probabilities), eps=1e-3), torch.tensor(labels, dtype=torch.float64))
        clipped = np.clip(probabilities, 1e-3, 1 - 1e-3)
        assert metrics.compute_and_reset()["auc"] == pytest.approx(roc_auc_score(labels, clipped), abs=1e-6)
