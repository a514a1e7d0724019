"""Loss scaling on two ranks: an infinite gradient on one of them, of a parameter or of rows, is a step nobody takes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer, seed_everything
from pytorch_lightning.plugins.precision import MixedPrecision
from torch import Tensor
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cache_backend import CacheConfig, EmbeddingOptimizer, LocalStore
from hetrec.data import Batch
from models.deepfm import DeepFM
from tests.models.ctr import SIMPLE, initial_rows, keys_of, make_batches, make_trainer

RANKS, BAD_STEP, STEPS = 2, 1, 3
SCALE = 2.0**12
# Every rank's batches, one a step, and rank 1's second one with dense values that are infinite in fp16.
BATCHES = [make_batches(SIMPLE, STEPS, seed=rank) for rank in range(RANKS)]
EVERY = [batch for share in BATCHES for batch in share]
Where = Literal["a parameter", "rows"]


class Overflows(DeepFM):
    """The gradient of one rank's rows is infinite in one step; those of the dense parameters are not."""

    def lookup(self, sparse: KeyedJaggedTensor) -> Tensor:
        rows_BFD = super().lookup(sparse)
        if self.trainer.global_rank == 1 and self.trainer.fit_loop.batch_idx == BAD_STEP and rows_BFD.requires_grad:
            rows_BFD.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
        return rows_BFD


class Share(Dataset[Batch]):
    """A rank's batches; the rank is known once the process group is up."""

    def __init__(self, where: Where) -> None:
        self.where = where

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, step: int) -> Batch:
        if step >= STEPS:
            raise IndexError(step)
        rank = torch.distributed.get_rank()
        batch = BATCHES[rank][step]
        if self.where == "a parameter" and (rank, step) == (1, BAD_STEP):
            return Batch(torch.full_like(batch.dense_features, 1e30), batch.sparse_features, batch.labels)
        return batch


class Keep(Callback):
    """Writes a rank's rows, dense parameters and loss scale after every step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kept: list[tuple[Tensor, Tensor, float]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *more: Any) -> None:
        assert isinstance(pl_module, DeepFM)
        pl_module.embeddings.flush()
        rows = torch.cat(initial_rows(pl_module, keys_of(pl_module, EVERY)))
        pl_module.embeddings.train()
        dense = torch.cat([p.detach().flatten() for p in pl_module.parameters()])
        assert isinstance(trainer.precision_plugin, MixedPrecision)
        scaler = trainer.precision_plugin.scaler
        assert scaler is not None
        self.kept.append((rows, dense, scaler.get_scale()))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.save(self.kept, self.folder / f"rank{trainer.global_rank}.pt")


def fit(folder: Path, where: Where, **settings: Any) -> list[list[tuple[Tensor, Tensor, float]]]:
    """What each rank kept of each step. Each has a store of its own, so its rows show what this rank did."""
    seed_everything(0, verbose=False)
    task = (Overflows if where == "rows" else DeepFM)(SIMPLE, embedding_dim=4, mlp_sizes=(8,), row_init=0.1)
    task.connect(LocalStore(exclusive=False), CacheConfig(rows=512), EmbeddingOptimizer("sgd", lr=0.5), seed=5)
    task.optimize_with(partial(SGD, lr=0.1))
    # Lightning turns precision=16-mixed on a CPU into bf16, so the plugin is made by hand.
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=1000)
    trainer = make_trainer(
        folder,
        devices=RANKS,
        strategy="ddp_spawn",
        plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)],
        callbacks=[Keep(folder)],
        use_distributed_sampler=False,
        **settings,
    )
    trainer.fit(task, DataLoader(Share(where), batch_size=None))
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(RANKS)]


@pytest.mark.parametrize("where", ["a parameter", "rows"])
def test_an_infinite_gradient_on_one_rank_stops_the_step_of_all(tmp_path: Path, where: Where) -> None:
    ranks = fit(tmp_path, where)
    for steps in ranks:
        (rows, dense, scale), (rows_after, dense_after, scale_after), (rows_end, dense_end, scale_end) = steps
        assert scale == SCALE
        assert torch.equal(rows_after, rows)
        assert torch.equal(dense_after, dense)
        assert scale_after == scale_end == SCALE / 2
        assert rows_end.isfinite().all()
        assert float((rows_end - rows).abs().max()) > 1e-4
        assert float((dense_end - dense).abs().max()) > 1e-4
    assert torch.equal(ranks[0][-1][1], ranks[1][-1][1])


def test_accumulated_batches_are_given_up_together(tmp_path: Path) -> None:
    """One update of the first two batches, the second of which overflows, then one of the third."""
    ranks = fit(tmp_path, "rows", accumulate_grad_batches=2)
    for steps in ranks:
        (rows, dense, _), (rows_after, dense_after, _), (rows_end, _, _) = steps
        assert torch.equal(rows_after, rows)
        assert torch.equal(dense_after, dense)
        assert rows_end.isfinite().all()
        assert float((rows_end - rows).abs().max()) > 1e-4
    assert torch.equal(ranks[0][-1][1], ranks[1][-1][1])
