"""A permutation in closed form: what is popular by rank is spread over the ids."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

__all__ = ["rank_of", "scatter"]

Int64 = npt.NDArray[np.int64]


def _step(n: int) -> int:
    step = max(1, round(n * 0.6180339887))
    while math.gcd(step, n) != 1:
        step += 1
    return step


def scatter(ranks: Int64, n: int) -> Int64:
    """A permutation of 0 .. n - 1 (n below 3e9), so that neighbouring ranks do not lie side by side."""
    return (ranks * _step(n) + n // 3) % n


def rank_of(ids: Int64, n: int) -> Int64:
    """The inverse of :func:`scatter`."""
    return (ids - n // 3) % n * pow(_step(n), -1, n) % n
