"""Deep & Cross Network: v1 (Wang et al., 2017, https://arxiv.org/abs/1708.05123) and v2 (https://arxiv.org/abs/2008.13535).

Shape suffixes: B rows of the batch, F sparse features, D embedding width, N dense columns, X = F * D + N, H hidden
width.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torchrec.modules.crossnet import CrossNet, VectorCrossNet
from torchrec.modules.mlp import MLP
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hetrec.ctr_task import CTRTask
from hetrec.data import FeatureSpec

__all__ = ["DCN"]

# vector: x_{l+1} = x_0 (w_l · x_l) + b_l + x_l;  matrix: x_{l+1} = x_0 * (W_l x_l + b_l) + x_l
CROSS_LAYERS = {"vector": VectorCrossNet, "matrix": CrossNet}


class DCN(CTRTask):
    """logit = w · [cross(x_0), deep(x_0)] + b, with x_0 the embeddings and the dense columns side by side.

    Args:
        spec: columns of the data.
        embedding_dim: D.
        mlp_sizes: widths of the hidden layers of the deep part.
        cross_layers: how many cross layers.
        cross: "vector" is v1 (one weight vector a layer, as in HET), "matrix" is v2 (a full-rank matrix a layer).
        row_init: rows start uniform in [-row_init, row_init].
    """

    def __init__(
        self,
        spec: FeatureSpec,
        embedding_dim: int = 16,
        mlp_sizes: tuple[int, ...] = (256, 256, 256),
        cross_layers: int = 3,
        cross: Literal["vector", "matrix"] = "vector",
        row_init: float = 0.01,
    ) -> None:
        super().__init__(spec, embedding_dim, row_init)
        if cross not in CROSS_LAYERS:
            raise ValueError(f"cross is {cross!r}; choose one of: {', '.join(CROSS_LAYERS)}")
        sizes = [len(spec.sparse) * embedding_dim + len(spec.dense), *mlp_sizes]
        self.cross = CROSS_LAYERS[cross](sizes[0], cross_layers)
        self.deep = MLP(sizes[0], sizes[1:])
        self.out = nn.Linear(sizes[0] + sizes[-1], 1)

    def forward(self, dense_BN: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Logits, float32, (B,)."""
        x0_BX = torch.cat([self.lookup(sparse).flatten(1), dense_BN], dim=1)
        stacked = torch.cat([self.cross(x0_BX), self.deep(x0_BX)], dim=1)  # (B, X + H)
        return self.out(stacked).squeeze(1).float()
