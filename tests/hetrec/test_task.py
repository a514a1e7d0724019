"""The task under a real trainer: what moves the rows, what must not, and what is logged."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback, Trainer, seed_everything
from pytorch_lightning.cli import ReduceLROnPlateau
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.plugins.precision import MixedPrecision
from sklearn.metrics import log_loss, roc_auc_score
from torch import Tensor
from torch.optim import SGD, Adagrad
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from cache_backend import CacheConfig, EmbeddingOptimizer, LocalStore
from hetrec.data import Batch
from models.dcn import DCN
from models.deepfm import DeepFM
from models.wdl import WDL
from tests.models.ctr import (
    BAGS,
    SIMPLE,
    WEIGHTED,
    concatenate,
    initial_rows,
    keys_of,
    loader,
    make_batches,
    make_trainer,
)

SGD_ROWS = EmbeddingOptimizer("sgd", lr=0.5)


def make_task(
    rows: EmbeddingOptimizer = SGD_ROWS, cache: CacheConfig | None = None, lr: float = 0.1, **settings: Any
) -> tuple[DeepFM, LocalStore]:
    seed_everything(0, verbose=False)
    task, store = DeepFM(SIMPLE, embedding_dim=4, mlp_sizes=(8,), row_init=0.1), LocalStore()
    task.connect(store, cache or CacheConfig(rows=256), rows, seed=5)
    task.optimize_with(lambda parameters: SGD(parameters, lr=lr), **settings)
    return task, store


def rows_of(task: DeepFM, batches: list[Batch]) -> Tensor:
    """Weights of all rows that the batches touch, from the store that the task was connected to."""
    task.embeddings.open(task._store, task._cache, task._row_optimizer, seed=task._seed)
    rows = torch.cat(initial_rows(task, keys_of(task, batches)))
    task.embeddings.close()
    return rows


def dense_of(task: DeepFM) -> Tensor:
    return torch.cat([p.detach().flatten() for p in task.parameters()])


def test_a_learning_rate_of_zero_at_the_first_step_leaves_rows_and_dense_parameters(tmp_path: Path) -> None:
    batches = make_batches(SIMPLE, 1)
    schedule = {"lr_scheduler": lambda optimizer: LambdaLR(optimizer, lambda epoch: float(epoch > 0))}
    task, _ = make_task(**schedule)
    rows, dense = rows_of(task, batches), dense_of(task)
    make_trainer(tmp_path, max_epochs=1).fit(task, loader(batches))
    torch.testing.assert_close(rows_of(task, batches), rows, rtol=0, atol=0)
    torch.testing.assert_close(dense_of(task), dense, rtol=0, atol=0)

    task, _ = make_task(**schedule)
    make_trainer(tmp_path, max_epochs=2).fit(task, loader(batches))
    assert (rows_of(task, batches) - rows).abs().max() > 1e-4
    assert (dense_of(task) - dense).abs().max() > 1e-4


def test_a_plateau_schedule_lowers_both_learning_rates(tmp_path: Path) -> None:
    batches = make_batches(SIMPLE, 2)
    task, _ = make_task(
        lr_scheduler=lambda optimizer: ReduceLROnPlateau(
            optimizer, monitor="val_auc", mode="min", patience=0, factor=0.5
        )
    )
    trainer = make_trainer(tmp_path, max_epochs=5)
    trainer.fit(task, loader(batches), loader(make_batches(SIMPLE, 2, seed=9)))
    dense, rows = trainer.optimizers[0].param_groups
    assert dense["lr"] < 0.1
    assert rows["lr"] / dense["lr"] == pytest.approx(5)


@pytest.mark.parametrize("rows", [SGD_ROWS, EmbeddingOptimizer("adagrad", lr=0.1), EmbeddingOptimizer(lr=0.1)])
def test_accumulated_batches_equal_one_big_batch(tmp_path: Path, rows: EmbeddingOptimizer) -> None:
    small = make_batches(SIMPLE, 12, batch_size=16)
    big = [concatenate(SIMPLE, small[i : i + 3]) for i in range(0, 12, 3)]
    accumulated, _ = make_task(rows)
    make_trainer(tmp_path, accumulate_grad_batches=3).fit(accumulated, loader(small))
    at_once, _ = make_task(rows)
    make_trainer(tmp_path).fit(at_once, loader(big))
    torch.testing.assert_close(rows_of(accumulated, small), rows_of(at_once, small), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dense_of(accumulated), dense_of(at_once), rtol=1e-4, atol=1e-5)


def test_a_last_window_that_is_not_full_still_steps(tmp_path: Path) -> None:
    batches = make_batches(SIMPLE, 5)
    task, _ = make_task()
    trainer = make_trainer(tmp_path, accumulate_grad_batches=3)
    before = rows_of(task, batches[3:])
    trainer.fit(task, loader(batches))
    assert trainer.global_step == 2
    assert ((rows_of(task, batches[3:]) - before).abs().amax(1) > 0).float().mean() > 0.9


@pytest.mark.parametrize("cache", [CacheConfig(rows=32), CacheConfig(rows=256, staleness=0)])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_cache_size_staleness_and_lookahead_change_nothing(tmp_path: Path, cache: CacheConfig, depth: int) -> None:
    batches = make_batches(SIMPLE, 10)
    reference, _ = make_task(cache=CacheConfig(rows=1024))
    make_trainer(tmp_path).fit(reference, loader(batches))
    task, _ = make_task(cache=cache)
    make_trainer(tmp_path).fit(task, loader(batches, depth) if depth else DataLoader(batches, batch_size=None))
    torch.testing.assert_close(rows_of(task, batches), rows_of(reference, batches), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dense_of(task), dense_of(reference), rtol=1e-5, atol=1e-6)


def test_the_same_seed_gives_the_same_run_bit_for_bit(tmp_path: Path) -> None:
    batches = make_batches(SIMPLE, 10)
    runs = []
    for _ in range(2):
        task, _ = make_task(EmbeddingOptimizer(lr=0.1), CacheConfig(rows=64, staleness=2))
        make_trainer(tmp_path, max_epochs=2).fit(task, loader(batches), loader(make_batches(SIMPLE, 2, seed=3)))
        runs.append((rows_of(task, batches), dense_of(task)))
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])


def test_evaluation_with_unseen_keys_changes_nothing(tmp_path: Path) -> None:
    train = make_batches(SIMPLE, 6)
    unseen = make_batches(SIMPLE, 3, seed=7)
    for batch in unseen:
        batch.sparse_features["c0"].values().add_(1_000_000)  # the table without a size

    task, store = make_task()
    seen: list[tuple[int, int, int]] = []

    def look() -> None:
        stats = task.embeddings.stats()
        seen.append((store.stats().rows, stats.lookups, stats.evicted))

    start, end = task.on_validation_start, task.on_validation_end

    def on_validation_start() -> None:
        start()
        look()

    def on_validation_end() -> None:
        look()
        end()

    task.on_validation_start, task.on_validation_end = on_validation_start, on_validation_end  # type: ignore[method-assign]
    make_trainer(tmp_path, val_check_interval=2).fit(task, loader(train), loader(unseen))
    assert len(seen) == 6
    assert all(before == after for before, after in zip(seen[::2], seen[1::2], strict=True))

    quiet, _ = make_task()
    make_trainer(tmp_path).fit(quiet, loader(train))
    torch.testing.assert_close(rows_of(task, train), rows_of(quiet, train), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dense_of(task), dense_of(quiet), rtol=1e-5, atol=1e-6)


def test_the_sanity_check_before_training_changes_nothing(tmp_path: Path) -> None:
    batches = make_batches(SIMPLE, 4)
    results = []
    for checks in (0, 2):
        task, _ = make_task()
        make_trainer(tmp_path, num_sanity_val_steps=checks).fit(task, loader(batches), loader(batches))
        results.append(rows_of(task, batches))
    assert torch.equal(*results)


def scaled(folder: Path, **settings: Any) -> Trainer:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=1000)
    return make_trainer(folder, plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)], **settings)


def test_loss_scaling_does_not_scale_what_the_rows_learn(tmp_path: Path) -> None:
    batches = make_batches(SIMPLE, 4)
    start = rows_of(make_task()[0], batches)
    plain, _ = make_task()
    make_trainer(tmp_path).fit(plain, loader(batches))
    half, _ = make_task()
    scaled(tmp_path).fit(half, loader(batches))
    moved, expected = rows_of(half, batches) - start, rows_of(plain, batches) - start
    assert float((moved - expected).norm() / expected.norm()) < 0.01  # fp16 carries 11 bits


def test_a_step_that_the_scaler_skips_moves_no_row_and_the_next_one_does(tmp_path: Path) -> None:
    good = make_batches(SIMPLE, 2)
    bad = make_batches(SIMPLE, 1, seed=8)[0]
    bad.dense_features.fill_(1e30)  # infinite in fp16
    task, _ = make_task()
    start, dense = rows_of(task, [*good, bad]), dense_of(task)
    scaled(tmp_path).fit(task, loader([bad]))
    assert torch.equal(rows_of(task, [*good, bad]), start)
    assert torch.equal(dense_of(task), dense)

    scaled(tmp_path).fit(task, loader([bad, *good]))
    trained = rows_of(task, [*good, bad])
    expected, _ = make_task()
    scaled(tmp_path).fit(expected, loader(good))
    assert (trained - start).abs().max() > 1e-4
    torch.testing.assert_close(trained, rows_of(expected, [*good, bad]), rtol=1e-2, atol=1e-4)


def test_clipping_clips_the_dense_parameters_only(tmp_path: Path) -> None:
    batches = make_batches(SIMPLE, 1)
    moves = []
    for clip in (None, 1e-6):
        task, _ = make_task()
        rows, dense = rows_of(task, batches), dense_of(task)
        make_trainer(tmp_path, gradient_clip_val=clip).fit(task, loader(batches))
        moves.append((rows_of(task, batches) - rows, dense_of(task) - dense))
    torch.testing.assert_close(moves[0][0], moves[1][0])
    assert float(moves[1][1].norm()) < 1e-6 < float(moves[0][1].norm())


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true"])
@pytest.mark.parametrize("model", [WDL, DeepFM, DCN])
def test_every_model_learns_under_every_precision(tmp_path: Path, model: Any, precision: Any) -> None:
    seed_everything(0, verbose=False)
    task = model(SIMPLE, embedding_dim=8, mlp_sizes=(16,))
    task.connect(optimizer=EmbeddingOptimizer(lr=0.1))
    trainer = make_trainer(tmp_path, max_epochs=4, precision=precision)
    trainer.fit(task, loader(make_batches(SIMPLE, 30)))
    (figures,) = trainer.test(task, loader(make_batches(SIMPLE, 10, seed=1)), verbose=False)
    assert figures["test_auc"] > 0.65


@pytest.mark.parametrize(("spec", "longest_bag"), [(BAGS, 4), (WEIGHTED, 3)])
@pytest.mark.parametrize("model", [WDL, DeepFM, DCN])
def test_bags_shared_tables_weights_and_no_dense_columns_train(
    tmp_path: Path, model: Any, spec: Any, longest_bag: int
) -> None:
    seed_everything(0, verbose=False)
    task = model(spec, embedding_dim=8, mlp_sizes=(16,))
    task.connect(optimizer=EmbeddingOptimizer(lr=0.1))
    trainer = make_trainer(tmp_path, max_epochs=3)
    trainer.fit(task, loader(make_batches(spec, 30, longest_bag=longest_bag)))
    (figures,) = trainer.test(task, loader(make_batches(spec, 10, seed=1, longest_bag=longest_bag)), verbose=False)
    assert figures["test_auc"] > 0.65


def test_evaluation_metrics_are_those_of_the_predictions(tmp_path: Path) -> None:
    task, _ = make_task(EmbeddingOptimizer(lr=0.1))
    test = make_batches(SIMPLE, 7, seed=2)
    trainer = make_trainer(tmp_path, max_epochs=2)
    trainer.fit(task, loader(make_batches(SIMPLE, 20)), loader(test))
    (figures,) = trainer.test(task, loader(test), verbose=False)
    predictions = trainer.predict(task, loader(test))
    assert predictions is not None
    probabilities = torch.cat([p for p in predictions if isinstance(p, Tensor)]).double().numpy()
    labels = torch.cat([batch.labels for batch in test]).numpy()
    assert figures["test_auc"] == pytest.approx(roc_auc_score(labels, probabilities), abs=1e-6)
    assert figures["test_logloss"] == pytest.approx(log_loss(labels, probabilities), abs=1e-5)
    (validated,) = trainer.validate(task, loader(test), verbose=False)
    assert validated == {"val_auc": figures["test_auc"], "val_logloss": figures["test_logloss"]}


def test_one_class_in_the_whole_evaluation_is_nan_and_said(tmp_path: Path) -> None:
    task, _ = make_task()
    batches = make_batches(SIMPLE, 2)
    for batch in batches:
        batch.labels.zero_()
    trainer = make_trainer(tmp_path)
    with pytest.warns(UserWarning, match=r"test_auc is undefined .* both labels"):
        (figures,) = trainer.test(task, loader(batches), verbose=False)
    assert math.isnan(figures["test_auc"])
    assert figures["test_logloss"] > 0


@pytest.mark.parametrize("accumulate", [1, 2])
def test_figures_reach_the_logger(tmp_path: Path, accumulate: int) -> None:
    task, _ = make_task(cache=CacheConfig(rows=64, staleness=4))
    trainer = make_trainer(
        tmp_path, logger=CSVLogger(tmp_path), log_every_n_steps=5, accumulate_grad_batches=accumulate, max_epochs=2
    )
    trainer.fit(task, loader(make_batches(SIMPLE, 20)), loader(make_batches(SIMPLE, 2, seed=1)))
    with open(Path(trainer.log_dir or "") / "metrics.csv") as file:
        lines = list(csv.DictReader(file))
    steps = 40 // accumulate
    for name in (
        "train_loss",
        "samples_per_s",
        "hit_rate",
        "rows_fetched",
        "rows_pushed",
        "rows_evicted",
        "bytes_per_step",
    ):
        values = [float(line[name]) for line in lines if line[name]]
        assert len(values) == steps // 5, name
        assert all(math.isfinite(v) and v >= 0 for v in values)
    fetched = [float(line["rows_fetched"]) for line in lines if line["rows_fetched"]]
    assert fetched == sorted(fetched)
    assert [float(line["val_auc"]) for line in lines if line["val_auc"]]
    assert task.training_figures["rows_fetched"] >= fetched[-1]
    assert 0 < task.training_figures["hit_rate"] < 1


def test_the_progress_bar_shows_loss_and_validation_auc(tmp_path: Path) -> None:
    task, _ = make_task()
    trainer = make_trainer(tmp_path)
    trainer.fit(task, loader(make_batches(SIMPLE, 3)), loader(make_batches(SIMPLE, 3)))
    assert {"train_loss", "val_auc"} <= set(trainer.progress_bar_metrics)


def test_an_optimizer_without_the_embeddings_group_is_refused(tmp_path: Path) -> None:
    task, _ = make_task()
    task.configure_optimizers = lambda: Adagrad(task.parameters())  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="optimize_with"):
        make_trainer(tmp_path).fit(task, loader(make_batches(SIMPLE, 1)))


def test_a_second_fit_goes_on_from_the_first(tmp_path: Path) -> None:
    batches = make_batches(SIMPLE, 4)
    twice, _ = make_task()
    for _ in range(2):
        make_trainer(tmp_path).fit(twice, loader(batches))
    once, _ = make_task()
    make_trainer(tmp_path, max_epochs=2).fit(once, loader(batches))
    torch.testing.assert_close(rows_of(twice, batches), rows_of(once, batches), rtol=1e-5, atol=1e-6)


def test_an_interrupted_run_has_flushed(tmp_path: Path) -> None:
    batches = make_batches(SIMPLE, 6)

    class CtrlC(Callback):
        def on_train_batch_end(self, trainer: Trainer, *more: Any) -> None:
            if trainer.global_step == 4:
                raise KeyboardInterrupt

    interrupted, store = make_task(cache=CacheConfig(rows=1024, staleness=100))
    with pytest.raises(SystemExit):
        make_trainer(tmp_path, callbacks=[CtrlC()]).fit(interrupted, loader(batches))
    finished, _ = make_task(cache=CacheConfig(rows=1024, staleness=100))
    make_trainer(tmp_path, max_steps=4).fit(finished, loader(batches))
    assert store.stats().rows > 0
    assert torch.equal(rows_of(interrupted, batches), rows_of(finished, batches))


def test_a_batch_in_place_keeps_its_very_features(tmp_path: Path) -> None:
    task, _ = make_task()
    (batch,) = make_batches(SIMPLE, 1)
    moved = task.transfer_batch_to_device(batch, torch.device("meta"), 0)
    assert moved.sparse_features is batch.sparse_features
    assert moved.labels.device.type == moved.dense_features.device.type == "meta"
