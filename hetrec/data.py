"""The data contract: what a datamodule offers and a model takes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable
from typing_extensions import Self

__all__ = ["NODE", "Batch", "FeatureSpec", "GraphBatch", "GraphSpec", "Normalization", "SparseFeature", "TableSpec"]

#: The sparse feature of a graph's batches that holds the nodes' own ids, and its table.
NODE = "node"


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


#: How a raw dense column is normalised, see :class:`hetrec.dense_normalizer.DenseNormalizer`.
Normalization = Literal["auto", "standard", "log", "none"]


@dataclass(frozen=True)
class FeatureSpec:
    """Dense columns, sparse features with their tables, and the label column.

    Attributes:
        normalize: where dense columns come raw, how each of them is to be normalised; empty where they come ready.

    Raises:
        ValueError: a feature names a table that is not declared, or a name occurs twice.
    """

    dense: tuple[str, ...]
    sparse: tuple[SparseFeature, ...]
    tables: tuple[TableSpec, ...]
    label: str
    normalize: tuple[Normalization, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        assert len(self.normalize) in (0, len(self.dense))
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


@dataclass(frozen=True)
class GraphSpec(FeatureSpec):
    """Nodes of a graph to classify: what is known of a node (``dense``, ``sparse``), and the classes.

    The first sparse feature is ``NODE``, the node's own id, in a table with a row for every node. Further ones are
    bags of keys a node.

    Attributes:
        num_classes: labels are ``0 .. num_classes - 1``.
    """

    num_classes: int


@dataclass
class Batch(Pipelineable):
    """One batch; the first three fields are those of ``torchrec.datasets.utils.Batch``.

    Attributes:
        dense_features: float32, (B, number of dense columns). Raw ones (``spec.normalize``) are float64, and NaN where
            missing.
        sparse_features: keys ``spec.sparse_names``; values int64, lengths int32.
        labels: float32, (B,).
        upcoming: the sparse features of the batches that come next, nearest first (empty at the end of an epoch, or
            where nobody looks ahead). Their keys let the cache fetch rows before they are needed.
    """

    dense_features: torch.Tensor
    sparse_features: KeyedJaggedTensor
    labels: torch.Tensor
    upcoming: tuple[KeyedJaggedTensor, ...] = field(default=())

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        return replace(
            self,
            dense_features=self.dense_features.to(device, non_blocking=non_blocking),
            sparse_features=self.sparse_features.to(device, non_blocking=non_blocking),
            labels=self.labels.to(device, non_blocking=non_blocking),
            upcoming=tuple(k.to(device, non_blocking=non_blocking) for k in self.upcoming),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        self.dense_features.record_stream(stream)
        self.sparse_features.record_stream(stream)
        self.labels.record_stream(stream)
        for features in self.upcoming:
            features.record_stream(stream)

    def pin_memory(self) -> Self:
        return replace(
            self,
            dense_features=self.dense_features.pin_memory(),
            sparse_features=self.sparse_features.pin_memory(),
            labels=self.labels.pin_memory(),
            upcoming=tuple(k.pin_memory() for k in self.upcoming),
        )

    @property
    def batch_size(self) -> int:
        return self.labels.numel()


@dataclass
class GraphBatch(Batch):
    """Seed nodes with their sampled neighbourhood: n nodes, of which the first S, in their order, are the seeds.

    What the base class has per row is here per node, but for the labels.

    Attributes:
        dense_features: float32, (n, number of dense columns).
        sparse_features: keys ``spec.sparse_names``, stride n; values int64, lengths int32. ``NODE`` comes
            first, one id a node, so the first S values are the seeds' ids.
        labels: int64, (S,): the seeds' classes, -1 where unknown (prediction only).
        edge_index: int64, (2, E'): for every sampled edge the position (not the id) of the neighbour, then that of the
            node it is a neighbour of; grouped by hop.
        nodes_per_hop: S, then how many nodes each hop added; sums to n.
        edges_per_hop: how many edges each hop added; sums to E'. With the nodes per hop, and with ``edge_index`` as it
            is, this is what ``torch_geometric.utils.trim_to_layer`` takes.
    """

    edge_index: torch.Tensor = field(kw_only=True)
    nodes_per_hop: list[int] = field(kw_only=True)
    edges_per_hop: list[int] = field(kw_only=True)

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        moved = super().to(device, non_blocking)
        return replace(moved, edge_index=self.edge_index.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: torch.Stream) -> None:
        super().record_stream(stream)
        self.edge_index.record_stream(stream)

    def pin_memory(self) -> Self:
        return replace(super().pin_memory(), edge_index=self.edge_index.pin_memory())
