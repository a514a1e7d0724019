"""The run's summary and the predictions file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from pytorch_lightning import seed_everything
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cache_backend import CacheConfig, EmbeddingOptimizer, LocalStore
from hetrec.callbacks import ObservedStaleness, PredictionWriter, RunSummary
from hetrec.callbacks.staleness import staleness_figure
from models.wdl import WDL
from tests.models.ctr import SIMPLE, loader, make_batches, make_trainer

TRAIN = make_batches(SIMPLE, 6)
TEST = make_batches(SIMPLE, 3, seed=1)
FIT_KEYS = {
    "val_auc", "val_logloss", "samples_per_s", "hit_rate", "rows_fetched", "rows_pushed", "rows_evicted",
    "bytes_per_step", "epochs", "steps", "exchange_wait", "rows_refreshed", "rows_bypassed", "rows_overflowed",
    "rows_nonfinite",
}  # fmt: skip


def make_task() -> WDL:
    seed_everything(0, verbose=False)
    task = WDL(SIMPLE, embedding_dim=4, mlp_sizes=(8,))
    task.connect(LocalStore(), CacheConfig(rows=64), EmbeddingOptimizer(lr=0.1))
    return task


def test_fit_then_test_write_one_summary_in_the_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(tmp_path, logger=CSVLogger(tmp_path), callbacks=[RunSummary()], max_epochs=2)
    folder = Path(trainer.log_dir or "")
    task = make_task()
    trainer.fit(task, loader(TRAIN), loader(TEST))
    written = json.loads((folder / "summary.json").read_text())
    assert written.keys() == FIT_KEYS
    assert written["val_auc"] == pytest.approx(float(trainer.callback_metrics["val_auc"]))
    assert (written["epochs"], written["steps"]) == (2, 12)
    assert isinstance(written["rows_fetched"], int)
    assert 0 < written["hit_rate"] < 1
    assert str(folder) in capsys.readouterr().out.replace("\n", "")

    (figures,) = trainer.test(task, loader(TEST), verbose=False)
    both = json.loads((folder / "summary.json").read_text())
    assert both.keys() == FIT_KEYS | {"test_auc", "test_logloss"}
    assert both["test_auc"] == pytest.approx(figures["test_auc"])
    assert {key: both[key] for key in FIT_KEYS} == written
    assert "test_auc" in capsys.readouterr().out


def test_a_test_alone_has_a_summary(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, callbacks=[RunSummary()])
    trainer.test(make_task(), loader(TEST), verbose=False)
    assert json.loads((tmp_path / "summary.json").read_text()).keys() == {"test_auc", "test_logloss"}


def test_a_second_fit_does_not_show_the_first_ones_test(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, callbacks=[RunSummary()])
    task = make_task()
    trainer.fit(task, loader(TRAIN), loader(TEST))
    trainer.test(task, loader(TEST), verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(task, loader(TRAIN), loader(TEST))
    assert "test_auc" not in json.loads((tmp_path / "summary.json").read_text())


def test_an_undefined_auc_is_null(tmp_path: Path) -> None:
    batches = make_batches(SIMPLE, 1)
    batches[0].labels.fill_(1.0)
    with pytest.warns(UserWarning, match="test_auc is undefined"):
        make_trainer(tmp_path, callbacks=[RunSummary()]).test(make_task(), loader(batches), verbose=False)
    assert json.loads((tmp_path / "summary.json").read_text())["test_auc"] is None


def test_predictions_are_a_parquet_file_in_the_order_of_the_rows(tmp_path: Path) -> None:
    task = make_task()
    trainer = make_trainer(tmp_path, callbacks=[PredictionWriter()])
    trainer.fit(task, loader(TRAIN))
    predicted: Any = trainer.predict(task, loader(TEST))
    table = pq.read_table(tmp_path / "predictions.parquet")
    assert table.column_names == ["probability"]
    assert torch.equal(torch.tensor(table["probability"].to_numpy()), torch.cat(predicted))
    assert table.num_rows == 96
    assert 0 < table["probability"].to_numpy().min() < table["probability"].to_numpy().max() < 1


def test_observed_staleness_is_drawn_where_ranks_share_the_store(tmp_path: Path) -> None:
    for store, drawn in ((LocalStore(), False), (LocalStore(exclusive=False), True)):
        folder = tmp_path / str(drawn)
        trainer = make_trainer(folder, logger=TensorBoardLogger(folder), callbacks=[ObservedStaleness(), RunSummary()])
        seed_everything(0, verbose=False)
        task = WDL(SIMPLE, embedding_dim=4, mlp_sizes=(8,))
        task.connect(store, CacheConfig(rows=64), EmbeddingOptimizer(lr=0.1))
        trainer.fit(task, loader(TRAIN))
        run = Path(trainer.log_dir or "")
        assert (run / "staleness.png").exists() == drawn
        figures = json.loads((run / "summary.json").read_text())
        assert ("staleness_p99" in figures) == drawn
        if drawn:
            assert figures["staleness_p99"] == 0  # nobody else writes
            events = EventAccumulator(str(run))
            events.Reload()
            assert "observed staleness" in events.Tags()["images"]


@pytest.mark.parametrize(("staleness", "at"), [(0, 0.5), (1, 1.5), (2, 2.0), (3, 2.5), (100, 6.5 + 37 / 64)])
def test_the_bound_stands_behind_the_lags_it_allows(staleness: int, at: float) -> None:
    """Bin i reaches from i - 0.5 to i + 0.5 and holds the lags of i binary digits: 2 and 3 share bin 2."""
    (axes,) = staleness_figure([8, 1, 0, 1] + [0] * 14, staleness).axes
    assert [bar.get_height() for bar in axes.containers[0]] == [80, 10, 0, 10]
    (line,) = axes.lines
    assert line.get_xdata()[0] == pytest.approx(at)
