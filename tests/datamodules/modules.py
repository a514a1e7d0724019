"""Data modules of small files, without a trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from datamodules.parquet import ParquetDataModule

Write = Callable[..., Path]


def module(path: Path, **options: Any) -> ParquetDataModule:
    """Every row is for training, in order; dense columns come ready."""
    defaults = {"val_fraction": 0.0, "test_fraction": 0.0, "shuffle": False, "batch_size": 3, "normalize": "none"}
    options = {**defaults, **options}
    made = ParquetDataModule(str(path), **options)
    made.setup("fit")
    return made


def column(data: ParquetDataModule, name: str) -> list[int]:
    """All keys of a feature, in order."""
    return [k for batch in data.train_dataloader() for k in batch.sparse_features[name].values().tolist()]


def labels(data: ParquetDataModule) -> list[float]:
    return [v for batch in data.train_dataloader() for v in batch.labels.tolist()]
