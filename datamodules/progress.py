"""Progress bars and one-line notices, on standard error, so that piped output stays clean."""

from __future__ import annotations

import os

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

__all__ = ["console", "progress_bar", "say"]


def console() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


def progress_bar(unit: str) -> Progress:
    """A bar with description, share, amount (``bytes``, or a count of ``unit``), elapsed and remaining time."""
    amount: list[ProgressColumn] = [DownloadColumn()] if unit == "bytes" else [MofNCompleteColumn(), TextColumn(unit)]
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        *amount,
        TimeRemainingColumn(),
        console=console(),
    )


def say(message: str) -> None:
    """Prints a line, on the first rank of every host only."""
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        console().print(message, markup=False)
