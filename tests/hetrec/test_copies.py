"""Copies of a task and of a collection, as weight averaging makes them: dense parameters of their own, shared rows."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback, seed_everything
from pytorch_lightning.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from cache_backend import CacheConfig, EmbeddingOptimizer, LocalStore
from models.deepfm import DeepFM
from tests.models.ctr import SIMPLE, loader, make_batches, make_trainer

TRAIN = make_batches(SIMPLE, 6)
TEST = make_batches(SIMPLE, 3, seed=1)


def make_task() -> DeepFM:
    seed_everything(0, verbose=False)
    task = DeepFM(SIMPLE, embedding_dim=4, mlp_sizes=(8,), row_init=0.1)
    task.connect(LocalStore(), CacheConfig(rows=256), EmbeddingOptimizer("sgd", lr=0.5), seed=5)
    return task


def dense_of(task: Any) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in task.parameters()]


def test_an_averaged_model_in_a_loop_of_ones_own(tmp_path: Path) -> None:
    """Its dense parameters are the moving average, computed here by hand; its rows are those that train."""
    task = make_task()
    task.embeddings.open(task._store, task._cache, task._row_optimizer, seed=task._seed)
    averaged = AveragedModel(task, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    averaged.eval()
    optimizer = task.configure_optimizers()
    mean = dense_of(task)
    for step, batch in enumerate(TRAIN):
        optimizer.zero_grad()
        task.loss(batch).backward()
        optimizer.step()
        averaged.update_parameters(task)
        mean = [m * 0.9 + p * 0.1 if step else p for m, p in zip(mean, dense_of(task), strict=True)]
    assert task.embeddings.training  # what is done to the copy is not done to the task
    torch.testing.assert_close(dense_of(averaged.module), mean)
    features = TEST[0].sparse_features
    before = averaged.module.embeddings(features).values()
    task.embeddings.flush()
    after = averaged.module.embeddings(features).values()
    assert not torch.equal(before, after)  # evaluation reads what is flushed
    assert torch.equal(after, task.eval().embeddings(features).values())

    task.load_state_dict(averaged.module.state_dict())
    assert torch.equal(after, averaged.module.embeddings(features).values())
    task.embeddings.close()
    with pytest.raises(RuntimeError, match="the embedding collection is not open"):
        averaged.module.embeddings(features)
    make_trainer(tmp_path).fit(averaged.module, loader(TRAIN))  # closed, it is a task as any other


def test_a_copy_of_a_trained_task_evaluates_the_same(tmp_path: Path) -> None:
    task = make_task()
    trainer = make_trainer(tmp_path)
    trainer.fit(task, loader(TRAIN))
    copied = copy.deepcopy(task)
    figures = [make_trainer(tmp_path).test(each, loader(TEST), verbose=False) for each in (task, copied)]
    assert figures[0] == figures[1]
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(task.parameters(), copied.parameters(), strict=True))


class Steps(Callback):
    def __init__(self) -> None:
        self.dense: list[list[Tensor]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *more: Any) -> None:
        self.dense.append(dense_of(module))


def test_moving_averages_of_lightning_are_tested_saved_and_gone_on_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    plain = make_task()
    make_trainer(tmp_path, max_epochs=2).fit(plain, loader(TRAIN))
    steps = Steps()
    task, trainer = make_task(), make_trainer(tmp_path, callbacks=[steps, EMAWeightAveraging(decay=0.8)], max_epochs=2)
    trainer.fit(task, loader(TRAIN))
    said = "EMAWeightAveraging averages the dense parameters; the embedding rows are not averaged"
    assert said in caplog.text + capfd.readouterr().err

    mean = steps.dense[0]
    for dense in steps.dense[1:]:
        mean = [m * 0.8 + p * 0.2 for m, p in zip(mean, dense, strict=True)]
    torch.testing.assert_close(dense_of(task), mean)
    torch.testing.assert_close(steps.dense[-1], dense_of(plain))
    (figures,) = trainer.test(task, loader(TEST), verbose=False)
    plain.load_state_dict(task.state_dict())  # the average over the rows of a run without it
    (expected,) = make_trainer(tmp_path).test(plain, loader(TEST), verbose=False)
    assert figures == pytest.approx(expected, rel=1e-5)

    trainer.save_checkpoint(tmp_path / "ema.ckpt")
    fresh = make_trainer(tmp_path).test(make_task(), loader(TEST), ckpt_path=str(tmp_path / "ema.ckpt"), verbose=False)
    assert fresh == [figures]


def test_stochastic_weight_averaging_fits_tests_and_fits_again(tmp_path: Path) -> None:
    """SWA copies the task at the start of every stage. From the second epoch on it
    takes the weights at the start of each into the mean."""
    steps = Steps()
    averaging = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2, annealing_epochs=1)
    trainer = make_trainer(tmp_path, callbacks=[steps, averaging], max_epochs=4)
    task = make_task()
    trainer.fit(task, loader(TRAIN))
    ends = steps.dense[len(TRAIN) - 1 :: len(TRAIN)]
    expected = [sum(tensors) / 3 for tensors in zip(*ends[:3], strict=True)]
    torch.testing.assert_close(dense_of(task), expected)
    (first,) = trainer.test(task, loader(TEST), verbose=False)
    (again,) = make_trainer(tmp_path).test(copy.deepcopy(task), loader(TEST), verbose=False)
    assert first == again
    averaging = StochasticWeightAveraging(swa_lrs=0.05)
    make_trainer(tmp_path, callbacks=[averaging], max_epochs=2).fit(task, loader(TRAIN))
    assert task._store.stats().rows > 0
