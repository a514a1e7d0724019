"""``data=synthetic``: generated Criteo-shaped rows whose best reachable AUC is known."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from datamodules.base import HetDataModule, Role
from datamodules.criteo_layout import CATEGORICAL, INTEGERS, LABEL
from datamodules.files import ParquetFiles
from datamodules.progress import say
from datamodules.reader import Columns, DenseColumn, SparseColumn
from datamodules.synthetic_rows import SyntheticRows, write_synthetic
from hetrec.data import FeatureSpec, SparseFeature, TableSpec

__all__ = ["SyntheticDataModule", "synthetic_folder"]


def synthetic_folder(parent: str | Path, rows: SyntheticRows) -> Path:
    """A folder below ``parent`` whose name tells the parameters: another set of parameters is another folder."""
    digest = hashlib.sha256(json.dumps(asdict(rows), sort_keys=True).encode()).hexdigest()[:8]
    return Path(parent) / f"rows{rows.rows}-scale{rows.scale:g}-seed{rows.seed}-{digest}"


class SyntheticDataModule(HetDataModule):
    """Generated rows of Criteo's shape: a label, 13 integers, 26 categorical columns in tables of known size.

    Keys are skewed by Zipf's law, values are missing, and labels are drawn from a hidden factorization machine, so the
    best AUC that any model can reach is known: it is printed, and in ``_manifest.json`` beside the rows. The rows are
    made once, in a folder below ``path``, and used again while the parameters are the same.

    Args:
        path: the folder below which the rows are kept.
        rows: how many rows; any number, they are written as they are made.
        scale: the tables have Criteo Kaggle's 26 cardinalities (33.8 million in all) times this, and one row more for
            missing values.
        skew: the mean of the columns' Zipf exponents.
        rows_seed: of the rows and of the hidden model.

    The others are those of :class:`datamodules.base.HetDataModule`.
    """

    def __init__(
        self,
        path: str = "data/synthetic",
        rows: int = 200_000,
        scale: float = 0.01,
        skew: float = 1.1,
        rows_seed: int = 0,
        val_fraction: float = 0.1,
        test_fraction: float = 0.1,
        split: Literal["hash", "order"] = "hash",
        batch_size: int | None = None,
        num_workers: int = 0,
        lookahead: int = 1,
        shuffle: bool = True,
        shuffle_buffer: int = 65536,
        seed: int = 0,
    ) -> None:
        super().__init__(
            path=path,
            val_fraction=val_fraction,
            test_fraction=test_fraction,
            split=split,
            batch_size=batch_size,
            num_workers=num_workers,
            lookahead=lookahead,
            shuffle=shuffle,
            shuffle_buffer=shuffle_buffer,
            seed=seed,
        )
        self.rows = SyntheticRows(rows=rows, scale=scale, skew=skew, seed=rows_seed)
        self.folder = synthetic_folder(self.path, self.rows)
        self.manifest: dict[str, Any] | None = None

    @property
    def spec(self) -> FeatureSpec:
        sized = zip(CATEGORICAL, self.rows.cardinalities, strict=True)
        return FeatureSpec(
            dense=INTEGERS,
            sparse=tuple(SparseFeature(name, name) for name in CATEGORICAL),
            tables=tuple(TableSpec(name, num_embeddings=n + 1) for name, n in sized),
            label=LABEL,
        )

    def columns(self, labelled: bool) -> Columns:
        sized = zip(CATEGORICAL, self.rows.cardinalities, strict=True)
        return Columns(
            dense=tuple(DenseColumn(n, log=True) for n in INTEGERS),
            sparse=tuple(SparseColumn(name, size=n) for name, n in sized),
            label=LABEL if labelled else None,
        )

    def prepare_data(self) -> None:
        self.manifest = write_synthetic(self.rows, self.folder)
        if not self._announced:
            self._announced = True
            say(
                f"synthetic rows in {self.folder}: {self.rows.rows:,}, click rate {self.manifest['click_rate']:.3f}; "
                f"the best reachable AUC is {self.manifest['best_auc']:.4f}, "
                f"log loss {self.manifest['best_logloss']:.4f}"
            )

    def open_files(self, role: Role) -> ParquetFiles:
        if not self.folder.exists():
            self.prepare_data()
        return ParquetFiles.open(self.folder)
