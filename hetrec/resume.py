"""Going on from a checkpoint: which one, whether it fits, what is still to come of its epoch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import Timer
from torch import Tensor

from cache_backend.snapshot import MANIFEST

__all__ = [
    "KEYWORDS",
    "TASK",
    "check_fits",
    "newest_checkpoint",
    "rest_is_to_come",
    "run_name",
    "why_nothing_was_trained",
]

TASK = "task"  # in the .ckpt: the name of the task's class

#: What each word stands for within a run's folder. ``hpc`` is what Lightning writes when a scheduler ends a job.
KEYWORDS = {"last": "checkpoints/last.ckpt", "best": "checkpoints/best.ckpt", "hpc": "hpc_ckpt_*.ckpt"}


def run_name(model: str, data: str, subcommand: str) -> str:
    """What the folder of a run begins with, from the names of its classes."""
    return "-".join([*(name.removesuffix("DataModule").lower() for name in (model, data)), subcommand])


def newest_checkpoint(keyword: str, root: Path, name: str, dirpaths: Iterable[str] = ()) -> Path | None:
    """The newest checkpoint that ``keyword`` stands for among earlier runs, or None.

    Args:
        keyword: one of ``KEYWORDS``.
        root: the folder of the runs' folders.
        name: what the folders of runs that count begin with: see ``run_name``.
        dirpaths: folders that the user gave checkpoints instead; they count too.
    """
    found = [path for folder in root.glob(f"{name}-*") for path in folder.glob(KEYWORDS[keyword])]
    file = Path(KEYWORDS[keyword]).name
    found += [path for folder in dirpaths for path in Path(folder).glob(file)]
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)


def check_fits(
    checkpoint: Mapping[str, Any],
    snapshot: Path,
    tasks: Sequence[str],
    state: Mapping[str, Tensor],
    tables: Sequence[str],
) -> None:
    """Says, before anything is restored, that a checkpoint is of another model or of other data.

    Args:
        checkpoint: what the ``.ckpt`` holds.
        snapshot: the folder of its rows.
        tasks: the names of the task's class and of its bases.
        state: the task's ``state_dict``.
        tables: the names of the task's tables.

    Raises:
        ValueError: which of them differs.
    """
    remedy = "use the model and data options of the run that saved it"
    saved_by = checkpoint.get(TASK)
    if saved_by is not None and saved_by not in tasks:
        raise ValueError(f"the checkpoint was saved by the model {saved_by}, and this one is {tasks[0]}: {remedy}")
    stored = {table["name"] for table in json.loads((snapshot / MANIFEST).read_text())["tables"]}
    if missing := [name for name in tables if name not in stored]:
        raise ValueError(
            f"the checkpoint has no rows of {_some(missing)}, but of {_some(sorted(stored))}: it was trained on other "
            f"columns; {remedy}"
        )
    theirs = {name: list(tensor.shape) for name, tensor in checkpoint["state_dict"].items()}
    ours = {name: list(tensor.shape) for name, tensor in state.items()}
    for name in [*ours, *theirs]:
        if theirs.get(name) != ours.get(name):
            raise ValueError(
                f"the checkpoint's parameter {name} has shape {theirs.get(name, 'none')}, and the model's has "
                f"{ours.get(name, 'none')}: {remedy}"
            )


def rest_is_to_come(checkpoint: dict[str, Any], batches: float) -> None:
    """Where training stopped in the middle of an epoch (``max_steps``, ``max_time``), the epoch is not over.

    Lightning counts it as done where it saves a checkpoint then, and a resumed run would leave out its other batches.

    Args:
        checkpoint: with Lightning's loops; changed in place.
        batches: of an epoch.
    """
    fit = checkpoint["loops"]["fit_loop"]
    epochs, steps = fit["epoch_progress"], fit["epoch_loop.batch_progress"]
    stopped = epochs["current"]["processed"] == epochs["current"]["ready"] > 0
    if stopped and not steps["is_last_batch"] and steps["current"]["ready"] < batches:
        for progress in epochs.values():
            progress["processed"] = progress["ready"] - 1
            progress["completed"] = min(progress["completed"], progress["processed"])


def why_nothing_was_trained(trainer: Trainer) -> str:
    """Which limit a fit that made no step had reached before it began."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # a connector of the trainer sets it
    timers = [callback for callback in callbacks if isinstance(callback, Timer)]
    epochs: int = trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]  # declared too widely
    steps = trainer.global_step
    if 0 <= trainer.max_steps <= steps:
        limit = f"trainer.max_steps={trainer.max_steps} is reached: steps so far {steps}"
    elif trainer.max_epochs is not None and 0 <= trainer.max_epochs <= epochs:
        limit = f"trainer.max_epochs={trainer.max_epochs} is reached: epochs so far {epochs}"
    elif any((timer.time_remaining() or 0) <= 0 for timer in timers):
        limit = "trainer.max_time is used up, that of the checkpoint's run included"
    else:
        return "nothing was trained: trainer.limit_train_batches leaves no batch"
    return f"nothing was trained: {limit}. Raise it to train on"


def _some(names: Sequence[str]) -> str:
    listed = ", ".join(names[:5])
    return f"the table{'s' if len(names) > 1 else ''} {listed}{', ...' if len(names) > 5 else ''}"
