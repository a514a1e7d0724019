"""Criteo as CSV with a header equals the same rows as Criteo's own text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from datamodules.criteo import CriteoDataModule
from datamodules.criteo_layout import CATEGORICAL, INTEGERS
from datamodules.errors import DataError
from hetrec.data import Batch

LINES = [
    "1,1,-2,260,,0,5,7,9,3,1,2,,4," + "68fd1e64,12345678,00000012," * 8 + ",a",
    "0,,0,,17668,3,,1,1,1,,1,1,1," + "80e26c9b,1e5,0," * 8 + "ffffffff,",
]
ROWS = [line.split(",") for line in LINES]
HEADER = ["label", *INTEGERS, *CATEGORICAL]


def batch_of(path: Path) -> Batch:
    data = CriteoDataModule(str(path), val_fraction=0.0, test_fraction=0.0, shuffle=False)
    data.prepare_data()
    data.setup("fit")
    (batch,) = data.train_dataloader()
    return batch


def as_floats(row: list[str]) -> list[str]:
    return [row[0], *(f"{int(text)}.0" if text else "" for text in row[1:14]), *row[14:]]


def test_a_header_and_integers_with_a_fraction(tmp_path: Path) -> None:
    text, table, mixed = (tmp_path / name for name in ("day_0", "train.csv", "mixed.csv"))
    text.write_text("".join("\t".join(row) + "\n" for row in ROWS))
    table.write_text("".join(",".join(row) + "\n" for row in [HEADER, *map(as_floats, ROWS)]))
    moved = [[HEADER[-1], "id", *HEADER[:-1]], *([row[-1], "7", *row[:-1]] for row in ROWS)]
    mixed.write_text("".join(",".join(row) + "\r\n" for row in moved))
    expected = batch_of(text)
    for batch in (batch_of(table), batch_of(mixed)):
        torch.testing.assert_close(batch.dense_features, expected.dense_features, rtol=0, atol=0)
        torch.testing.assert_close(batch.labels, expected.labels, rtol=0, atol=0)
        assert batch.sparse_features.keys() == expected.sparse_features.keys()
        assert batch.sparse_features.values().equal(expected.sparse_features.values())


def test_what_is_no_number_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    bad = [*ROWS[1][:3], "x1", *ROWS[1][4:]]
    path.write_text("".join(",".join(row) + "\n" for row in [HEADER, ROWS[0], bad]))
    with pytest.raises(DataError, match=r"train\.csv, line 3: column 'I3' holds 'x1'; expected float"):
        batch_of(path)
