"""The three models and the rows' optimizers once more, in plain PyTorch and from the papers' formulas: the references.

Nothing of the project is used here. A table is an ordinary ``nn.EmbeddingBag``; keys are row numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class PlainModel(nn.Module):
    """Common parts: one bag per feature (features may share a table), and a stack of ReLU layers.

    A bag batch is (values, offsets, weights or None) per feature.
    """

    def __init__(self, rows: Sequence[Tensor], tables: Sequence[int], modes: Sequence[str]) -> None:
        super().__init__()
        self.tables = list(tables)
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(r.shape[0], r.shape[1], _weight=r.clone(), mode=mode, include_last_offset=True, sparse=True)
            for r, mode in zip(rows, modes, strict=True)
        )

    def fields(self, bags: Sequence[tuple[Tensor, Tensor, Tensor | None]]) -> list[Tensor]:
        """One pooled row (B, width) a feature."""
        return [
            self.bags[table](values, offsets, per_sample_weights=weights)
            for table, (values, offsets, weights) in zip(self.tables, bags, strict=True)
        ]

    def dense_parameters(self) -> list[nn.Parameter]:
        return [p for name, p in self.named_parameters() if not name.startswith("bags.")]

    def names_in_the_project(self) -> dict[str, str]:
        """For each dense parameter here, the name of its counterpart in the project's model."""
        raise NotImplementedError

    def _layers(self, ours: str) -> dict[str, str]:
        count = sum(isinstance(layer, nn.Linear) for layer in self.layers)
        pairs = itertools.product(range(count), ("weight", "bias"))
        return {f"layers.{2 * i}.{part}": f"{ours}._mlp.{i}._linear.{part}" for i, part in pairs}


def relu_layers(sizes: Sequence[int]) -> nn.Sequential:
    return nn.Sequential(*(m for a, b in itertools.pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())))


class PlainWDL(PlainModel):
    """sigmoid(w·x + b + u·mlp(embeddings, dense))."""

    def __init__(self, rows, tables, modes, num_dense: int, sizes=(256, 256, 256)) -> None:  # type: ignore[no-untyped-def]
        super().__init__(rows, tables, modes)
        width = rows[0].shape[1] - 1
        self.w_dense = nn.Parameter(torch.zeros(num_dense))
        self.b = nn.Parameter(torch.zeros(()))
        self.layers = relu_layers([len(tables) * width + num_dense, *sizes])
        self.u = nn.Parameter(torch.zeros(sizes[-1]))

    def names_in_the_project(self) -> dict[str, str]:
        names = {"b": "bias", "u": "out.weight", **self._layers("mlp")}
        return names | ({"w_dense": "dense_linear.weight"} if self.w_dense.numel() else {})

    def first_order(self, dense: Tensor, fields: list[Tensor]) -> Tensor:
        return self.b + dense @ self.w_dense + torch.stack([row[:, 0] for row in fields]).sum(0)

    def deep(self, dense: Tensor, fields: list[Tensor]) -> Tensor:
        return self.layers(torch.cat([*(row[:, 1:] for row in fields), dense], dim=1)) @ self.u

    def forward(self, dense: Tensor, bags) -> Tensor:  # type: ignore[no-untyped-def]
        fields = self.fields(bags)
        return self.first_order(dense, fields) + self.deep(dense, fields)


class PlainDeepFM(PlainWDL):
    """The above plus the sum over pairs of features of <v_i, v_j>, pair by pair."""

    def forward(self, dense: Tensor, bags) -> Tensor:  # type: ignore[no-untyped-def]
        fields = self.fields(bags)
        pairs = itertools.combinations([row[:, 1:] for row in fields], 2)
        second_order = torch.zeros(dense.shape[0], dtype=dense.dtype)
        for v_i, v_j in pairs:
            second_order = second_order + (v_i * v_j).sum(1)
        return self.first_order(dense, fields) + second_order + self.deep(dense, fields)


class PlainDCN(PlainModel):
    """v1: x_{l+1} = x_0 (x_l · w_l) + b_l + x_l;  v2: x_{l+1} = x_0 * (W_l x_l + b_l) + x_l."""

    def __init__(self, rows, tables, modes, num_dense: int, sizes=(256, 256, 256), cross="vector", layers=3) -> None:  # type: ignore[no-untyped-def]
        super().__init__(rows, tables, modes)
        width = len(tables) * rows[0].shape[1] + num_dense
        shape = (width,) if cross == "vector" else (width, width)
        self.w_cross = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for _ in range(layers))
        self.b_cross = nn.ParameterList(nn.Parameter(torch.zeros(width)) for _ in range(layers))
        self.layers = relu_layers([width, *sizes])
        self.out = nn.Linear(width + sizes[-1], 1)

    def names_in_the_project(self) -> dict[str, str]:
        cross = itertools.product(range(len(self.w_cross)), (("w_cross", "kernels"), ("b_cross", "bias")))
        names = {f"{plain}.{i}": f"cross.{ours}.{i}" for i, (plain, ours) in cross}
        return {**names, **self._layers("deep"), "out.weight": "out.weight", "out.bias": "out.bias"}

    def forward(self, dense: Tensor, bags) -> Tensor:  # type: ignore[no-untyped-def]
        x0 = torch.cat([*self.fields(bags), dense], dim=1)
        x = x0
        for w, b in zip(self.w_cross, self.b_cross, strict=True):
            x = x0 * (x @ w)[:, None] + b + x if w.ndim == 1 else x0 * (x @ w.T + b) + x
        return self.out(torch.cat([x, self.layers(x0)], dim=1))[:, 0]


class PlainRowOptimizer:
    """SGD, Adagrad or row-wise Adagrad on the touched rows of the bags, once per row with its summed gradient."""

    def __init__(self, model: PlainModel, name: str, lr: float, eps: float = 1e-8) -> None:
        self.model, self.name, self.lr, self.eps = model, name, lr, eps
        width = 1 if name == "rowwise_adagrad" else None
        self.sums = [
            torch.zeros(b.weight.shape[0], width or b.weight.shape[1], dtype=b.weight.dtype) for b in model.bags
        ]

    @torch.no_grad()
    def step(self) -> None:
        for bag, sums in zip(self.model.bags, self.sums, strict=True):
            gradient = bag.weight.grad
            if gradient is None:
                continue
            gradient = gradient.coalesce()
            rows, g = gradient.indices()[0], gradient.values()
            if self.name == "sgd":
                bag.weight[rows] -= self.lr * g
            else:
                sums[rows] += g * g if self.name == "adagrad" else (g * g).mean(1, keepdim=True)
                bag.weight[rows] -= self.lr * g / (sums[rows].sqrt() + self.eps)
            bag.weight.grad = None
