"""Resume in the middle of an epoch through the whole program: rows, dense parameters and the position in the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from hetrec.cli import main

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
EVERY = 5  # steps between checkpoints; an epoch has 13


def run(data: Path, folder: Path, *words: str) -> Path:
    """Runs the program and returns its checkpoint."""
    common = [
        "model=wdl",
        "data=synthetic",
        f"data.path={data}",
        "data.rows=4000",
        "data.batch_size=256",
        "cache.rows=2000",
        "trainer.enable_progress_bar=false",
        f"trainer.default_root_dir={folder}",
        f"checkpoint.every_n_train_steps={EVERY}",
        "checkpoint.save_on_train_epoch_end=false",
    ]
    assert main(CONFIGS, [*common, *words]) == 0
    (checkpoint,) = folder.glob("*/checkpoints/last.ckpt")
    return checkpoint


def contents(checkpoint: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    loaded = torch.load(checkpoint)
    rows = [
        row
        for file in checkpoint.with_suffix(".embeddings").glob("*/*.parquet")
        for row in pq.read_table(file).to_pylist()
    ]
    return loaded, sorted(rows, key=lambda row: (row["table"], row["key"]))


def test_a_resume_in_the_middle_of_an_epoch_equals_going_on(tmp_path: Path) -> None:
    data = tmp_path / "data"
    whole = run(data, tmp_path / "whole", "trainer.max_epochs=2")
    stopped = run(data, tmp_path / "stopped", "trainer.max_epochs=2", f"trainer.max_steps={EVERY + 2}")
    assert torch.load(stopped)["global_step"] == EVERY
    resumed = run(data, tmp_path / "resumed", "trainer.max_epochs=2", f"--ckpt_path={stopped}")

    (expected, expected_rows), (found, found_rows) = contents(whole), contents(resumed)
    assert found["global_step"] == expected["global_step"] == 25
    for name in ("table", "key", "clock"):
        assert [row[name] for row in found_rows] == [row[name] for row in expected_rows]
    # A row that stays in the cache adds each step to its weights; one that comes back from the store had the sum of the
    # steps added: the last bit may differ.
    for name in ("weight", "state"):
        ours, theirs = (torch.tensor([row[name] for row in rows]) for rows in (found_rows, expected_rows))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    for name, parameter in expected["state_dict"].items():
        torch.testing.assert_close(found["state_dict"][name], parameter, rtol=1e-4, atol=1e-5)
