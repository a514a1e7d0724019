"""Checkpoints: both halves together, resume equals going on, and the previous pair survives a failure in between."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from pytorch_lightning import Trainer, seed_everything
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch import Tensor
from torch.optim import Adagrad
from torch.optim.lr_scheduler import ExponentialLR

from cache_backend import CacheConfig, EmbeddingOptimizer, LocalStore
from hetrec.checkpoint_io import EmbeddingCheckpointIO, snapshot_folder
from models.deepfm import DeepFM
from tests.models.ctr import SIMPLE, initial_rows, keys_of, loader, make_batches, make_trainer

# Fewer rows than the data has keys. After a flush lru decides as if it began anew; what other policies remember of the
# time before is not in a checkpoint (docs/cache_policies.md).
CACHE = CacheConfig(rows=64, staleness=3, policy="lru")
TRAIN = make_batches(SIMPLE, 8)
TEST = make_batches(SIMPLE, 4, seed=1)


def make_task(rows_lr: float = 0.1, dense_lr: float = 0.05, optimizer: str = "adagrad", seed: int = 0) -> DeepFM:
    seed_everything(seed, verbose=False)
    task = DeepFM(SIMPLE, embedding_dim=4, mlp_sizes=(8,), row_init=0.1)
    rows: Any = EmbeddingOptimizer(optimizer, lr=rows_lr)  # type: ignore[arg-type]
    task.connect(LocalStore(), CACHE, rows, seed=5)
    task.optimize_with(lambda p: Adagrad(p, lr=dense_lr), lambda optimizer: ExponentialLR(optimizer, 0.5))
    return task


def saving_trainer(folder: Path, epochs: int, **settings: Any) -> Trainer:
    keep: dict[str, Any] = {"dirpath": folder, "filename": "{epoch}", "save_top_k": -1} | settings
    return make_trainer(folder, max_epochs=epochs, enable_checkpointing=True, callbacks=[ModelCheckpoint(**keep)])


def state_of(task: DeepFM, trainer: Trainer, folder: Path) -> tuple[list[dict[str, Any]], list[Tensor]]:
    """All that training has: rows with their sums and clocks, dense parameters and their optimizer's sums."""
    task._store.snapshot(folder)
    rows = [row for file in folder.glob("*.parquet") for row in pq.read_table(file).to_pylist()]
    sums = [state["sum"] for state in trainer.optimizers[0].state_dict()["state"].values()]
    return sorted(rows, key=lambda row: (row["table"], row["key"])), [*task.parameters(), *sums]


@pytest.mark.parametrize("optimizer", ["adagrad", "rowwise_adagrad", "adam"])
def test_resume_equals_going_on_bit_for_bit(tmp_path: Path, optimizer: str) -> None:
    whole, uninterrupted = make_task(optimizer=optimizer), saving_trainer(tmp_path / "whole", 3)
    uninterrupted.fit(whole, loader(TRAIN))

    saving_trainer(tmp_path / "first", 1).fit(make_task(optimizer=optimizer), loader(TRAIN))
    resumed, trainer = make_task(optimizer=optimizer, seed=99), saving_trainer(tmp_path / "second", 3)
    trainer.fit(resumed, loader(TRAIN), ckpt_path=str(tmp_path / "first" / "epoch=0.ckpt"))

    rows, numbers = state_of(resumed, trainer, tmp_path / "rows resumed")
    expected_rows, expected_numbers = state_of(whole, uninterrupted, tmp_path / "rows whole")
    assert len(rows) > 100
    assert {"weight", "state", "clock"} <= rows[0].keys()
    assert rows == expected_rows
    for found, expected in zip(numbers, expected_numbers, strict=True):
        assert torch.equal(found, expected)


def test_the_pair_is_a_ckpt_and_a_folder_of_parquet_with_every_row(tmp_path: Path) -> None:
    saving_trainer(tmp_path, 1).fit(make_task(), loader(TRAIN))
    assert (tmp_path / "epoch=0.ckpt").is_file()
    (snapshot,) = (tmp_path / "epoch=0.embeddings").iterdir()
    rows = [row for file in snapshot.glob("*.parquet") for row in pq.read_table(file).to_pylist()]
    trained = {(name, int(k)) for b in TRAIN for name in SIMPLE.sparse_names for k in b.sparse_features[name].values()}
    assert {(f"c{row['table'][1:]}", row["key"]) for row in rows} == trained
    assert min(row["clock"] for row in rows) >= 1


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_a_fresh_process_evaluates_a_checkpoint(tmp_path: Path, stage: str) -> None:
    trained = make_task()
    trainer = saving_trainer(tmp_path, 2)
    trainer.fit(trained, loader(TRAIN))

    def run(trainer: Trainer, task: DeepFM, path: str | None) -> Any:
        quiet = {} if stage == "predict" else {"verbose": False}
        return getattr(trainer, stage)(task, loader(TEST), ckpt_path=path, **quiet)

    expected = run(make_trainer(tmp_path), trained, None)
    path = str(tmp_path / "epoch=1.ckpt")
    found = run(make_trainer(tmp_path), make_task(seed=99), path)
    blank = run(make_trainer(tmp_path), make_task(seed=99), None)
    if stage == "predict":
        assert torch.equal(torch.cat(found), torch.cat(expected))
        assert not torch.equal(torch.cat(blank), torch.cat(expected))
    else:
        assert found == expected
        assert blank != expected


def test_settings_given_anew_win_over_the_checkpoint(tmp_path: Path) -> None:
    saving_trainer(tmp_path, 2).fit(make_task(rows_lr=0.1, dense_lr=0.05), loader(TRAIN))

    def rates(rows_lr: float, dense_lr: float) -> list[float]:
        trainer = make_trainer(tmp_path, max_epochs=3)
        trainer.fit(make_task(rows_lr, dense_lr), loader(TRAIN), ckpt_path=str(tmp_path / "epoch=1.ckpt"))
        return [group["lr"] for group in trainer.optimizers[0].param_groups]

    # Halved after every epoch; the run ends after its third.
    assert rates(0.1, 0.05) == pytest.approx([0.05 / 8, 0.1 / 8])
    assert rates(0.4, 0.05) == pytest.approx([0.05 / 8, 0.4 / 8])
    assert rates(0.1, 0.01) == pytest.approx([0.01 / 8, 0.1 / 8])


def test_a_learning_rate_of_0_on_resume_leaves_the_rows(tmp_path: Path) -> None:
    task, trainer = make_task(optimizer="adam"), saving_trainer(tmp_path, 1)
    trainer.fit(task, loader(TRAIN))
    resumed, again = make_task(rows_lr=0.0, optimizer="adam"), make_trainer(tmp_path, max_epochs=2)
    again.fit(resumed, loader(TRAIN), ckpt_path=str(tmp_path / "epoch=0.ckpt"))
    before, after = state_of(task, trainer, tmp_path / "before")[0], state_of(resumed, again, tmp_path / "after")[0]
    assert [row["weight"] for row in after] == [row["weight"] for row in before]
    assert [row["state"] for row in after] != [row["state"] for row in before]  # it did train


def test_an_override_survives_a_second_resume(tmp_path: Path) -> None:
    saving_trainer(tmp_path / "a", 1).fit(make_task(rows_lr=0.1), loader(TRAIN))
    saving_trainer(tmp_path / "b", 2).fit(
        make_task(rows_lr=0.4), loader(TRAIN), ckpt_path=str(tmp_path / "a" / "epoch=0.ckpt")
    )
    trainer = make_trainer(tmp_path, max_epochs=3)
    trainer.fit(make_task(rows_lr=0.4), loader(TRAIN), ckpt_path=str(tmp_path / "b" / "epoch=1.ckpt"))
    assert trainer.optimizers[0].param_groups[1]["lr"] == pytest.approx(0.4 / 8)


def test_another_optimizer_of_the_rows_is_refused_by_name(tmp_path: Path) -> None:
    saving_trainer(tmp_path, 1).fit(make_task(optimizer="adagrad"), loader(TRAIN))
    with pytest.raises(ValueError, match="trained by"):
        make_trainer(tmp_path).fit(
            make_task(optimizer="rowwise_adagrad"), loader(TRAIN), ckpt_path=str(tmp_path / "epoch=0.ckpt")
        )


def test_a_checkpoint_without_its_snapshot_is_refused_naming_both(tmp_path: Path) -> None:
    saving_trainer(tmp_path, 1).fit(make_task(), loader(TRAIN))
    shutil.rmtree(tmp_path / "epoch=0.embeddings")
    for run in ("fit", "test"):
        with pytest.raises(FileNotFoundError, match=r"epoch=0\.ckpt .*epoch=0\.embeddings"):
            getattr(make_trainer(tmp_path), run)(make_task(), loader(TRAIN), ckpt_path=str(tmp_path / "epoch=0.ckpt"))


def test_the_snapshot_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    saving_trainer(tmp_path, 2).fit(make_task(), loader(TRAIN))
    (mine,) = (tmp_path / "epoch=0.embeddings").iterdir()
    (other,) = (tmp_path / "epoch=1.embeddings").iterdir()
    shutil.rmtree(mine)
    shutil.copytree(other, mine)
    with pytest.raises(ValueError, match=r"epoch=0\.embeddings.*is not the one that checkpoint.*epoch=0\.ckpt"):
        make_trainer(tmp_path).test(make_task(), loader(TEST), ckpt_path=str(tmp_path / "epoch=0.ckpt"))


def test_a_damaged_snapshot_is_refused(tmp_path: Path) -> None:
    saving_trainer(tmp_path, 1).fit(make_task(), loader(TRAIN))
    (file,) = (tmp_path / "epoch=0.embeddings").glob("*/*.parquet")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(ValueError, match="does not match its checksum"):
        make_trainer(tmp_path).test(make_task(), loader(TEST), ckpt_path=str(tmp_path / "epoch=0.ckpt"))


def test_a_foreign_checkpoint_and_a_dense_only_load_are_refused(tmp_path: Path) -> None:
    saving_trainer(tmp_path, 1).fit(make_task(), loader(TRAIN))
    with pytest.raises(ValueError, match="ckpt_path"):
        DeepFM.load_from_checkpoint(tmp_path / "epoch=0.ckpt", spec=SIMPLE, embedding_dim=4, mlp_sizes=(8,))
    contents = torch.load(tmp_path / "epoch=0.ckpt")  # loads with weights_only, torch's default
    del contents["embedding_snapshot"]
    torch.save(contents, tmp_path / "foreign.ckpt")
    with pytest.raises(ValueError, match=r"foreign\.ckpt names no embedding snapshot"):
        make_trainer(tmp_path).test(make_task(), loader(TEST), ckpt_path=str(tmp_path / "foreign.ckpt"))


def test_removing_a_checkpoint_removes_its_snapshot(tmp_path: Path) -> None:
    trainer = saving_trainer(tmp_path, 5, monitor="val_auc", mode="max", save_top_k=2)
    trainer.fit(make_task(), loader(TRAIN), loader(TEST))
    checkpoints = sorted(p.stem for p in tmp_path.glob("*.ckpt"))
    assert len(checkpoints) == 2
    assert sorted(p.stem for p in tmp_path.glob("*.embeddings")) == checkpoints


def test_a_name_that_is_used_again_holds_one_snapshot_the_newest(tmp_path: Path) -> None:
    task = make_task()
    overwrite = {"filename": "latest", "save_top_k": 1, "enable_version_counter": False}
    saving_trainer(tmp_path, 3, **overwrite).fit(task, loader(TRAIN))
    assert [p.name for p in tmp_path.glob("*.ckpt")] == ["latest.ckpt"]
    assert [p.name for p in (tmp_path / "latest.embeddings").iterdir()] == ["step-24"]
    expected = make_trainer(tmp_path).test(task, loader(TEST), verbose=False)
    path = str(tmp_path / "latest.ckpt")
    assert make_trainer(tmp_path).test(make_task(seed=9), loader(TEST), ckpt_path=path, verbose=False) == expected


@pytest.mark.parametrize("save_last", [True, "link"])
def test_last_can_be_resumed_from(tmp_path: Path, save_last: Any) -> None:
    trainer = saving_trainer(tmp_path, 2, save_last=save_last)
    trainer.fit(make_task(), loader(TRAIN))
    assert (tmp_path / "last.ckpt").is_symlink() == (save_last == "link")
    again = saving_trainer(tmp_path, 3, save_last=save_last)
    again.fit(make_task(seed=9), loader(TRAIN), ckpt_path="last")
    assert again.global_step == 24
    assert again.ckpt_path == str(tmp_path / "last.ckpt")


def test_a_checkpoint_saved_by_hand_after_the_fit_is_whole(tmp_path: Path) -> None:
    task, trainer = make_task(), make_trainer(tmp_path)
    trainer.fit(task, loader(TRAIN))
    trainer.save_checkpoint(tmp_path / "final.ckpt")
    expected = trainer.test(task, loader(TEST), verbose=False)
    path = str(tmp_path / "final.ckpt")
    assert make_trainer(tmp_path).test(make_task(seed=9), loader(TEST), ckpt_path=path, verbose=False) == expected
    again = make_trainer(tmp_path, max_epochs=2)
    again.fit(make_task(seed=9), loader(TRAIN), ckpt_path=path)
    assert again.global_step == 16


def test_a_moved_pair_still_loads(tmp_path: Path) -> None:
    saving_trainer(tmp_path / "here", 1).fit(make_task(), loader(TRAIN))
    shutil.move(tmp_path / "here", tmp_path / "there")
    path = str(tmp_path / "there" / "epoch=0.ckpt")
    (figures,) = make_trainer(tmp_path).test(make_task(), loader(TEST), ckpt_path=path, verbose=False)
    assert figures["test_logloss"] > 0


class Killed(BaseException):
    """Stands for the end of the process: nothing after it runs."""


class DiesWhileWriting(TorchCheckpointIO):
    """Leaves half a file and goes."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        Path(path).write_bytes(b"half a file")
        raise Killed


@pytest.mark.parametrize("moment", ["in the snapshot", "in the ckpt", "before the rename", "before the old one goes"])
def test_a_kill_at_any_moment_leaves_a_whole_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    path = str(tmp_path / "only.ckpt")
    task = make_task()
    trainer = make_trainer(tmp_path)
    trainer.fit(task, loader(TRAIN))
    trainer.save_checkpoint(path)
    before = make_trainer(tmp_path).test(make_task(), loader(TEST), ckpt_path=path, verbose=False)

    def die(*args: Any) -> None:
        raise Killed

    io: Any = trainer.strategy.checkpoint_io
    contents = {k: v for k, v in torch.load(path).items() if k != "embedding_snapshot"}
    snapshot = task._store.snapshot
    if moment == "in the snapshot":
        io = EmbeddingCheckpointIO(io.dense, die)
    elif moment == "in the ckpt":
        io = EmbeddingCheckpointIO(DiesWhileWriting(), snapshot)
    with monkeypatch.context() as patch:
        if moment == "before the rename":
            patch.setattr("hetrec.checkpoint_io.os.replace", die)
        elif moment == "before the old one goes":
            patch.setattr("hetrec.checkpoint_io.shutil.rmtree", die)
        with pytest.raises(Killed):
            io.save_checkpoint(contents, path)

    after = make_trainer(tmp_path).test(make_task(seed=9), loader(TEST), ckpt_path=path, verbose=False)
    assert after == before
    # The next save works and leaves one snapshot.
    trainer.save_checkpoint(path)
    assert len(list(snapshot_folder(path).iterdir())) == 1
    assert make_trainer(tmp_path).test(make_task(seed=9), loader(TEST), ckpt_path=path, verbose=False) == before


def test_saving_in_the_background_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="AsyncCheckpointIO"):
        make_trainer(tmp_path, plugins=[AsyncCheckpointIO()]).fit(make_task(), loader(TRAIN))


def test_remote_folders_are_refused(tmp_path: Path) -> None:
    io = EmbeddingCheckpointIO(TorchCheckpointIO(), lambda path: None)
    with pytest.raises(ValueError, match="local folders only"):
        io.save_checkpoint({"global_step": 1}, "s3://bucket/a.ckpt")


def test_names_with_dots_keep_their_own_snapshot() -> None:
    assert snapshot_folder("x/val_auc=0.75.ckpt") == Path("x/val_auc=0.75.embeddings")
    assert snapshot_folder("x/a-0.75") != snapshot_folder("x/a-0.76")


def test_a_resumed_table_keeps_the_seed_of_its_rows(tmp_path: Path) -> None:
    """Rows nobody has written come from the seed: a resume under another seed must not make other ones."""
    unseen = make_batches(SIMPLE, 2, seed=11)
    for batch in unseen:
        batch.sparse_features["c0"].values().add_(10_000)
    task = make_task()
    saving_trainer(tmp_path, 1).fit(task, loader(TRAIN))
    other = make_task()
    other.connect(LocalStore(), CACHE, EmbeddingOptimizer("adagrad", lr=0.1), seed=77)
    path = str(tmp_path / "epoch=0.ckpt")
    expected = torch.cat(make_trainer(tmp_path).predict(task, loader(unseen)))  # type: ignore[arg-type]
    found = torch.cat(make_trainer(tmp_path).predict(other, loader(unseen), ckpt_path=path))  # type: ignore[arg-type]
    assert torch.equal(found, expected)
    manifest = json.loads(next((tmp_path / "epoch=0.embeddings").glob("*/manifest.json")).read_text())
    assert len(manifest["tables"]) == 4


def test_rows_are_those_of_the_store_after_a_restore(tmp_path: Path) -> None:
    task = make_task()
    saving_trainer(tmp_path, 1).fit(task, loader(TRAIN))
    other = make_task(seed=9)
    make_trainer(tmp_path).test(other, loader(TEST), ckpt_path=str(tmp_path / "epoch=0.ckpt"), verbose=False)
    rows = []
    for each in (task, other):
        each.embeddings.open(each._store, CACHE, each._row_optimizer, seed=5)
        rows.append(torch.cat(initial_rows(each, keys_of(each, TRAIN))))
        each.embeddings.close()
    assert torch.equal(*rows)
