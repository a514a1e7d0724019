"""Criteo-shaped rows whose labels come from a hidden factorization machine.

Everything is a pure function of the parameters and the row's chunk: no table of the size of a cardinality is ever made.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from datamodules.atomic import make_once
from datamodules.criteo_layout import CATEGORICAL, INTEGERS, LABEL, kaggle_cardinalities
from datamodules.errors import DataError
from datamodules.keys import mix64
from datamodules.progress import progress_bar
from datamodules.scatter import scatter

__all__ = ["Hidden", "SyntheticRows", "write_synthetic"]

CHUNK_ROWS = 16384
_CHUNKS_PER_FILE = 256
_FORMAT = 1

# Shares of missing values, about as in the Kaggle set.
_MISSING_INTEGERS = (0.45, 0, 0.21, 0.21, 0.03, 0.22, 0.04, 0, 0.04, 0.45, 0.04, 0.76, 0.21)
_MISSING_CATEGORICAL = {3: 0.03, 4: 0.03, 6: 0.12, 12: 0.03, 16: 0.03, 19: 0.44, 20: 0.44, 21: 0.03, 22: 0.76, 24: 0.03}
_MISSING_CATEGORICAL |= {25: 0.44, 26: 0.44}

_CLICK_RATE = 0.256
_LOGIT_SPREAD = 1.45  # standard deviation of the true logits: a best AUC of about 0.8
# Shares of the logits' variance: weights of single keys, pairs of keys, and the integers.
_SHARES = (0.55, 0.25, 0.2)
_FACTORS = 4
_CALIBRATION_ROWS = 20_000

Float = npt.NDArray[np.float64]
Keys = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SyntheticRows:
    """The parameters of a synthetic data set.

    Args:
        rows: how many.
        scale: the cardinalities are Criteo Kaggle's times this (but at least 10, or the original if that is less).
        skew: the columns' Zipf exponents run from ``skew`` - 0.15 to ``skew`` + 0.15.
        seed: of everything.
    """

    rows: int
    scale: float
    skew: float
    seed: int

    def __post_init__(self) -> None:
        for name, value in (("rows", self.rows), ("scale", self.scale), ("skew", self.skew)):
            if value <= 0:
                raise DataError(f"data.{name}={value}; expected a number above 0")
        if self.seed < 0:
            raise DataError(f"data.seed={self.seed}; expected 0 or more")

    @cached_property
    def cardinalities(self) -> tuple[int, ...]:
        """Real keys of each column: ``0 .. cardinality - 1``. A missing value counts as key ``cardinality``."""
        return tuple(max(min(c, 10), round(c * self.scale)) for c in kaggle_cardinalities)

    @property
    def exponents(self) -> Float:
        """The columns' Zipf exponents."""
        order = np.random.default_rng([self.seed, 1]).permutation(len(CATEGORICAL))
        return self.skew + 0.3 * (order / (len(CATEGORICAL) - 1) - 0.5)

    def features(self, chunk: int, count: int) -> tuple[Float, Keys]:
        """Integers (NaN where missing), float64 (count, 13), and keys, int64 (count, 26), of a chunk of rows."""
        random = np.random.default_rng([self.seed, 2, chunk])
        integers = np.empty((count, len(INTEGERS)))
        for i, share in enumerate(_MISSING_INTEGERS):
            # Counts with a long tail; the second column goes down to -2, as Criteo's does.
            values = np.floor(np.exp(random.normal(1.0 + 0.35 * (i % 5), 1.3, count))) - (3 if i == 1 else 1)
            integers[:, i] = np.where(random.random(count) < share, np.nan, np.maximum(values, -2 if i == 1 else 0))
        keys = np.empty((count, len(CATEGORICAL)), dtype=np.int64)
        for i, (n, s) in enumerate(zip(self.cardinalities, self.exponents, strict=True)):
            # The inverse of the continuous distribution with density x**-s on [1, n + 1).
            u = random.random(count)
            x = (1 + u * ((n + 1.0) ** (1 - s) - 1)) ** (1 / (1 - s)) if abs(s - 1) > 1e-9 else (n + 1.0) ** u
            keys[:, i] = scatter(np.clip(x.astype(np.int64) - 1, 0, n - 1), n)
            missing = random.random(count) < _MISSING_CATEGORICAL.get(i + 1, 0)
            keys[missing, i] = n
        return integers, keys

    @cached_property
    def hidden(self) -> Hidden:
        return Hidden(self)

    def labels(self, chunk: int, logits: Float) -> npt.NDArray[np.int8]:
        """Labels of a chunk, drawn with the probabilities sigmoid(logits)."""
        uniform = np.random.default_rng([self.seed, 3, chunk]).random(len(logits))
        return (uniform < _sigmoid(logits)).astype(np.int8)


class Hidden:
    """The true model: logit = bias + weights of the keys + half the crossed factors + weights of the integers.

    Its parameters for a key are hashes of (seed, column, key).
    """

    def __init__(self, rows: SyntheticRows) -> None:
        self._salts = mix64(np.arange(2 * len(CATEGORICAL), dtype=np.uint64) + np.uint64(rows.seed * 1_000_003))
        self._dense = np.random.default_rng([rows.seed, 4]).normal(size=len(INTEGERS))
        sample = self._parts(*rows.features(-1 & 0x7FFFFFFF, _CALIBRATION_ROWS))
        self._mean = sample.mean(axis=0)
        self._scale = _LOGIT_SPREAD * np.sqrt(_SHARES) / sample.std(axis=0)
        centred = ((sample - self._mean) * self._scale).sum(axis=1)
        low, high = -20.0, 20.0
        for _ in range(60):  # bisection: the click rate grows with the bias
            self._bias = (low + high) / 2
            low, high = (self._bias, high) if _sigmoid(centred + self._bias).mean() < _CLICK_RATE else (low, self._bias)

    def logits(self, integers: Float, keys: Keys) -> Float:
        """True logits, float64 (n,), of integers (n, 13) and keys (n, 26) from ``SyntheticRows.features``."""
        return ((self._parts(integers, keys) - self._mean) * self._scale).sum(axis=1) + self._bias

    def _parts(self, integers: Float, keys: Keys) -> Float:
        """The three terms before scaling, (n, 3)."""
        columns = len(CATEGORICAL)
        single = _uniform(mix64(keys.view(np.uint64) ^ self._salts[:columns])[..., None] >> np.uint64(48)).sum(
            axis=(1, 2)
        )
        shifts = np.arange(0, 16 * _FACTORS, 16, dtype=np.uint64)
        factors = _uniform(
            (mix64(keys.view(np.uint64) ^ self._salts[columns:])[..., None] >> shifts) & np.uint64(0xFFFF)
        )
        crossed = ((factors.sum(axis=1) ** 2) - (factors**2).sum(axis=1)).sum(axis=1) / 2
        dense = np.log1p(np.maximum(np.nan_to_num(integers), 0)) @ self._dense
        return np.stack([single, crossed, dense], axis=1)


def _uniform(bits: npt.NDArray[np.uint64]) -> Float:
    """16 bits as a number of [-1, 1)."""
    return bits.astype(np.float64) / 32768.0 - 1.0


def _sigmoid(x: Float) -> Float:
    return 1 / (1 + np.exp(-x))


class _BestScores:
    """AUC and log loss of the true probabilities, from histograms of the logits."""

    def __init__(self) -> None:
        self._bins = np.linspace(-15, 15, 60_001)
        self._counts = np.zeros((2, len(self._bins) + 1), dtype=np.int64)
        self._loss = 0.0

    def add(self, logits: Float, labels: npt.NDArray[np.int8]) -> None:
        where = np.searchsorted(self._bins, logits)
        for label in (0, 1):
            self._counts[label] += np.bincount(where[labels == label], minlength=self._counts.shape[1])
        self._loss += float(np.logaddexp(0, np.where(labels == 1, -logits, logits)).sum())

    def summary(self) -> dict[str, float]:
        negative, positive = self._counts
        total = int(self._counts.sum())
        below = np.cumsum(negative) - negative
        pairs = float(positive.sum()) * float(negative.sum())
        auc = float((positive * (below + negative / 2)).sum()) / pairs if pairs else float("nan")
        return {"best_auc": auc, "best_logloss": self._loss / total, "click_rate": float(positive.sum()) / total}


def write_synthetic(rows: SyntheticRows, folder: Path) -> dict[str, Any]:
    """Writes the rows to ``folder`` as Parquet, once: a finished folder of the same parameters is used as it is.

    Returns:
        The manifest: the parameters, ``best_auc`` and ``best_logloss`` (those of the true probabilities, which no model
        beats but by chance), ``click_rate`` and the cardinalities.
    """

    def write(work: Path) -> dict[str, Any]:
        return {**_write_parts(rows, work).summary(), "cardinalities": list(rows.cardinalities)}

    return make_once(folder, {"format": _FORMAT, **asdict(rows)}, "data.path", write)


def _write_parts(rows: SyntheticRows, work: Path) -> _BestScores:
    best = _BestScores()
    chunks = -(-rows.rows // CHUNK_ROWS)
    integers_type, keys_type = pa.int32(), pa.int64()
    fields = [(LABEL, pa.int8()), *((n, integers_type) for n in INTEGERS), *((n, keys_type) for n in CATEGORICAL)]
    schema = pa.schema(fields)
    with progress_bar("rows") as bar:
        task = bar.add_task("synthetic rows", total=rows.rows)
        for first in range(0, chunks, _CHUNKS_PER_FILE):
            path = work / f"part-{first // _CHUNKS_PER_FILE:05d}.parquet"
            with pq.ParquetWriter(path, schema, compression="zstd") as writer:
                for chunk in range(first, min(first + _CHUNKS_PER_FILE, chunks)):
                    count = min(CHUNK_ROWS, rows.rows - chunk * CHUNK_ROWS)
                    integers, keys = rows.features(chunk, count)
                    logits = rows.hidden.logits(integers, keys)
                    labels = rows.labels(chunk, logits)
                    best.add(logits, labels)
                    columns = [pa.array(labels)]
                    columns += [pa.array(c, type=integers_type, from_pandas=True) for c in integers.T]
                    columns += [
                        pa.array(c, type=keys_type, mask=c == n)
                        for c, n in zip(keys.T, rows.cardinalities, strict=True)
                    ]
                    writer.write_batch(pa.record_batch(columns, schema=schema))
                    bar.update(task, advance=count)
    return best
