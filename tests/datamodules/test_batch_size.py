"""Without a batch size, one that suits the number of training rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datamodules.parquet import ParquetDataModule


@pytest.mark.parametrize(
    ("rows", "given", "expected"),
    [(1, None, 1), (100, None, 16), (5_000, None, 64), (70_000, None, 256), (5_000_000, None, 2048), (5_000, 33, 33)],
)
def test_the_root_of_the_rows_as_a_power_of_two(
    rows: int, given: int | None, expected: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = {"label": np.arange(rows, dtype=np.int8) % 2, "user": np.zeros(rows, np.int8)}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet", row_group_size=100_000)
    split = {"val_path": str(tmp_path / "rows.parquet"), "test_fraction": 0.0}
    data = ParquetDataModule(str(tmp_path / "rows.parquet"), sparse=["user"], dense=[], batch_size=given, **split)
    data.setup("fit")
    for _ in range(2):
        assert next(iter(data.train_dataloader())).batch_size == expected
    assert next(iter(data.val_dataloader())).batch_size == min(rows, given or 2048)
    data.teardown()
    said = capsys.readouterr().err.count(f"for {rows:,} training rows; data.batch_size sets another size")
    assert said == (given is None)
