"""Raw dense columns on a scale that a network can learn from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hetrec.data import Normalization
from hetrec.dense_statistics import LARGEST, DenseStatistics

__all__ = ["LIMIT", "DenseNormalizer"]

#: Normalised values end here, in standard deviations. What a cross layer multiplies should not be larger.
LIMIT = 5.0

_TAIL = 10.0  # of standard deviations: a column with training values further from their mean has a long tail

_NAMED = 12  # columns that a line names before it only counts them


class DenseNormalizer(nn.Module):
    """Standardises dense columns by the training rows' mean and standard deviation, which are part of the state dict.

    ``standard`` is z = (x - mean) / std. ``log`` is the same of sign(x) · log(1 + |x|). ``auto`` is ``log`` where
    training values lie more than 10 standard deviations from their mean, and less far by their logarithms; else
    ``standard``.
    z ends at ± ``LIMIT``. ``none`` leaves values as they are. A missing value (NaN, infinite) becomes 0, so it is the
    mean where there is one. A column whose training values are all equal is 0 throughout.

    Before ``fit``, means are 0 and standard deviations 1.

    Args:
        normalize: how, for each of the N columns.
    """

    fitted: Tensor
    log_N: Tensor
    mean_N: Tensor
    scale_N: Tensor
    limit_N: Tensor

    def __init__(self, normalize: Sequence[Normalization]) -> None:
        super().__init__()
        self.normalize = tuple(normalize)
        raw = torch.tensor([how == "none" for how in normalize])
        limit = torch.where(raw, torch.finfo(torch.float32).max, LIMIT)
        self.register_buffer("fitted", torch.tensor(False))
        self.register_buffer("log_N", torch.tensor([how == "log" for how in normalize]))
        self.register_buffer("mean_N", torch.zeros(len(raw), dtype=torch.float64))
        self.register_buffer("scale_N", torch.ones(len(raw), dtype=torch.float64))  # 1 / std, 0 for a std of 0
        self.register_buffer("limit_N", limit.double())

    def fit(self, statistics: DenseStatistics) -> None:
        """Takes means and standard deviations from these statistics, and chooses for ``auto``."""
        std, mean = statistics.std, statistics.mean
        ends = np.stack([statistics.least, statistics.most])
        both = np.stack([ends, np.sign(ends) * np.log1p(np.abs(ends))], axis=1)  # (end, values or logarithms, N)
        scale = np.divide(1.0, std, out=np.zeros_like(std), where=std > 0)
        known = statistics.finite > 0
        reach = np.abs(np.where(known, both, mean) - mean).max(0) * scale  # (2, N), in standard deviations
        log = np.where(_are(self.normalize, "auto"), (reach[0] > _TAIL) & (reach[1] < reach[0]), False)
        log |= _are(self.normalize, "log")
        left = _are(self.normalize, "none")
        self.log_N.copy_(torch.from_numpy(log))
        self.mean_N.copy_(torch.from_numpy(np.where(left, 0.0, np.where(log, mean[1], mean[0]))))
        self.scale_N.copy_(torch.from_numpy(np.where(left, 1.0, np.where(log, scale[1], scale[0]))))
        self.fitted.fill_(True)

    def forward(self, dense_BN: Tensor) -> Tensor:
        """Raw values, any float type, (B, N), to normalised ones, float32, (B, N), all finite."""
        # In float64: a time in milliseconds has no minutes in float32.
        known_BN = dense_BN.isfinite()
        x_BN = dense_BN.double().where(known_BN, 0.0).clamp(-LARGEST, LARGEST)
        x_BN = torch.where(self.log_N, x_BN.sign() * x_BN.abs().log1p(), x_BN)
        z_BN = ((x_BN - self.mean_N) * self.scale_N).clamp(-self.limit_N, self.limit_N)
        return z_BN.where(known_BN, 0.0).float()

    def report(self, names: Sequence[str], statistics: DenseStatistics) -> list[str]:
        """What was done to each column and what was missing, a line each."""
        left = _are(self.normalize, "none")
        constant = ~left & (self.scale_N.cpu().numpy() == 0)
        log = self.log_N.cpu().numpy() & ~constant
        lines = [
            f"dense columns {what}: {_listed(names, which)}"
            for what, which in (
                ("standardised", ~left & ~log & ~constant),
                ("standardised after a signed log, for their long tails or as named", log),
                ("left as they are", left),
                ("without effect, since all training values are equal or missing", constant),
            )
            if which.any()
        ]
        for what, count in (("missing", statistics.missing), ("infinite, taken as missing", statistics.infinite)):
            if count.any():
                shown = [f"{name} ({n:,.0f})" for name, n in zip(names, count, strict=True)]
                lines.append(f"dense values {what}, of {statistics.rows:,} training rows: {_listed(shown, count > 0)}")
        return lines


def _are(normalize: Sequence[Normalization], how: Normalization) -> npt.NDArray[np.bool_]:
    return np.array([each == how for each in normalize], dtype=bool)


def _listed(names: Sequence[str], which: npt.NDArray[np.bool_]) -> str:
    chosen = [name for name, is_one in zip(names, which, strict=True) if is_one]
    more = len(chosen) - _NAMED
    return ", ".join(chosen[:_NAMED]) + (f" and {more} more" if more > 0 else "")
