"""Going on from a checkpoint: which one the words mean, what has nothing left to do, what does not fit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback, Trainer, seed_everything
from pytorch_lightning.callbacks import Timer
from pytorch_lightning.plugins.io import TorchCheckpointIO
from torch import Tensor
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import ExponentialLR

from cache_backend import CacheConfig, EmbeddingOptimizer, LocalStore
from datamodules.synthetic import SyntheticDataModule
from hetrec.checkpoint_io import EmbeddingCheckpointIO
from hetrec.cli import main
from hetrec.data import FeatureSpec, SparseFeature, TableSpec
from hetrec.optimizers import add_embedding_group
from hetrec.resume import newest_checkpoint
from models.deepfm import DeepFM
from models.wdl import WDL
from tests.models.ctr import SIMPLE, loader, make_batches, make_trainer

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
TRAIN = make_batches(SIMPLE, 6)


def make_task(kind: type[DeepFM] | type[WDL] = DeepFM, spec: FeatureSpec = SIMPLE, mlp: int = 8) -> Any:
    seed_everything(0, verbose=False)
    task = kind(spec, embedding_dim=4, mlp_sizes=(mlp,))
    task.connect(LocalStore(), CacheConfig(rows=256), EmbeddingOptimizer("sgd", lr=0.5), seed=5)
    return task


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of one epoch, six steps."""
    path = tmp_path_factory.mktemp("saved") / "one.ckpt"
    trainer = make_trainer(path.parent)
    trainer.fit(make_task(), loader(TRAIN))
    trainer.save_checkpoint(path)
    return str(path)


# Which one.


def test_the_words_mean_the_newest_run_of_the_same_model_and_data(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["data=synthetic", "data.rows=300", "data.scale=0.0001", "data.batch_size=64", "model.mlp_sizes=[4]"]
    words += ["model.embedding_dim=4", "trainer.enable_progress_bar=false", "data.test_fraction=0"]

    def run(*more: str) -> tuple[int, str, set[Path]]:
        before, _ = set(Path("runs").glob("*")), capfd.readouterr()
        caplog.clear()
        code = main(CONFIGS, [*more, *words])
        said = "\n".join([capfd.readouterr().err, *caplog.messages])  # whichever way an earlier run left the loggers
        return code, said, set(Path("runs").glob("*")) - before

    code, said, (first,) = run("model=deepfm", "ckpt_path=last")  # as a script that is restarted says it every time
    assert code == 0
    assert "ckpt_path=last: no earlier run runs/deepfm-synthetic-fit-* has left checkpoints/last.ckpt, so" in said
    code, said, (second,) = run("model=deepfm", "ckpt_path=last", "trainer.max_epochs=2")
    assert code == 0
    assert f"ckpt_path=last: {first}/checkpoints/last.ckpt" in said
    assert torch.load(second / "checkpoints" / "last.ckpt")["epoch"] == 1
    code, said, _ = run("validate", "model=deepfm", "ckpt_path=best")
    assert code == 0
    assert f"ckpt_path=best: {second}/checkpoints/best.ckpt" in said
    code, said, _ = run("validate", "model=wdl", "ckpt_path=best")  # the runs are another model's
    assert code == 2
    assert "error: ckpt_path=best: no earlier run runs/wdl-synthetic-fit-* has left checkpoints/best.ckpt;" in said


def test_the_newest_counts_and_folders_of_the_users_own_do_too(tmp_path: Path) -> None:
    def file(path: str, age: int) -> Path:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
        os.utime(tmp_path / path, (10**9 - age, 10**9 - age))
        return tmp_path / path

    old = file("m-d-fit-1/checkpoints/last.ckpt", age=3)
    new = file("m-d-fit-2/checkpoints/last.ckpt", age=2)
    file("m-d-fit-3/checkpoints/best.ckpt", age=0)
    file("other-d-fit-3/checkpoints/last.ckpt", age=0)
    assert newest_checkpoint("last", tmp_path, "m-d-fit") == new
    os.utime(old)
    assert newest_checkpoint("last", tmp_path, "m-d-fit") == old
    os.utime(old, (10**9 - 9, 10**9 - 9))
    mine = file("mine/last.ckpt", age=1)
    assert newest_checkpoint("last", tmp_path, "m-d-fit", [str(tmp_path / "mine")]) == mine
    job = file("m-d-fit-1/hpc_ckpt_2.ckpt", age=0)
    file("m-d-fit-1/hpc_ckpt_1.ckpt", age=1)
    assert newest_checkpoint("hpc", tmp_path, "m-d-fit") == job
    assert newest_checkpoint("hpc", tmp_path, "x-d-fit") is None


# Nothing left to do.


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, r"trainer\.max_epochs=1 is reached: epochs so far 1\. Raise it"),
        ({"max_epochs": 9, "max_steps": 4}, r"trainer\.max_steps=4 is reached: steps so far 6\. Raise it"),
        ({"max_epochs": 9, "limit_train_batches": 0}, r"trainer\.limit_train_batches leaves no batch"),
    ],
)
def test_a_checkpoint_that_is_at_the_end_says_what_to_raise(
    tmp_path: Path, saved: str, settings: dict[str, Any], why: str
) -> None:
    trainer = make_trainer(tmp_path, **settings)
    with pytest.warns(UserWarning, match=f"nothing was trained: {why}"):
        trainer.fit(make_task(), loader(TRAIN), ckpt_path=saved)
    assert trainer.global_step == 6


def test_time_that_is_used_up_is_said(tmp_path: Path) -> None:
    timed = {"max_epochs": 1000, "callbacks": [Timer({"seconds": 0.2})]}
    trainer = make_trainer(tmp_path, **timed)
    trainer.fit(make_task(), loader(TRAIN))
    trainer.save_checkpoint(tmp_path / "timed.ckpt")
    timed["callbacks"] = [Timer({"seconds": 0.2})]
    with pytest.warns(UserWarning, match=r"nothing was trained: trainer\.max_time is used up"):
        make_trainer(tmp_path, **timed).fit(make_task(), loader(TRAIN), ckpt_path=str(tmp_path / "timed.ckpt"))


# The rest of an epoch.


class Seen(Callback):
    """The rows that were trained on, and optionally an end after so many steps, as max_time makes it."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.rows: list[Tensor] = []
        self._stop_after = stop_after

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rows.append(batch.dense_features)
        if trainer.global_step == self._stop_after:
            trainer.should_stop = True


@pytest.mark.parametrize("end", ["max_steps", "should_stop"])
@pytest.mark.parametrize("later", [False, True])
def test_what_is_left_of_an_epoch_comes_after_the_resume(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, end: str, later: bool
) -> None:
    """In an epoch, 250 rows in 8 batches, each row is trained on once; whether the checkpoint is saved at the end of
    training, as the program's last.ckpt, or later, by hand."""
    data_path = str(tmp_path_factory.getbasetemp() / "rest")

    def fit(**settings: Any) -> tuple[Trainer, Seen]:
        path = settings.pop("ckpt_path", None)
        seen = Seen(stop_after=settings.pop("stop_after", None))
        data = SyntheticDataModule(path=data_path, rows=312, scale=0.0001, batch_size=32, test_fraction=0.0)
        task = make_task(spec=data.spec)
        trainer = make_trainer(tmp_path, callbacks=[seen, *settings.pop("callbacks", [])], **settings)
        trainer.fit(task, data, ckpt_path=path)
        return trainer, seen

    whole, expected = fit(max_epochs=2)
    steps = whole.global_step // 2

    class Save(Callback):
        def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
            trainer.save_checkpoint(tmp_path / "mid.ckpt")

    stop: dict[str, Any] = {"max_steps": 3} if end == "max_steps" else {"stop_after": 3}
    stopped, first = fit(max_epochs=9, callbacks=[] if later else [Save()], **stop)
    if later:
        stopped.save_checkpoint(tmp_path / "mid.ckpt")
    assert len(first.rows) == 3
    resumed, rest = fit(max_epochs=2, ckpt_path=str(tmp_path / "mid.ckpt"))
    assert resumed.global_step == 2 * steps
    assert torch.equal(torch.cat(first.rows + rest.rows), torch.cat(expected.rows))


def test_the_end_of_an_epoch_is_the_end_of_it(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=6, max_epochs=-1)
    trainer.fit(make_task(), loader(TRAIN))
    trainer.save_checkpoint(tmp_path / "six.ckpt")
    seen = Seen()
    again = make_trainer(tmp_path, max_epochs=2, callbacks=[seen])
    again.fit(make_task(), loader(TRAIN), ckpt_path=str(tmp_path / "six.ckpt"))
    assert (again.global_step, len(seen.rows)) == (12, 6)


# What does not fit.


@pytest.mark.parametrize("kind", ["cut short", "empty", "text", "of objects"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, saved: str, kind: str) -> None:
    path = tmp_path / "bad.ckpt"
    content = {"cut short": Path(saved).read_bytes()[:1000], "empty": b"", "text": b"hello world\n" * 9}
    if kind == "of objects":
        torch.save(torch.nn.Linear(2, 2), path)
    else:
        path.write_bytes(content[kind])
    io = EmbeddingCheckpointIO(TorchCheckpointIO(), lambda folder: None)
    with pytest.raises(ValueError, match=r"cannot read checkpoint .*bad\.ckpt: .*use another one, or start afresh"):
        io.load_checkpoint(path, weights_only=True)


def test_a_file_of_something_else_was_not_saved_by_a_task(tmp_path: Path) -> None:
    io = EmbeddingCheckpointIO(TorchCheckpointIO(), lambda folder: None)
    for other in ([1, 2], torch.nn.Linear(2, 2).state_dict(), {"epoch": 1, "global_step": 3, "state_dict": {}}):
        torch.save(other, tmp_path / "other.ckpt")
        with pytest.raises(ValueError, match=r"other\.ckpt names no embedding snapshot: it was not saved by a hetrec"):
            io.load_checkpoint(tmp_path / "other.ckpt", weights_only=True)


OTHER_COLUMNS = FeatureSpec(
    dense=SIMPLE.dense, sparse=(SparseFeature("user", "user"), *SIMPLE.sparse[1:]),
    tables=(TableSpec("user"), *SIMPLE.tables[1:]), label="y",
)  # fmt: skip


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"kind": WDL}, "saved by the model DeepFM, and this one is WDL"),
        ({"mlp": 4}, r"parameter mlp\S+weight has shape \[8, \d+\], and the model's has \[4, \d+\]"),
        ({"spec": OTHER_COLUMNS}, "no rows of the table user, but of the tables t0, t1, t2, t3"),
    ],
)
def test_another_model_or_other_data_are_refused_before_anything_is_restored(
    tmp_path: Path, saved: str, task: dict[str, Any], message: str
) -> None:
    other = make_task(**task)
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, max_epochs=2).fit(other, loader(TRAIN), ckpt_path=saved)
    assert other._store.stats().rows == 0


def test_another_optimizer_is_refused(tmp_path: Path, saved: str) -> None:
    task = make_task()
    task.optimize_with(Adam)
    with pytest.raises(ValueError, match=r"Adam cannot go on from the state of another optimizer: .*lr_decay.*betas"):
        make_trainer(tmp_path, max_epochs=2).fit(task, loader(TRAIN), ckpt_path=saved)


def test_a_task_that_configures_its_optimizer_by_itself_goes_on_as_any_lightning_module(tmp_path: Path) -> None:
    class Mine(DeepFM):
        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=0.1)
            add_embedding_group(optimizer, 0.5, self._step_rows)
            return [optimizer], [ExponentialLR(optimizer, 0.5)]

    trainer = make_trainer(tmp_path)
    trainer.fit(make_task(Mine), loader(TRAIN))
    trainer.save_checkpoint(tmp_path / "mine.ckpt")
    again = make_trainer(tmp_path, max_epochs=2)
    again.fit(make_task(Mine), loader(TRAIN), ckpt_path=str(tmp_path / "mine.ckpt"))
    assert [group["lr"] for group in again.optimizers[0].param_groups] == pytest.approx([0.1 / 4, 0.5 / 4])
