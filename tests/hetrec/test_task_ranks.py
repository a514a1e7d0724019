"""Two ranks against one process on the same global batches.

Each rank has a store of its own here, so what a rank's rows gain is that rank's share: the shares must add up to what
one process learns from the whole batch.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer, seed_everything
from sklearn.metrics import log_loss, roc_auc_score
from torch import Tensor
from torch.optim import SGD
from torch.utils.data import DataLoader

from cache_backend import CacheConfig, EmbeddingOptimizer, LocalStore
from hetrec.data import Batch
from models.deepfm import DeepFM
from tests.models.ctr import SIMPLE, concatenate, initial_rows, keys_of, make_batches, make_trainer

RANKS = 2
# One step: afterwards the ranks' rows differ from those of one process, since each rank sees its own share only.
TRAIN = make_batches(SIMPLE, RANKS)
TEST = make_batches(SIMPLE, 3 * RANKS, seed=4)
KEYS_FROM = [*TRAIN, *TEST]


def make_task() -> DeepFM:
    seed_everything(0, verbose=False)
    task = DeepFM(SIMPLE, embedding_dim=4, mlp_sizes=(8,), row_init=0.1)
    task.connect(LocalStore(exclusive=False), CacheConfig(rows=512), EmbeddingOptimizer("sgd", lr=0.5), seed=5)
    task.optimize_with(partial(SGD, lr=0.1))
    return task


def rows_of(task: DeepFM) -> Tensor:
    return torch.cat(initial_rows(task, keys_of(task, KEYS_FROM)))


class Keep(Callback):
    """Writes a rank's rows and parameters before and after training, and what it logged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kept: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, DeepFM)
        self.kept["rows before"] = rows_of(pl_module)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *more: Any
    ) -> None:
        probabilities = torch.sigmoid(pl_module(batch.dense_features, batch.sparse_features))
        self.kept.setdefault("evaluated", []).append(torch.stack([probabilities, batch.labels]))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, DeepFM)
        pl_module.embeddings.flush()
        self.kept["rows"] = rows_of(pl_module)
        self.kept["dense"] = torch.cat([p.detach().flatten() for p in pl_module.parameters()])

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, DeepFM)
        self.kept["metrics"] = dict(trainer.callback_metrics)
        self.kept["figures"] = pl_module.training_figures
        torch.save(self.kept, self.folder / f"rank{trainer.global_rank}.pt")


class EveryOther(torch.utils.data.Dataset[Batch]):
    """A rank's share of the batches: rank, rank + 2, ... ; the rank is known once the process group is up."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches) // RANKS

    def __getitem__(self, index: int) -> Batch:
        if index >= len(self):
            raise IndexError(index)
        return self.batches[index * RANKS + torch.distributed.get_rank()]


def share(batches: list[Batch]) -> DataLoader[Batch]:
    return DataLoader(EveryOther(batches), batch_size=None)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    trainer = make_trainer(
        folder, devices=RANKS, strategy="ddp_spawn", callbacks=[Keep(folder)], use_distributed_sampler=False
    )
    trainer.fit(make_task(), share(TRAIN), share(TEST))
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("one")
    trainer = make_trainer(folder, callbacks=[Keep(folder)])
    trainer.fit(make_task(), DataLoader([concatenate(SIMPLE, TRAIN)], batch_size=None))
    return torch.load(folder / "rank0.pt", weights_only=False)


def test_what_the_ranks_rows_learn_adds_up_to_the_whole_batch(ranks: list[dict[str, Any]], one: dict[str, Any]) -> None:
    for rank in ranks:
        assert torch.equal(rank["rows before"], one["rows before"])
    learned = [rank["rows"] - rank["rows before"] for rank in ranks]
    assert all(float(share.abs().max()) > 1e-3 for share in learned)
    torch.testing.assert_close(sum(learned), one["rows"] - one["rows before"], rtol=1e-4, atol=1e-6)


def test_dense_parameters_agree_with_one_process(ranks: list[dict[str, Any]], one: dict[str, Any]) -> None:
    for rank in ranks:
        torch.testing.assert_close(rank["dense"], one["dense"], rtol=1e-5, atol=1e-7)


def test_metrics_are_over_all_ranks(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["metrics"] for rank in ranks)
    for name in ("val_auc", "val_logloss"):
        assert torch.equal(first[name], second[name])
    probabilities, labels = torch.cat([rows for rank in ranks for rows in rank["evaluated"]], dim=1).double().numpy()
    assert labels.size == len(TEST) * 32
    assert float(first["val_auc"]) == pytest.approx(roc_auc_score(labels, probabilities), abs=1e-6)
    assert float(first["val_logloss"]) == pytest.approx(log_loss(labels, probabilities), abs=1e-5)
    assert ranks[0]["figures"] == ranks[1]["figures"]
    counted = sum(keys.numel() for batch in TRAIN for keys in keys_of(make_task(), [batch]))
    assert ranks[0]["figures"]["rows_fetched"] >= counted


def test_more_ranks_on_a_store_inside_one_process_are_refused(tmp_path: Path) -> None:
    task = make_task()
    task.connect(LocalStore())
    trainer = make_trainer(tmp_path)
    task.trainer = trainer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(trainer), "world_size", 2)
        with pytest.raises(ValueError, match=r"2 ranks cannot share a LocalStore.*trainer\.devices=1"):
            task.setup("fit")
