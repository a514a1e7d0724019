"""Wide & Deep (Cheng et al., 2016, https://arxiv.org/abs/1606.07792).

Shape suffixes: B rows of the batch, F sparse features, D embedding width, N dense columns.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrec.modules.mlp import MLP
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hetrec.ctr_task import CTRTask
from hetrec.data import FeatureSpec

__all__ = ["WDL"]


class WDL(CTRTask):
    """logit = wide(x) + deep(x): a linear model over every feature, beside an MLP over embeddings and dense columns.

    The wide weight of a key rides as the first column of its embedding row: one lookup and one key on the wire serve
    both parts. The paper's hand-made cross-product features are left to the data (a crossed column is one more sparse
    feature), and both parts train with the same optimizer (the paper used FTRL for the wide one).

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

    def wide(self, dense_BN: Tensor, weight_BF: Tensor) -> Tensor:
        """w·x + b over sparse features (a pooled weight each) and dense columns."""
        wide_B = weight_BF.sum(1) + self.bias
        return wide_B if self.dense_linear is None else wide_B + self.dense_linear(dense_BN).squeeze(1)

    def deep(self, dense_BN: Tensor, emb_BFD: Tensor) -> Tensor:
        """The MLP over embeddings and dense columns."""
        hidden_BH = self.mlp(torch.cat([emb_BFD.flatten(1), dense_BN], dim=1))
        return self.out(hidden_BH).squeeze(1)

    def forward(self, dense_BN: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Logits, float32, (B,)."""
        weight_BF1, emb_BFD = self.lookup(sparse).tensor_split([1], dim=2)
        return (self.wide(dense_BN, weight_BF1.squeeze(2)) + self.deep(dense_BN, emb_BFD)).float()
