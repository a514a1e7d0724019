"""Callbacks of a run: its best checkpoint, summary, worth and observed staleness, and its predictions."""

from hetrec.callbacks.best_checkpoint import BestCheckpoint
from hetrec.callbacks.predictions import PredictionWriter
from hetrec.callbacks.staleness import ObservedStaleness
from hetrec.callbacks.summary import RunSummary
from hetrec.callbacks.worth import Worth

__all__ = ["BestCheckpoint", "ObservedStaleness", "PredictionWriter", "RunSummary", "Worth"]
