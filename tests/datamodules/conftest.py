"""Small Parquet files, and readers of them without a trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datamodules.columns import SparseColumn
from datamodules.files import ParquetFiles
from datamodules.loader import ParquetLoader
from datamodules.plan import EpochPlan, Rows, make_units
from datamodules.reader import Columns, WindowReader


@pytest.fixture
def id_files(tmp_path: Path) -> Callable[..., Path]:
    """Writes files whose rows have the labels 0 and the ids 0, 1, 2 ... in order of files and rows."""

    def write(rows_per_file: Sequence[int], row_group: int = 1000) -> Path:
        folder = tmp_path / f"ids{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        first = 0
        for number, rows in enumerate(rows_per_file):
            table = pa.table(
                {"label": pa.array([0] * rows, pa.int8()), "id": pa.array(range(first, first + rows), pa.int64())}
            )
            pq.write_table(table, folder / f"part-{number:03d}.parquet", row_group_size=row_group)
            first += rows
        return folder

    return write


@pytest.fixture
def id_loader() -> Callable[..., ParquetLoader]:
    """A loader of the files that ``id_files`` wrote."""

    def make(folder: Path, rank: int = 0, world_size: int = 1, num_workers: int = 0, **options: Any) -> ParquetLoader:
        settings = {"batch_size": 10, "window_rows": 40, "shuffle": True, "seed": 0, **options}
        files = ParquetFiles.open(folder)
        rows = settings.pop("rows", Rows(0, files.rows))
        plan = EpochPlan(tuple(make_units(files.group_rows, rows)), rank=rank, world_size=world_size, **settings)
        columns = Columns(dense=(), sparse=(SparseColumn("id"),), label="label")
        return ParquetLoader(WindowReader(files, rows, columns, plan), ["id"], num_workers)

    return make


@pytest.fixture
def ids_of() -> Callable[..., list[list[int]]]:
    """The ids of every batch."""

    def read(loader: Any) -> list[list[int]]:
        return [batch.sparse_features.values().tolist() for batch in loader]

    return read


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes one file per table; a name may have folders."""

    def write(**tables: pa.Table | dict[str, Any]) -> Path:
        for name, table in tables.items():
            path = tmp_path / "data" / f"{name}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(table if isinstance(table, pa.Table) else pa.table(table), path)
        return tmp_path / "data"

    return write
