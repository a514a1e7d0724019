"""The key stream of the benchmarks: 2,048 samples x 26 features a batch, Zipf(1.05) over 1,000,000 rows.

Row popularity falls as rank ** -1.05; a fixed permutation scatters ranks over row numbers. A batch depends on its
number alone; of its 53,248 keys about 18,200 are distinct.
"""

from __future__ import annotations

from functools import cache

import numpy as np

ROWS = 1_000_000
SAMPLES = 2048
FEATURES = 26
_EXPONENT = 1.05


@cache
def _distribution() -> tuple[np.ndarray, np.ndarray]:
    mass = np.cumsum(np.arange(1, ROWS + 1, dtype=np.float64) ** -_EXPONENT)
    return mass / mass[-1], np.random.default_rng(12345).permutation(ROWS)


def batch(number: int) -> np.ndarray:
    """Keys, int64 (FEATURES * SAMPLES,), feature-major as in a KeyedJaggedTensor."""
    mass, row_of_rank = _distribution()
    draws = np.random.default_rng([2022, number]).random(SAMPLES * FEATURES)
    ranks = np.minimum(np.searchsorted(mass, draws, side="right"), ROWS - 1)
    by_sample = row_of_rank[ranks].astype(np.int64).reshape(SAMPLES, FEATURES)
    return np.ascontiguousarray(by_sample.T).ravel()


def gradients(dim: int) -> np.ndarray:
    """The gradient of every batch, float32 (SAMPLES, FEATURES * dim)."""
    values = np.random.default_rng(7).standard_normal((SAMPLES * FEATURES, dim), dtype=np.float32)
    return values.reshape(SAMPLES, FEATURES * dim) * np.float32(1e-3)
