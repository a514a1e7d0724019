"""Keeps messages that tell the user nothing out of a run's output. Each has its reason beside it."""

from __future__ import annotations

import logging
import sys
import warnings

__all__ = ["quiet"]

# Starts of warnings, as regular expressions.
_WARNINGS = (
    # Lightning: both task and data module do, each so that looked-ahead batches stay the same objects.
    r"You have overridden `transfer_batch_to_device` in",
    # Lightning: the run's folder is new, and holds what the logger beside it wrote.
    r"Experiment logs directory .* exists and is not empty",
    # Lightning: batches come from a reader thread or from the data module's own workers; more workers are no remedy.
    r"The '\w+_dataloader' does not have many workers",
    r"Your `IterableDataset` has `__len__` defined",
    # Lightning: it cannot see that the data module does not shuffle under overfit_batches.
    r"You requested to overfit but enabled \w+ dataloader shuffling",
    # jsonargparse: the default device of a callback (StochasticWeightAveraging) is not written to config.yaml.
    r"\s*Unable to serialize instance (cpu|cuda)",
    # Lightning: a run of fewer steps than that is told by its summary.
    r"The number of training batches \(\d+\) is smaller than the logging interval",
    # Lightning: without a validation split there is no best epoch to keep. The last one is kept all the same.
    r"`ModelCheckpoint\(monitor='val_auc'\)` could not find the monitored key",
    r"Total length of `list` across ranks is zero",
    # Lightning: every run has a folder of its own, so the checkpoints of the run that is continued lie in another.
    r"The dirpath has changed from",
    # Lightning: predictions are written in the order of the rows and need no indices.
    r"Couldn't infer the batch indices fetched from your dataloader",
    # torchmetrics 1.0.3, which torchrec pins, gathers the ranks' predictions in a way that torch deprecates.
    r"Using a non-tuple sequence for multidimensional indexing",
    # Lightning calls what the torch it supports has deprecated.
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
)

# Starts of lines that Lightning logs.
_LINES = (
    "💡 Tip:",  # recommends a hosted service
    "TPU available:",  # not supported here
    "`Trainer.fit` stopped: `max_epochs=",  # the ordinary end
    # One line of ours says how many ranks there are, and what they share.
    "Initializing distributed: GLOBAL_RANK:",
    f"{'-' * 100}\ndistributed_backend=",
)


def quiet(another_speaks: bool = False) -> None:
    """Installs the filters. Calling it again changes nothing.

    Args:
        another_speaks: this is one rank of several on the machine and not the first, which gives the same warnings.
    """
    for start in _WARNINGS:
        warnings.filterwarnings("ignore", message=start)
    warnings.formatwarning = _short

    # fbgemm_gpu calls logging.basicConfig(level=DEBUG) where it is imported, which shows every line of every library.
    root = logging.getLogger()
    ours = [handler for handler in root.handlers if type(handler) is logging.StreamHandler]
    if ours:
        for handler in ours:
            root.removeHandler(handler)
        root.setLevel(logging.WARNING)
        for name in ("pytorch_lightning", "lightning_fabric"):
            logger = logging.getLogger(name)
            logger.propagate = False
            logger.handlers = [_ToStderr()]

    for name in ("pytorch_lightning.utilities.rank_zero", "lightning_fabric.utilities.distributed"):
        logger = logging.getLogger(name)
        if _tells_something not in logger.filters:
            logger.addFilter(_tells_something)
    if another_speaks:
        for name in ("pytorch_lightning", "lightning_fabric"):
            logging.getLogger(name).setLevel(logging.WARNING)  # "Seed set to 42", once a rank
        warnings.simplefilter("ignore")
    # torchrec calls a function that warns about its own name.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


class _ToStderr(logging.StreamHandler):
    """Writes to what standard error is at that moment: notebooks replace it, and so does who captures output."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _short(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
    """Warnings that are meant for users go without the place in a library that they come from."""
    where = "" if issubclass(category, UserWarning) else f" ({category.__name__}, {filename}:{lineno})"
    return f"warning: {message}{where}\n"


def _tells_something(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_LINES)
