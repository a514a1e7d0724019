"""What the training rows say about their dense columns: counted in one pass, in parts that merge."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["LARGEST", "DenseStatistics"]

#: A value further from 0 counts as this one, so that its square, and a sum of squares, stays finite.
LARGEST = 1e140

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class DenseStatistics:
    """Counts and moments of N dense columns; missing values and infinite ones are counted and otherwise left out.

    Attributes:
        rows: how many rows were seen.
        missing: NaN values, (N,).
        infinite: infinite values, (N,).
        least, most: of the finite values, (N,); inf and -inf where there is none.
        mean, squares: (2, N), the mean and the sum of squared distances from it: first of the values, then of their
            signed logarithm sign(x) · log(1 + |x|).
    """

    rows: int
    missing: Array
    infinite: Array
    least: Array
    most: Array
    mean: Array
    squares: Array

    @classmethod
    def of(cls, values: Array) -> DenseStatistics:
        """Of rows, float64 (n, N), NaN where a value is missing."""
        finite = np.isfinite(values)
        held = np.clip(np.where(finite, values, 0.0), -LARGEST, LARGEST)
        both = np.stack([held, np.sign(held) * np.log1p(np.abs(held))])
        count = finite.sum(0)
        # Summed from the least value on: a sum of 1e12 + noise would round the noise away.
        least = np.where(count > 0, both.min(1, where=finite, initial=np.inf), 0.0)
        mean = least + np.where(finite, both - least[:, None], 0.0).sum(1) / np.maximum(count, 1)
        return cls(
            rows=len(values),
            missing=np.isnan(values).sum(0).astype(np.float64),
            infinite=np.isinf(values).sum(0).astype(np.float64),
            least=held.min(0, where=finite, initial=np.inf),
            most=held.max(0, where=finite, initial=-np.inf),
            mean=mean,
            squares=np.square(both - mean[:, None]).sum(1, where=finite),
        )

    @property
    def finite(self) -> Array:
        """Finite values, (N,)."""
        return self.rows - self.missing - self.infinite

    @property
    def std(self) -> Array:
        """Standard deviations, (2, N): of the values, of their signed logarithm. 0 where all values are equal."""
        varied = np.where(self.least < self.most, self.squares, 0.0)
        return np.sqrt(varied / np.maximum(self.finite, 1))

    def merge(self, other: DenseStatistics) -> DenseStatistics:
        """Of both parts' rows together (Chan, Golub, LeVeque, 1979)."""
        n, m = self.finite, other.finite
        total = np.maximum(n + m, 1)
        gap = other.mean - self.mean
        return DenseStatistics(
            rows=self.rows + other.rows,
            missing=self.missing + other.missing,
            infinite=self.infinite + other.infinite,
            least=np.minimum(self.least, other.least),
            most=np.maximum(self.most, other.most),
            mean=self.mean + gap * (m / total),
            squares=self.squares + other.squares + np.square(gap) * (n * m / total),
        )
