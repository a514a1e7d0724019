"""Whole training through cache and store against the same model in plain PyTorch, on real clicks.

Both sides begin with the same parameters and the same rows and see the same batches, so they may differ by rounding
only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim import SGD, Adagrad, Optimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cache_backend import CacheConfig, EmbeddingOptimizer, LocalStore
from hetrec.ctr_task import CTRTask
from hetrec.data import Batch, FeatureSpec, SparseFeature, TableSpec
from models.dcn import DCN
from models.deepfm import DeepFM
from models.wdl import WDL
from tests.models.ctr import copy_dense, initial_rows, keys_of, loader, make_trainer, plain_bags
from tests.models.plain import PlainDCN, PlainDeepFM, PlainModel, PlainRowOptimizer, PlainWDL

MODELS: dict[str, tuple[type[CTRTask], type[PlainModel]]] = {
    "wdl": (WDL, PlainWDL),
    "deepfm": (DeepFM, PlainDeepFM),
    "dcn": (DCN, PlainDCN),
}


class Rows:
    """Rows in memory: dense (n, N), keys (n, F), labels (n,)."""

    def __init__(self, dense: Tensor, keys: Tensor, labels: Tensor) -> None:
        self.dense, self.keys, self.labels = dense, keys, labels

    def batches(self, spec: FeatureSpec, size: int, order: Tensor | None = None) -> list[Batch]:
        order = torch.arange(len(self.labels)) if order is None else order
        made = []
        for rows in order.split(size):
            keys = self.keys[rows].T.reshape(-1)
            lengths = torch.ones(keys.numel(), dtype=torch.int32)
            sparse = KeyedJaggedTensor(spec.sparse_names, keys, lengths=lengths)
            made.append(Batch(self.dense[rows], sparse, self.labels[rows]))
        return made


def plain_spec(dense: Sequence[str], sparse: Sequence[str]) -> FeatureSpec:
    return FeatureSpec(
        tuple(dense), tuple(SparseFeature(c, c) for c in sparse), tuple(TableSpec(c) for c in sparse), "label"
    )


@pytest.fixture(scope="module")
def criteo(shared_data: Path) -> tuple[FeatureSpec, Rows, Rows]:
    """The Criteo sample, read by hand: log(x + 1) of the integers, the hexadecimals as they are, missing is -1."""
    text = (shared_data / "criteo" / "kaggle_8000.tsv").read_text()
    lines = [line.split("\t") for line in text.splitlines()]
    labels = torch.tensor([float(line[0]) for line in lines])
    dense = torch.tensor([[max(float(x or 0), 0.0) for x in line[1:14]] for line in lines]).log1p()
    keys = torch.tensor([[int(x, 16) if x else -1 for x in line[14:]] for line in lines])
    spec = plain_spec([f"I{i}" for i in range(13)], [f"C{i}" for i in range(26)])
    return spec, Rows(dense[:7200], keys[:7200], labels[:7200]), Rows(dense[7200:], keys[7200:], labels[7200:])


@pytest.fixture(scope="module")
def frappe(shared_data: Path) -> tuple[FeatureSpec, Rows, Rows]:
    def read(name: str) -> Rows:
        table = pq.read_table(shared_data / "frappe" / name)
        columns = [c for c in table.column_names if c != "label"]
        keys = torch.stack([torch.tensor(table[c].to_numpy()) for c in columns], dim=1).long()
        labels = torch.tensor(table["label"].to_numpy()).float()
        return Rows(torch.zeros(len(labels), 0), keys, labels)

    columns = [c for c in pq.read_schema(shared_data / "frappe" / "train.parquet").names if c != "label"]
    return plain_spec([], columns), read("train.parquet"), read("test.parquet")


def train_both(
    data: tuple[FeatureSpec, Rows, Rows],
    model: str,
    make_optimizer: Callable[[Any], Optimizer],
    rows: EmbeddingOptimizer,
    folder: Path,
    batch_size: int,
    epochs: int,
    cache: CacheConfig,
) -> tuple[float, float, Tensor, Tensor]:
    """Test AUC ours and plain, and the differences of all row weights and of all dense parameters after training."""
    spec, train, test = data
    make_ours, make_plain = MODELS[model]
    torch.manual_seed(1)
    task = make_ours(spec)  # type: ignore[call-arg]
    order = torch.randperm(len(train.labels), generator=torch.Generator().manual_seed(1))
    batches, test_batches = train.batches(spec, batch_size, order), test.batches(spec, 4096)
    keys = keys_of(task, batches + test_batches)

    task.embeddings.open(LocalStore(), cache, rows, seed=1)
    plain = make_plain(initial_rows(task, keys), range(len(keys)), ["sum"] * len(keys), len(spec.dense))  # type: ignore[call-arg]
    task.embeddings.close()
    copy_dense(task, plain)

    store = LocalStore()
    task.connect(store, cache, rows, seed=1)
    task.optimize_with(make_optimizer)
    trainer = make_trainer(folder, max_epochs=epochs)
    trainer.fit(task, loader(batches))
    (figures,) = trainer.test(task, loader(test_batches), verbose=False)

    dense, embeddings = make_optimizer(plain.dense_parameters()), PlainRowOptimizer(plain, rows.name, rows.lr)
    inputs = [(batch, plain_bags(task, batch, keys)) for batch in batches]
    for _ in range(epochs):
        for batch, bags in inputs:
            dense.zero_grad()
            binary_cross_entropy_with_logits(plain(batch.dense_features, bags), batch.labels).backward()
            dense.step()
            embeddings.step()
    with torch.no_grad():
        logits = torch.cat([plain(b.dense_features, plain_bags(task, b, keys)) for b in test_batches])
    auc = float(roc_auc_score(test.labels.numpy(), logits.numpy()))

    task.embeddings.open(store, cache, rows, seed=1)
    trained = initial_rows(task, keys)
    task.embeddings.close()
    ours = dict(task.named_parameters())
    with torch.no_grad():
        rows_apart = torch.cat([(a - b.weight).flatten() for a, b in zip(trained, plain.bags, strict=True)])
        dense_apart = torch.cat(
            [
                (ours[name].flatten() - plain.get_parameter(counterpart).flatten())
                for counterpart, name in plain.names_in_the_project().items()
            ]
        )
    return figures["test_auc"], auc, rows_apart, dense_apart


OPTIMIZERS = {
    "sgd": (lambda p: SGD(p, lr=0.05), EmbeddingOptimizer("sgd", lr=0.05)),
    "adagrad": (lambda p: Adagrad(p, lr=0.01), EmbeddingOptimizer("adagrad", lr=0.01)),
    "rowwise_adagrad": (lambda p: Adagrad(p, lr=0.01), EmbeddingOptimizer("rowwise_adagrad", lr=0.01)),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_criteo_training_matches_plain_pytorch(
    criteo: tuple[FeatureSpec, Rows, Rows], tmp_path: Path, model: str, optimizer: str
) -> None:
    dense, rows = OPTIMIZERS[optimizer]
    # Room for about as many rows as one batch has: rows leave all the time.
    cache = CacheConfig(rows=1024, staleness=3)
    auc, plain_auc, rows_apart, dense_apart = train_both(criteo, model, dense, rows, tmp_path, 128, 1, cache)
    assert auc == pytest.approx(plain_auc, abs=0.005)
    if optimizer == "sgd":
        assert float(rows_apart.abs().max()) < 1e-5
        # How far rounding errors grow in single weights differs from processor to processor.
        assert float(dense_apart.square().mean().sqrt()) < 1e-5
        assert float(dense_apart.abs().max()) < 1e-3
    else:
        # Adagrad's first step is the sign of a gradient times the learning rate, however small the gradient: where a
        # rounding error is its sign, single weights go another way. On the average they must not.
        assert float(rows_apart.square().mean().sqrt()) < 1e-3
        assert float(dense_apart.square().mean().sqrt()) < 1e-2


@pytest.mark.parametrize("model", MODELS)
def test_frappe_training_matches_plain_pytorch(
    frappe: tuple[FeatureSpec, Rows, Rows], tmp_path: Path, model: str
) -> None:
    rows = EmbeddingOptimizer("rowwise_adagrad", lr=0.1)
    auc, plain_auc, _, _ = train_both(
        frappe, model, lambda p: Adagrad(p, lr=0.02), rows, tmp_path, 1024, 3, CacheConfig(rows=2048)
    )
    assert auc == pytest.approx(plain_auc, abs=0.005)
    assert auc > 0.92
