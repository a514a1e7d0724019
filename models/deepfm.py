"""DeepFM (Guo et al., 2017, https://arxiv.org/abs/1703.04247).

Shape suffixes: B rows of the batch, F sparse features, D embedding width, N dense columns.
"""

from __future__ import annotations

from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from models.wdl import WDL

__all__ = ["DeepFM", "pairwise_interactions"]


def pairwise_interactions(emb_BFD: Tensor) -> Tensor:
    """Sum over all pairs i < j of <v_i, v_j>, (B,): half of (square of the sum - sum of the squares), summed over D."""
    square_of_sum_BD = emb_BFD.sum(1).square()
    sum_of_square_BD = emb_BFD.square().sum(1)
    return 0.5 * (square_of_sum_BD - sum_of_square_BD).sum(1)


class DeepFM(WDL):
    """logit = linear(x) + fm(x) + deep(x): Wide & Deep, and a factorization machine over the same embeddings.

    Sparse features take part in all three, dense columns in the linear term and in the MLP. For continuous fields the
    paper offers two ways, the value itself or one-hot encoded intervals: to give a column a vector, and with it a place
    in the second-order term, hand its intervals in as a sparse feature. A bag of several keys is one field, whose
    vector is the pooled one.

    Args:
        spec: columns of the data.
        embedding_dim: D; the rows have D + 1 columns.
        mlp_sizes: widths of the hidden layers.
        row_init: rows start uniform in [-row_init, row_init].
    """

    def forward(self, dense_BN: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Logits, float32, (B,)."""
        weight_BF1, emb_BFD = self.lookup(sparse).tensor_split([1], dim=2)
        linear_B = self.wide(dense_BN, weight_BF1.squeeze(2))
        return (linear_B + pairwise_interactions(emb_BFD) + self.deep(dense_BN, emb_BFD)).float()
