"""The best epoch's checkpoint, also where the AUC is undefined."""

from __future__ import annotations

from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor

__all__ = ["BestCheckpoint"]


class BestCheckpoint(ModelCheckpoint):
    """Lightning's ``ModelCheckpoint``, but where ``val_auc`` is undefined the least ``val_logloss`` is the best.

    An AUC is undefined (NaN) where the validation rows hold one label only. To Lightning no NaN is better than another,
    so that it would keep the first epoch.
    """

    def _monitor_candidates(self, trainer: Trainer) -> dict[str, Tensor]:
        candidates: dict[str, Tensor] = super()._monitor_candidates(trainer)
        undefined = self.monitor == "val_auc" and "val_auc" in candidates and bool(candidates["val_auc"].isnan())
        if undefined and "val_logloss" in candidates:
            rank_zero_warn("without val_auc, the epoch with the least val_logloss is the best checkpoint")
            candidates["val_auc"] = -candidates["val_logloss"]  # below any AUC
        return candidates
