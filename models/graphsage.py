"""GraphSAGE (Hamilton, Ying, Leskovec, 2017, https://arxiv.org/abs/1706.02216), with learned node embeddings as in HET.

Shape suffixes: N nodes of the batch, S seeds, W width of a node's input, H hidden width, C classes.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn
from torch_geometric.nn import SAGEConv
from torch_geometric.utils import trim_to_layer

from hetrec.data import FeatureSpec, GraphBatch
from hetrec.node_task import NodeTask

__all__ = ["GraphSAGE"]


class GraphSAGE(NodeTask):
    """Each layer joins a node's vector with the mean of its sampled neighbours'; the last one gives a logit a class.

    A node's input is its own embedding, those of its categorical columns (the mean of a bag), and its dense columns.

    Args:
        spec: what is known of a node, and the classes.
        embedding_dim: width of the embeddings.
        hidden_dim: H, of all layers but the last.
        num_layers: depth; ``data.fanouts`` needs as many hops.
        dropout: share of the inputs of every layer but the first that training sets to zero.
        row_init: rows start uniform in [-row_init, row_init].

    Raises:
        ValueError: no layer, or a batch with another number of hops.
    """

    def __init__(
        self,
        spec: FeatureSpec,
        embedding_dim: int = 128,
        hidden_dim: int = 128,
        num_layers: int = 2,
        dropout: float = 0.0,
        row_init: float = 0.05,
    ) -> None:
        super().__init__(spec, embedding_dim, row_init)
        if num_layers < 1:
            raise ValueError(f"num_layers is {num_layers}; give at least 1")
        widths = [self.node_width, *[hidden_dim] * (num_layers - 1), self.spec.num_classes]
        self.convs = nn.ModuleList(SAGEConv(before, after) for before, after in pairwise(widths))
        self.dropout = nn.Dropout(dropout)

    def forward(self, batch: GraphBatch) -> Tensor:
        """Logits, float32, (S, C)."""
        if len(batch.edges_per_hop) != len(self.convs):
            raise ValueError(
                f"the batch reaches {len(batch.edges_per_hop)} hops (data.fanouts), the model has {len(self.convs)} "
                f"layers; set model.num_layers={len(batch.edges_per_hop)} or give as many fan-outs"
            )
        x_NW, edges = self.lookup(batch), batch.edge_index
        for layer, conv in enumerate(self.convs):
            # What lies too far from the seeds to matter for the layers to come is left out.
            x_NW, edges, _ = trim_to_layer(layer, batch.nodes_per_hop, batch.edges_per_hop, x_NW, edges)
            if layer:
                x_NW = self.dropout(x_NW.relu())
            x_NW = conv(x_NW, edges)
        return x_NW[: batch.batch_size].float()
