"""The task of models that classify the nodes of a graph: a logit a class and seed, judged by accuracy and macro F1."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torchrec.sparse.jagged_tensor import JaggedTensor

from hetrec.data import FeatureSpec, GraphBatch, GraphSpec
from hetrec.embedding import HetEmbeddingCollection
from hetrec.metrics import NodeMetrics
from hetrec.tables import embedding_tables
from hetrec.task import HetTask

__all__ = ["NodeTask"]


class NodeTask(HetTask):
    """Base of the graph models (see ``HetTask``); ``forward(batch) -> logits (seeds, classes)`` is all that they add.

    The loss is that of the seeds; the nodes around them only lend their rows. Logs ``val_accuracy``, ``val_macro_f1``,
    ``test_accuracy``, ``test_macro_f1``; predicts classes.

    Args:
        spec: what is known of a node.
        embedding_dim: width of the embeddings, at least 1.
        row_init: rows start uniform in [-row_init, row_init].

    Raises:
        ValueError: a width or a range that is not positive; the spec of data that are not a graph.
    """

    monitor = "val_accuracy"
    spec: GraphSpec

    def __init__(self, spec: FeatureSpec, embedding_dim: int, row_init: float) -> None:
        if not isinstance(spec, GraphSpec):
            raise ValueError(
                f"{type(self).__name__} classifies the nodes of a graph, and the data have none: use data=graph or "
                "data=graph_synthetic"
            )
        tables = embedding_tables(spec, embedding_dim, row_init)
        super().__init__(spec, HetEmbeddingCollection(tables), lambda: NodeMetrics(spec.num_classes))
        #: Width of a node's input: an embedding a sparse feature, and the dense columns.
        self.node_width = embedding_dim * len(spec.sparse) + len(spec.dense)

    def lookup(self, batch: GraphBatch) -> Tensor:
        """The nodes' input, float32, (n, node width): their embeddings (the mean of a bag, zero where it is empty),
        then their dense columns."""
        jagged = self.embeddings(batch.sparse_features)
        parts = [self.on_device(_mean_of_bags(jagged[name])) for name in self.spec.sparse_names]
        return torch.cat([*parts, batch.dense_features], dim=1)

    def loss(self, batch: GraphBatch) -> Tensor:
        logits_SC = self(batch)
        # A rank may get no seed in its last step. The mean of none is NaN; its gradient must be zero.
        return cross_entropy(logits_SC, batch.labels) if batch.batch_size else logits_SC.sum()

    def evaluate(self, batch: GraphBatch, metrics: NodeMetrics) -> None:
        metrics.update(self(batch), batch.labels)

    def predict_step(self, batch: GraphBatch, batch_idx: int) -> Tensor:
        """Classes, int64, (seeds,)."""
        return self(batch).argmax(1)


def _mean_of_bags(jagged: JaggedTensor) -> Tensor:
    """(bags, D): the mean of each bag's rows."""
    lengths, rows = jagged.lengths(), jagged.values()
    if rows.size(0) == lengths.numel() and bool((lengths == 1).all()):
        return rows
    bag_of = torch.repeat_interleave(torch.arange(lengths.numel()), lengths.long())
    total = rows.new_zeros(lengths.numel(), rows.size(1)).index_add(0, bag_of, rows)
    return total / lengths.clamp(min=1).unsqueeze(1)
