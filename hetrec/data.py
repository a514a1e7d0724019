"""The data contract: what a datamodule offers and a model takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

__all__ = ["Batch", "FeatureSpec", "SparseFeature", "TableSpec"]


@dataclass(frozen=True)
class TableSpec:
    """One embedding table.

    ``num_embeddings`` is its size: keys are ``0 <= key < num_embeddings``, anything else is an error. ``None`` means
    the table has no size: every int64 is a key. ``expected_rows`` is a hint for unsized tables (how many distinct
    keys the data holds, about); nothing but the cache's default size depends on it.
    """

    name: str
    num_embeddings: int | None = None
    pooling: Literal["sum", "mean"] = "sum"
    expected_rows: int | None = None

    @property
    def rows(self) -> int | None:
        """Best known number of rows, or None."""
        return self.num_embeddings if self.num_embeddings is not None else self.expected_rows


@dataclass(frozen=True)
class SparseFeature:
    """One categorical feature: a column of keys, the table it reads, and (optionally) the column of its bag weights."""

    name: str
    table: str
    weight: str | None = None


@dataclass(frozen=True)
class FeatureSpec:
    """Dense columns, sparse features with their tables, and the label column.

    Raises:
        ValueError: a feature names a table that is not declared, or a name occurs twice.
    """

    dense: tuple[str, ...]
    sparse: tuple[SparseFeature, ...]
    tables: tuple[TableSpec, ...]
    label: str

    def __post_init__(self) -> None:
        tables = [t.name for t in self.tables]
        for what, names in (("table", tables), ("feature", [*self.dense, *(f.name for f in self.sparse)])):
            twice = sorted({n for n in names if names.count(n) > 1})
            if twice:
                raise ValueError(f"{what} names must be unique; more than once: {', '.join(twice)}")
        for feature in self.sparse:
            if feature.table not in tables:
                raise ValueError(
                    f"feature {feature.name!r} reads table {feature.table!r}, which is not declared; "
                    f"declared: {', '.join(tables)}"
                )

    @property
    def is_weighted(self) -> bool:
        """Whether any feature carries bag weights; then the batch's KeyedJaggedTensor has weights (1.0 elsewhere)."""
        return any(f.weight is not None for f in self.sparse)

    @property
    def sparse_names(self) -> list[str]:
        """Keys of the batch's KeyedJaggedTensor, in order."""
        return [f.name for f in self.sparse]


@dataclass
class Batch(Pipelineable):
    """One batch; the first three fields are those of ``torchrec.datasets.utils.Batch``.

    Attributes:
        dense_features: float32, (B, number of dense columns).
        sparse_features: keys ``spec.sparse_names``; values int64, lengths int32.
        labels: float32, (B,).
        upcoming: the sparse features of the batches that come next, nearest first (empty at the end of an epoch, or
            where nobody looks ahead). Their keys let the cache fetch rows before they are needed.
    """

    dense_features: torch.Tensor
    sparse_features: KeyedJaggedTensor
    labels: torch.Tensor
    upcoming: tuple[KeyedJaggedTensor, ...] = field(default=())

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(
            self.dense_features.to(device, non_blocking=non_blocking),
            self.sparse_features.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
            tuple(k.to(device, non_blocking=non_blocking) for k in self.upcoming),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        self.dense_features.record_stream(stream)
        self.sparse_features.record_stream(stream)
        self.labels.record_stream(stream)
        for features in self.upcoming:
            features.record_stream(stream)

    def pin_memory(self) -> Batch:
        return Batch(
            self.dense_features.pin_memory(),
            self.sparse_features.pin_memory(),
            self.labels.pin_memory(),
            tuple(k.pin_memory() for k in self.upcoming),
        )

    @property
    def batch_size(self) -> int:
        return self.labels.numel()
