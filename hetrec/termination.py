"""SIGTERM (a scheduler ends the job) with several ranks: all of them end after the same step.

Lightning broadcasts from within the signal's handler, in the middle of whatever collective operation is under way, and
looks at the flag on every rank for itself; so ranks wait for each other for ever.
"""

from __future__ import annotations

import logging
from types import FrameType
from typing import Any

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.trainer.connectors.signal_connector import _SignalConnector
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.exceptions import SIGTERMException

__all__ = ["end_together"]

_log = logging.getLogger("pytorch_lightning")


class _TogetherConnector(_SignalConnector):
    """While a model is fitted, the ranks agree before each step whether one was told; else each ends by itself."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._told = False

    def register_signal_handlers(self) -> None:
        self._told = False
        super().register_signal_handlers()

    def _sigterm_notifier_fn(self, signum: Any, _: FrameType) -> None:
        if self._told:
            return
        self._told = True
        if self.trainer.is_global_zero:
            _log.info(f"Received SIGTERM: {signum}")
        launcher = self.trainer.strategy.launcher
        if launcher is not None:
            launcher.kill(signum)
        # An evaluation has no collective operation before its end, and changes nothing.
        self.received_sigterm = self.trainer.state.fn != TrainerFn.FITTING

    def agree(self) -> None:
        """Called by every rank before each step.

        Raises:
            SIGTERMException: one of them was told.
        """
        told = torch.tensor([int(self._told)], device=self.trainer.strategy.root_device)
        torch.distributed.all_reduce(told, op=torch.distributed.ReduceOp.MAX)
        if told.item():
            raise SIGTERMException


def end_together(trainer: Trainer) -> None:
    """Makes the ranks of a trainer agree on when they end after SIGTERM."""
    if trainer.world_size > 1:
        trainer._signal_connector = _TogetherConnector(trainer)
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = trainer._signal_connector.agree  # type: ignore[method-assign]
