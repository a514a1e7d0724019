"""Small click data for the tests of models and tasks, and the two ways to train on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Trainer
from torch import Tensor
from torch.utils.data import DataLoader
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hetrec.ctr_task import CTRTask
from hetrec.data import Batch, FeatureSpec, SparseFeature, TableSpec
from hetrec.lookahead import LookaheadLoader
from tests.models.plain import PlainModel

KEYS = 50

SIMPLE = FeatureSpec(
    dense=("d0", "d1", "d2"),
    sparse=tuple(SparseFeature(f"c{i}", f"t{i}") for i in range(4)),
    tables=tuple(TableSpec(f"t{i}", num_embeddings=KEYS if i else None) for i in range(4)),
    label="y",
)

# Two features on one table, bags of several keys, sum beside mean, and no dense columns.
BAGS = FeatureSpec(
    dense=(),
    sparse=(SparseFeature("a", "shared"), SparseFeature("tags", "tags"), SparseFeature("b", "shared")),
    tables=(TableSpec("shared"), TableSpec("tags", pooling="mean")),
    label="y",
)

WEIGHTED = FeatureSpec(
    dense=("d0",),
    sparse=(SparseFeature("a", "a", weight="wa"), SparseFeature("b", "b")),
    tables=(TableSpec("a"), TableSpec("b", num_embeddings=KEYS)),
    label="y",
)


def make_batches(
    spec: FeatureSpec, count: int, batch_size: int = 32, seed: int = 0, longest_bag: int = 1
) -> list[Batch]:
    """Random batches; the label leans on the first feature's key, so that there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        bags = len(spec.sparse) * batch_size
        shortest = 1 if longest_bag == 1 else 0
        lengths = torch.randint(shortest, longest_bag + 1, (bags,), generator=generator, dtype=torch.int32)
        values = torch.randint(0, KEYS, (int(lengths.sum()),), generator=generator)
        weights = torch.rand(values.numel(), generator=generator) + 0.5 if spec.is_weighted else None
        sparse = KeyedJaggedTensor(spec.sparse_names, values, weights, lengths=lengths)
        dense = torch.randn(batch_size, len(spec.dense), generator=generator)
        first = sparse[spec.sparse_names[0]]
        odd = torch.zeros(batch_size).index_add(
            0, torch.repeat_interleave(torch.arange(batch_size), first.lengths().long()), (first.values() % 2).float()
        )
        labels = (torch.rand(batch_size, generator=generator) < 0.25 + 0.5 * odd.clamp(max=1)).float()
        batches.append(Batch(dense, sparse, labels))
    return batches


def concatenate(spec: FeatureSpec, batches: Sequence[Batch]) -> Batch:
    """One batch of all rows."""
    features = []
    for name in spec.sparse_names:
        parts = [batch.sparse_features[name] for batch in batches]
        features.append((torch.cat([p.values() for p in parts]), torch.cat([p.lengths() for p in parts])))
    sparse = KeyedJaggedTensor(
        spec.sparse_names, torch.cat([v for v, _ in features]), lengths=torch.cat([n for _, n in features])
    )
    return Batch(torch.cat([b.dense_features for b in batches]), sparse, torch.cat([b.labels for b in batches]))


def loader(batches: Sequence[Batch], depth: int = 1) -> LookaheadLoader:
    return LookaheadLoader(DataLoader(list(batches), batch_size=None), depth)  # type: ignore[arg-type]


def make_trainer(folder: Path, **settings: Any) -> Trainer:
    """A quiet one-process trainer."""
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "default_root_dir": folder,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "max_epochs": 1,
    }
    return Trainer(**{**quiet, **settings})


def initial_rows(task: CTRTask, keys: Sequence[Tensor]) -> list[Tensor]:
    """Per table, the rows of the given keys as the (open) collection has them: each key alone in a bag of weight 1."""
    configs = task.embeddings.embedding_bag_configs()
    readers = {name: i for i, config in enumerate(configs) for name in config.feature_names}
    task.embeddings.eval()
    rows = []
    for i, config in enumerate(configs):
        first = config.feature_names[0]
        n = keys[i].numel()
        lengths = torch.cat([torch.full((n,), int(name == first), dtype=torch.int32) for name in readers])
        weights = torch.ones(n) if task.embeddings.is_weighted() else None
        pooled = task.embeddings(KeyedJaggedTensor(list(readers), keys[i], weights, lengths=lengths))
        rows.append(pooled[first].detach().clone())
    task.embeddings.train()
    return rows


def plain_bags(task: CTRTask, batch: Batch, keys: Sequence[Tensor]) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """The batch for a ``PlainModel``: per feature of the collection (row numbers, offsets, weights)."""
    bags = []
    for i, config in enumerate(task.embeddings.embedding_bag_configs()):
        for name in config.feature_names:
            feature = batch.sparse_features[name]
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), feature.lengths().long().cumsum(0)])
            bags.append((torch.searchsorted(keys[i], feature.values()), offsets, feature.weights_or_none()))
    return bags


def keys_of(task: CTRTask, batches: Iterable[Batch]) -> list[Tensor]:
    """Per table, the sorted distinct keys."""
    batches = list(batches)
    return [
        torch.cat([batch.sparse_features[name].values() for batch in batches for name in config.feature_names]).unique()
        for config in task.embeddings.embedding_bag_configs()
    ]


def copy_dense(source: CTRTask, target: PlainModel) -> None:
    """Gives the plain model the dense parameters of ours, by what they are in the formulas."""
    ours = dict(source.named_parameters())
    with torch.no_grad():
        for plain, name in target.names_in_the_project().items():
            target.get_parameter(plain).copy_(ours[name].reshape(target.get_parameter(plain).shape))
