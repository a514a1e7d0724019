"""The rows' optimizer as TorchRec sees it: rows are stepped in backward, at the learning rate that stands here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torchrec.optim.fused import FusedOptimizer

from cache_backend.config import EmbeddingOptimizer

__all__ = ["HetFusedOptimizer"]


class HetFusedOptimizer(FusedOptimizer):
    """A ``KeyedOptimizer`` whose one group carries the learning rate, which schedulers and TorchRec's optimizer
    wrappers (warm-up, say) change as that of any other. The rows' state is saved with the rows.

    Args:
        tables: names of the rows, such as ``embedding_bags.t1.weight``. Empty tensors stand for them: TorchRec tells
            the groups of several optimizers apart by the names of their parameters.
    """

    def __init__(self, optimizer: EmbeddingOptimizer, tables: Sequence[str]) -> None:
        params = {name: torch.empty(0) for name in tables}
        super().__init__(params, {}, [{"params": list(params.values()), "lr": optimizer.lr}])

    @property
    def lr(self) -> float:
        """What the next backward steps with."""
        (group,) = self.param_groups
        return float(group["lr"])

    def step(self, closure: Any = None) -> None:
        """Backward has made the step."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Gradients of rows are gone with the step."""
