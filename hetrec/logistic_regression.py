"""A logistic regression on hashed ids that is trained beside a model, at next to no cost: what a model must beat."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hetrec.data import Batch, FeatureSpec

__all__ = ["StreamedLogisticRegression"]

_BITS = 20
_LR = 0.1
_EPS = 1e-8


class StreamedLogisticRegression:
    """One weight a (feature, key), one a dense column, and a bias; one Adagrad step a batch on the mean log loss.

    The hashing trick (Weinberger et al., ICML 2009): weights of keys lie in one table of 2^20, where a few collide. A
    bag counts the sum of its keys' weights. Dense columns enter as sign(x) log(1 + |x|), missing ones as 0.
    """

    def __init__(self, spec: FeatureSpec) -> None:
        self._features = spec.sparse_names
        self._weights = torch.zeros((1 << _BITS) + len(spec.dense) + 1)  # of keys, of dense columns, the bias
        self._squares = torch.zeros_like(self._weights)
        self._gradient = torch.zeros_like(self._weights)  # zero between steps

    def logits(self, batch: Batch) -> Tensor:
        """float32 (B,), on the CPU."""
        slots, samples, dense = self._inputs(batch)
        return self._logits(slots, samples, dense)

    # index_select and its kin: brackets do the same ten times slower.

    def update(self, batch: Batch) -> None:
        """One step; none on an empty batch."""
        count = batch.batch_size
        if not count:
            return
        slots, samples, dense = self._inputs(batch)
        errors = (self._logits(slots, samples, dense).sigmoid() - batch.labels.cpu().float()) / count
        if not bool(errors.isfinite().all()):
            return
        self._gradient.index_add_(0, slots, errors.index_select(0, samples))
        self._gradient[1 << _BITS :] = torch.cat([dense.T @ errors, errors.sum()[None]])
        # A key that occurs several times stands here as often, each time with the same values to write.
        touched = torch.cat([slots, torch.arange(1 << _BITS, len(self._weights))])
        gradient = self._gradient.index_select(0, touched)
        squares = self._squares.index_select(0, touched) + gradient.square()
        weights = self._weights.index_select(0, touched) - _LR * gradient / (squares.sqrt() + _EPS)
        self._squares.index_copy_(0, touched, squares)
        self._weights.index_copy_(0, touched, weights)
        self._gradient.index_fill_(0, touched, 0)

    def state_dict(self) -> dict[str, Any]:
        """The weights that a key has trained."""
        used = self._squares.nonzero().squeeze(1)
        return {"slots": used, "weights": self._weights[used], "squares": self._squares[used]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._weights.zero_()[state["slots"]] = state["weights"]
        self._squares.zero_()[state["slots"]] = state["squares"]

    def _logits(self, slots: Tensor, samples: Tensor, dense: Tensor) -> Tensor:
        logits = dense @ self._weights[1 << _BITS : -1] + self._weights[-1]
        return logits.index_add_(0, samples, self._weights.index_select(0, slots))

    def _inputs(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """The weight and the sample of each key, int64 (N,); the dense columns, float32 (B, columns)."""
        sparse: KeyedJaggedTensor = batch.sparse_features
        lengths = sparse.lengths().cpu().view(len(self._features), -1)
        features = torch.arange(len(self._features)).repeat_interleave(lengths.sum(1))
        samples = torch.arange(lengths.size(1)).repeat(len(self._features)).repeat_interleave(lengths.flatten())
        # Fibonacci hashing: multiply by 2^64 / golden ratio and take the high bits. int64 products wrap as they should.
        mixed = (sparse.values().cpu().long() ^ (features + 1) * 0x632BE59BD9B4E019) * -0x61C8864680B583EB
        slots = (mixed >> (64 - _BITS)) & ((1 << _BITS) - 1)
        dense = batch.dense_features.cpu().double()
        dense = (dense.sign() * dense.abs().log1p()).nan_to_num(0.0, 0.0, 0.0).float()
        return slots, samples, dense
