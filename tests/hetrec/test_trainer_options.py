"""What users of Lightning turn on: options that change nothing, places to run in, tuners."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from pytorch_lightning import seed_everything
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.tuner import Tuner
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import SGD

from cache_backend import CacheConfig, EmbeddingOptimizer, LocalStore
from datamodules.synthetic import SyntheticDataModule
from hetrec.cli import main
from hetrec.errors import users_mistake
from models.deepfm import DeepFM
from tests.models.ctr import SIMPLE, loader, make_batches, make_trainer

REPOSITORY = Path(__file__).resolve().parents[2]
TRAIN = make_batches(SIMPLE, 6)
TEST = make_batches(SIMPLE, 2, seed=1)


def make_task(lr: float = 0.1, rows_lr: float = 0.5, spec: Any = SIMPLE) -> DeepFM:
    seed_everything(0, verbose=False)
    task = DeepFM(spec, embedding_dim=4, mlp_sizes=(8,), row_init=0.1)
    task.connect(LocalStore(), CacheConfig(rows=256), EmbeddingOptimizer("sgd", lr=rows_lr), seed=5)
    task.optimize_with(lambda parameters: SGD(parameters, lr=lr))
    return task


def trained(task: DeepFM, folder: Path) -> list[Tensor]:
    """Every number that was learned: the rows in the order of table and key, then the dense parameters."""
    task._store.snapshot(folder)
    rows = [row for file in folder.glob("*.parquet") for row in pq.read_table(file).to_pylist()]
    rows.sort(key=lambda row: (row["table"], row["key"]))
    return [torch.tensor([row["weight"] for row in rows]), *(p.detach().float() for p in task.parameters())]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Tensor]:
    """What two epochs of a plain run learn."""
    folder = tmp_path_factory.mktemp("expected")
    task = make_task()
    make_trainer(folder, max_epochs=2).fit(task, loader(TRAIN), loader(TEST))
    return trained(task, folder / "rows")


@pytest.mark.parametrize(
    "settings",
    [
        {"detect_anomaly": True},
        {"profiler": "simple"},
        {"profiler": "advanced"},
        {"use_distributed_sampler": False},
        {"reload_dataloaders_every_n_epochs": 1},
        {"limit_val_batches": 0},
        {"check_val_every_n_epoch": 2},
        {"check_val_every_n_epoch": None, "val_check_interval": 4},
        {"log_every_n_steps": 0},
        {"barebones": True},
        {"inference_mode": False},
        {"deterministic": True},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_options_that_change_nothing(tmp_path: Path, settings: dict[str, Any], expected: list[Tensor]) -> None:
    task = make_task()
    make_trainer(tmp_path, max_epochs=2, **settings).fit(task, loader(TRAIN), loader(TEST))
    for found, same in zip(trained(task, tmp_path / "rows"), expected, strict=True):
        torch.testing.assert_close(found, same, rtol=1e-5, atol=1e-6)


def in_a_thread(work: Any) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failed


def in_a_running_loop(work: Any) -> None:
    async def run() -> None:
        work()

    asyncio.run(run())


@pytest.mark.parametrize("place", [in_a_thread, in_a_running_loop])
def test_a_fit_in_a_thread_or_in_a_notebook_with_its_running_loop(
    tmp_path: Path, place: Any, expected: list[Tensor]
) -> None:
    task = make_task()
    place(lambda: make_trainer(tmp_path, max_epochs=2).fit(task, loader(TRAIN), loader(TEST)))
    assert all(map(torch.equal, trained(task, tmp_path / "rows"), expected))


def test_a_compiled_task_learns_the_same(tmp_path: Path, expected: list[Tensor]) -> None:
    task = make_task()
    compiled: Any = torch.compile(task, backend="eager")  # its tracing is what may fail
    trainer = make_trainer(tmp_path, max_epochs=2)
    trainer.fit(compiled, loader(TRAIN), loader(TEST))
    for found, same in zip(trained(task, tmp_path / "rows"), expected, strict=True):
        torch.testing.assert_close(found, same, rtol=1e-5, atol=1e-6)
    assert trainer.test(compiled, loader(TEST), verbose=False) == make_trainer(tmp_path).test(
        task, loader(TEST), verbose=False
    )
    torch._dynamo.reset()  # what it compiled refers to the store


@pytest.mark.parametrize(("dtype", "near"), [(torch.float64, 1e-5), (torch.bfloat16, 5e-2)])
def test_a_task_of_another_dtype_takes_its_float32_rows_and_data(
    tmp_path: Path, dtype: torch.dtype, near: float, expected: list[Tensor]
) -> None:
    task = make_task().to(dtype)
    make_trainer(tmp_path, max_epochs=2).fit(task, loader(TRAIN), loader(TEST))
    assert {parameter.dtype for parameter in task.parameters()} == {dtype}
    for found, same in zip(trained(task, tmp_path / "rows"), expected, strict=True):
        torch.testing.assert_close(found, same, rtol=near, atol=near)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"limit_train_batches": 3}, 3),
        ({"limit_train_batches": 0.5}, 3),
        ({"overfit_batches": 2}, 2),
        ({"fast_dev_run": True}, 1),
        ({"accumulate_grad_batches": 4}, 2),  # the second window has two batches
    ],
)
def test_steps_that_limits_leave(tmp_path: Path, settings: dict[str, Any], steps: int) -> None:
    trainer = make_trainer(tmp_path, **settings)
    trainer.fit(make_task(), loader(TRAIN))
    assert trainer.global_step == steps


@pytest.mark.parametrize(("batch_size", "steps"), [(10**6, 1), (200, 2)])
def test_a_batch_beyond_the_data_and_a_short_last_one_are_batches(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, batch_size: int, steps: int
) -> None:
    path = str(tmp_path_factory.getbasetemp() / "limits")
    shares = {"val_fraction": 0.0, "test_fraction": 0.0}
    data = SyntheticDataModule(path=path, rows=300, scale=0.0001, batch_size=batch_size, **shares)  # type: ignore[arg-type]
    sizes: list[int] = []

    class Counting(DeepFM):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            sizes.append(batch.batch_size)
            return super().training_step(batch, batch_idx)

    task = Counting(data.spec, embedding_dim=4, mlp_sizes=(8,))
    make_trainer(tmp_path).fit(task, data)
    assert len(sizes) == steps
    assert sum(sizes) == 300


def test_one_row_is_enough_to_train_on(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.fit(make_task(), loader(make_batches(SIMPLE, 1, batch_size=1)))
    assert trainer.global_step == 1


# Tuners: they train, and put back what was there before.


def test_the_learning_rate_finder_sets_both_rates_and_puts_the_rows_back(tmp_path: Path) -> None:
    task, trainer = make_task(), make_trainer(tmp_path)
    Tuner(trainer).lr_find(task, loader(make_batches(SIMPLE, 40)), min_lr=0.01, num_training=30)
    assert task._store.stats().rows == 0
    assert not list(tmp_path.glob(".lr_find*"))
    assert task.lr is not None
    trainer.fit(task, loader(TRAIN))
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [task.lr, task.lr]
    plain = make_task(task.lr, task.lr)
    make_trainer(tmp_path).fit(plain, loader(TRAIN))
    assert all(map(torch.equal, trained(task, tmp_path / "found"), trained(plain, tmp_path / "plain")))


def test_the_batch_size_finder_puts_the_rows_back(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = str(tmp_path_factory.getbasetemp() / "limits")
    data = SyntheticDataModule(path=path, rows=300, scale=0.0001, batch_size=16)
    task = make_task(spec=data.spec)
    found = Tuner(make_trainer(tmp_path)).scale_batch_size(task, datamodule=data, max_trials=3, steps_per_trial=2)
    assert found == data.batch_size == 8  # from 2, doubled before each further trial
    assert task._store.stats().rows == 0
    assert not list(tmp_path.glob(".scale_batch_size*"))


# Options that do not fit are the user's to mend.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"val_check_interval": 50}, "`val_check_interval` (50) must be less than or equal to the number"),
        ({"callbacks": [EarlyStopping("val_loss")]}, "Early stopping conditioned on metric `val_loss` which is not"),
        (
            {"callbacks": [ModelCheckpoint(monitor="val_loss")], "enable_checkpointing": True},
            "`ModelCheckpoint(monitor='val_loss')` could not find the monitored key",
        ),
    ],
)
def test_what_lightning_words_for_the_user_is_the_users(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, RuntimeError, MisconfigurationException), match=re.escape(message)) as raised:
        make_trainer(tmp_path, **settings).fit(make_task(), loader(TRAIN), loader(TEST))
    assert users_mistake(raised.value) is raised.value


def test_what_lightning_finds_wrong_with_our_own_code_is_not(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="not attached to a `Trainer`") as raised:
        make_task().trainer  # noqa: B018
    assert users_mistake(raised.value) is None


# Where the program runs.

WORDS = ("model=deepfm", "data=synthetic", "data.rows=300", "data.scale=0.0001", "data.batch_size=64",
         "model.mlp_sizes=[4]", "model.embedding_dim=4", "trainer.enable_progress_bar=false")  # fmt: skip


def rows_of_run(folder: Path) -> list[Any]:
    (file,) = folder.glob("runs/*/checkpoints/last.embeddings/*/*.parquet")
    return pq.read_table(file).to_pylist()


def test_the_program_runs_in_any_folder_without_a_home_and_finds_classes_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, with another hash seed: its files lie where it was called, and its rows are equal."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    (there / "mine.py").write_text(
        "from pytorch_lightning import Callback\n"
        "class Says(Callback):\n"
        "    def on_fit_start(self, trainer, module):\n"
        "        print('says', trainer.max_epochs)\n"
    )
    (there / "mine.yaml").write_text("trainer:\n  callbacks:\n    - class_path: mine.Says\n")
    out = subprocess.run(
        [sys.executable, REPOSITORY / "train.py", *WORDS, "--config", "mine.yaml"],
        cwd=there,
        env={**os.environ, "HOME": "/nonexisting", "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert out.returncode == 0, out.stderr
    assert "says 1\n" in out.stdout
    assert (there / "data" / "synthetic").is_dir()

    monkeypatch.chdir(here)
    assert main(REPOSITORY / "configs", list(WORDS)) == 0
    assert rows_of_run(there) == rows_of_run(here)


def test_without_a_file_handle_left_the_program_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*WORDS, "trainer.logger=false", "trainer.enable_checkpointing=false"]
    assert main(REPOSITORY / "configs", words) == 0
    kept = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)  # the number that the next file would get
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, kept[1]))
    try:
        code = main(REPOSITORY / "configs", words)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, kept)
    assert code in (1, 2)
    assert "Too many open files" in capfd.readouterr().err.splitlines()[-1]


def test_barebones_needs_no_other_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(REPOSITORY / "configs", [*WORDS[:-1], "trainer.barebones=true"]) == 0
    assert not list(tmp_path.rglob("*.ckpt"))


def test_a_folder_that_cannot_be_made_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()  # root may write anywhere, so not a folder without rights
    assert main(REPOSITORY / "configs", [*WORDS, "trainer.default_root_dir=file"]) == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert error.startswith("error: cannot make the folder of this run, file/deepfm-synthetic-fit-")
    assert error.endswith(": Not a directory; name a folder that can be written to with trainer.default_root_dir")
