"""The data modules under Lightning's own trainer: epochs, resuming, ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint

from datamodules.parquet import ParquetDataModule
from hetrec.data import Batch

REPOSITORY = Path(__file__).resolve().parents[2]


class Recorder(LightningModule):
    """Trains a number and remembers the ids of every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[tuple[int, list[int]]] = []
        self.validated: list[int] = []
        self.tested: list[int] = []

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        self.seen.append((self.current_epoch, batch.sparse_features.values().tolist()))
        return self.weight * batch.labels.sum()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.validated += batch.sparse_features.values().tolist()

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.tested += batch.sparse_features.values().tolist()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(
    folder: Path, root: Path, workers: int = 0, ckpt: str | None = None, every: int = 10**6, **options: Any
) -> Recorder:
    data = ParquetDataModule(
        str(folder), sparse=["id"], val_fraction=0.05, test_fraction=0.05, split="order", batch_size=10,
        num_workers=workers, shuffle_buffer=40,
    )  # fmt: skip
    checkpoint = ModelCheckpoint(root, filename="{step}", every_n_train_steps=every, save_top_k=-1)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        callbacks=[checkpoint],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
        **options,
    )
    model = Recorder()
    trainer.fit(model, datamodule=data, ckpt_path=ckpt)
    trainer.test(model, datamodule=data, verbose=False)
    return model


@pytest.fixture
def folder(id_files: Callable[..., Path]) -> Path:
    return id_files([60, 52], row_group=16)  # 100 rows train: 10 steps; 6 validate, 6 test


def test_every_epoch_reads_every_row_once_in_a_new_order(folder: Path, tmp_path: Path) -> None:
    model = fit(folder, tmp_path / "run", max_epochs=3)
    epochs = [[ids for epoch, ids in model.seen if epoch == number] for number in range(3)]
    for batches in epochs:
        assert len(batches) == 10
        assert Counter(i for b in batches for i in b) == Counter(range(100))
    assert epochs[0] != epochs[1] != epochs[2]
    assert model.tested == list(range(106, 112))
    assert Counter(model.validated).keys() == set(range(100, 106))
    assert fit(folder, tmp_path / "again", max_epochs=3).seen == model.seen


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [4, 10, 14])
def test_a_resumed_run_sees_what_an_unbroken_one_would(folder: Path, tmp_path: Path, workers: int, stop: int) -> None:
    """Stopped in the middle of the first epoch, at its end, and in the middle of the second."""
    whole = fit(folder, tmp_path / "whole", max_epochs=3).seen
    first = fit(folder, tmp_path / "first", workers, every=stop, max_epochs=3, max_steps=stop).seen
    assert first == whole[:stop]
    checkpoint = tmp_path / "first" / f"step={stop}.ckpt"
    assert checkpoint.exists()
    second = fit(folder, tmp_path / "second", workers, str(checkpoint), max_epochs=3).seen
    assert second == whole[stop:]


def test_validation_within_an_epoch_sees_all_its_rows_every_time(folder: Path, tmp_path: Path) -> None:
    model = fit(folder, tmp_path / "run", max_epochs=2, val_check_interval=5, num_sanity_val_steps=0)
    assert model.validated == list(range(100, 106)) * 4


def test_fewer_steps_than_rows_and_the_next_epoch_is_another_one(folder: Path, tmp_path: Path) -> None:
    model = fit(folder, tmp_path / "run", max_epochs=2, limit_train_batches=3)
    whole = fit(folder, tmp_path / "whole", max_epochs=2).seen
    assert model.seen == [*whole[:3], *whole[10:13]]


def test_overfitting_takes_the_same_batches_in_every_epoch(folder: Path, tmp_path: Path) -> None:
    seen = fit(folder, tmp_path / "run", max_epochs=3, overfit_batches=2).seen
    assert [ids for _, ids in seen] == [list(range(10)), list(range(10, 20))] * 3


RANKS = """
import os, sys
import torch
from torch import distributed
from datamodules.parquet import ParquetDataModule

if __name__ == "__main__":
    rank, world = int(sys.argv[1]), int(sys.argv[2])
    distributed.init_process_group("gloo", init_method=sys.argv[3], rank=rank, world_size=world)
    for number, folder in enumerate(sys.argv[4:]):
        data = ParquetDataModule(folder, sparse=["id"], batch_size=4, val_fraction=0, test_fraction=0)
        data.setup("fit")
        loader = data.train_dataloader()
        for epoch in range(2):
            for step, batch in enumerate(loader):
                rows = torch.tensor(batch.batch_size)
                distributed.all_reduce(rows)  # a rank with another number of steps would leave the others waiting
                print(f"rows {number} {epoch}", *batch.sparse_features.values().tolist())
            print(f"steps {number} {epoch}", step + 1)
        data.teardown()
    distributed.barrier()
"""


def test_ranks_take_the_same_steps_and_read_each_row_once(id_files: Callable[..., Path], tmp_path: Path) -> None:
    """Four processes with a collective in every step: uneven files, and then fewer rows than ranks."""
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    sizes = [[9, 10, 11, 12], [3]]
    arguments = [f"file://{tmp_path}/rendezvous", *(str(id_files(rows)) for rows in sizes)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), "4", *arguments],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    shown = [p.communicate(timeout=120) for p in processes]
    assert [p.returncode for p in processes] == [0] * 4, shown
    lines = [[line.split() for line in out.splitlines()] for out, _ in shown]
    for number, rows in enumerate(sizes):
        for epoch in range(2):
            of_epoch = [[line for line in rank if line[1:3] == [str(number), str(epoch)]] for rank in lines]
            read = [int(i) for rank in of_epoch for line in rank if line[0] == "rows" for i in line[3:]]
            assert Counter(read) == Counter(range(sum(rows)))
            assert len({line[3] for rank in of_epoch for line in rank if line[0] == "steps"}) == 1
