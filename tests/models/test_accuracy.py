"""What the committed configurations reach on real clicks, through the whole program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetrec.cli import main

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def run(folder: Path, *words: str) -> dict[str, float]:
    """The summary of one run of the program."""
    assert main(CONFIGS, [*words, f"trainer.default_root_dir={folder}", "trainer.enable_progress_bar=false"]) == 0
    (summary,) = folder.glob("*/summary.json")
    figures: dict[str, float] = json.loads(summary.read_text())
    return figures


@pytest.mark.parametrize("model", ["wdl", "deepfm", "dcn"])
def test_one_epoch_of_the_criteo_sample(
    shared_data: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, model: str
) -> None:
    converted = tmp_path_factory.getbasetemp() / "criteo sample"
    words = ["experiment=criteo-sample", f"model={model}", f"data.path={shared_data / 'criteo' / 'kaggle_8000.tsv'}"]
    seeds = (1, 2, 3)
    runs = [
        run(tmp_path / str(seed), *words, f"data.cache_dir={converted}", f"seed_everything={seed}") for seed in seeds
    ]
    assert all(figures["epochs"] == 1 and figures["steps"] == 113 for figures in runs)  # 7,200 rows
    assert sum(figures["test_auc"] for figures in runs) / len(runs) >= 0.70


def test_deepfm_on_frappe(shared_data: Path, tmp_path: Path) -> None:
    frappe = shared_data / "frappe"
    figures = run(
        tmp_path,
        "experiment=frappe",
        f"data.path={frappe / 'train.parquet'}",
        f"data.test_path={frappe / 'test.parquet'}",
    )
    assert figures["test_auc"] >= 0.93


@pytest.mark.parametrize("model", ["wdl", "deepfm", "dcn"])
def test_the_papers_settings_run(shared_data: Path, tmp_path: Path, model: str) -> None:
    sample = shared_data / "criteo" / "short_rows_1000.tsv"
    figures = run(
        tmp_path, f"experiment=het-{model}", f"data.path={sample}", f"data.cache_dir={tmp_path / 'converted'}"
    )
    assert figures["steps"] == 7  # 80% of 1,000 rows in batches of 128
    assert figures["rows_evicted"] > 0  # a tenth of the rows is cached
