"""Pictures of a run: files in its folder, and in TensorBoard."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure
from pytorch_lightning import Trainer
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.utilities import rank_zero_only

from cache_backend.disk import room_for

__all__ = ["save_figure"]


@rank_zero_only
def save_figure(trainer: Trainer, path: Path, title: str, figure: Figure) -> None:
    """Writes a picture as PNG, and shows it under its title in TensorBoard."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with room_for(path):
        figure.savefig(path, dpi=130)
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_figure(title, figure, trainer.global_step)
