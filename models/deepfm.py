"""DeepFM (Guo et al., 2017, https://arxiv.org/abs/1703.04247).

Shape suffixes: B rows of the batch, F sparse features, D embedding width, N dense columns.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrec.modules.mlp import MLP
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hetrec.ctr_task import CTRTask
from hetrec.data import FeatureSpec

__all__ = ["DeepFM", "pairwise_interactions"]


def pairwise_interactions(emb_BFD: Tensor) -> Tensor:
    """Sum over all pairs i < j of <v_i, v_j>, (B,): half of (square of the sum - sum of the squares), summed over D."""
    square_of_sum_BD = emb_BFD.sum(1).square()
    sum_of_square_BD = emb_BFD.square().sum(1)
    return 0.5 * (square_of_sum_BD - sum_of_square_BD).sum(1)


class DeepFM(CTRTask):
    """logit = linear(x) + fm(x) + deep(x); the factorization machine and the MLP share the embeddings.

    The first-order weight of a key rides as the first column of its embedding row: one lookup and one key on the wire
    serve all three parts. Sparse features take part in all three, dense columns in the linear term and in the MLP. For
    continuous fields the paper offers two ways, the value itself or one-hot encoded intervals: to give a column a
    vector, and with it a place in the second-order term, hand its intervals in as a sparse feature. A bag of several
    keys is one field, whose vector is the pooled one.

    Args:
        spec: columns of the data.
        embedding_dim: D; the rows have D + 1 columns.
        mlp_sizes: widths of the hidden layers.
        row_init: rows start uniform in [-row_init, row_init].
    """

    def __init__(
        self,
        spec: FeatureSpec,
        embedding_dim: int = 16,
        mlp_sizes: tuple[int, ...] = (256, 256, 256),
        row_init: float = 0.01,
    ) -> None:
        super().__init__(spec, embedding_dim, row_init, extra_columns=1)
        num_dense = len(spec.dense)
        self.dense_linear = nn.Linear(num_dense, 1, bias=False) if num_dense else None
        self.bias = nn.Parameter(torch.zeros(1))
        sizes = [len(spec.sparse) * embedding_dim + num_dense, *mlp_sizes]
        self.mlp = MLP(sizes[0], sizes[1:])
        self.out = nn.Linear(sizes[-1], 1, bias=False)

    def linear(self, dense_BN: Tensor, weight_BF: Tensor) -> Tensor:
        """<w, x> + b over sparse features (a pooled weight each) and dense columns."""
        linear_B = weight_BF.sum(1) + self.bias
        return linear_B if self.dense_linear is None else linear_B + self.dense_linear(dense_BN).squeeze(1)

    def deep(self, dense_BN: Tensor, emb_BFD: Tensor) -> Tensor:
        """The MLP over embeddings and dense columns."""
        hidden_BH = self.mlp(torch.cat([emb_BFD.flatten(1), dense_BN], dim=1))
        return self.out(hidden_BH).squeeze(1)

    def forward(self, dense_BN: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Logits, float32, (B,)."""
        weight_BF1, emb_BFD = self.lookup(sparse).tensor_split([1], dim=2)
        linear_B = self.linear(dense_BN, weight_BF1.squeeze(2))
        return (linear_B + pairwise_interactions(emb_BFD) + self.deep(dense_BN, emb_BFD)).float()
