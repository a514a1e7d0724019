"""What a run came to: a small table, the same figures as ``summary.json``, and where the run's files are."""

from __future__ import annotations

import json
import math
from pathlib import Path

from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.utilities import rank_zero_only
from rich.console import Console
from rich.table import Table

from cache_backend.disk import room_for
from hetrec.task import HetTask

__all__ = ["RunSummary", "run_folder"]

METRICS = ("val_", "test_")  # what the metrics of evaluations begin with


def _is_count(name: str) -> bool:
    return name in ("epochs", "steps") or name.startswith(("rows_", "staleness_"))


def run_folder(trainer: Trainer) -> Path:
    """Where the run's files are: the first logger's folder, or ``default_root_dir`` if none. Call it on all ranks."""
    return Path(trainer.log_dir or trainer.default_root_dir)


class RunSummary(Callback):
    """Prints and writes the figures at the end of fit and of test.

    A test that follows a fit adds its figures to those of the fit. ``summary.json`` has the evaluations' metrics
    (``val_auc``, ...), ``epochs``, ``steps`` and the training figures that ``HetTask`` logs, as far as the run measured
    them; a figure that is undefined (an AUC of one class) is null.
    """

    def __init__(self) -> None:
        #: Set it where a test follows the fit anyway: then one table, at the end, shows both.
        self.test_follows = False
        self._figures: dict[str, float] = {}

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, HetTask)
        progress = {"epochs": float(trainer.current_epoch), "steps": float(trainer.global_step)}
        self._figures = self._metrics(trainer) | pl_module.training_figures | progress
        self._write(run_folder(trainer))

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._figures |= self._metrics(trainer)
        self._write(run_folder(trainer))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Here the progress bar has let go of the terminal.
        if stage == "test" or (stage == "fit" and not self.test_follows):
            self._print(run_folder(trainer))

    @staticmethod
    def _metrics(trainer: Trainer) -> dict[str, float]:
        found = [(name, float(value)) for name, value in trainer.callback_metrics.items() if name.startswith(METRICS)]
        return dict(sorted(found, key=lambda figure: figure[0].count("_")))  # the model's own before baselines

    @rank_zero_only
    def _write(self, folder: Path) -> None:
        figures = {name: int(value) if _is_count(name) else value for name, value in self._figures.items()}
        folder.mkdir(parents=True, exist_ok=True)
        plain = {name: None if math.isnan(value) else value for name, value in figures.items()}
        with room_for(folder / "summary.json"):
            (folder / "summary.json").write_text(json.dumps(plain, indent=2) + "\n")

    @rank_zero_only
    def _print(self, folder: Path) -> None:
        table = Table(show_header=False, title="summary", title_justify="left")
        table.add_column()
        table.add_column(justify="right")
        for name, value in self._figures.items():
            table.add_row(name, f"{value:.4f}" if abs(value) < 10 and not _is_count(name) else f"{value:,.0f}")
        console = Console()
        console.print(table)
        console.print(f"files of this run: {folder}", soft_wrap=True, highlight=False)
