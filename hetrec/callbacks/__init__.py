"""Callbacks of a run: its best checkpoint, its summary, its observed staleness, and predictions as Parquet."""

from hetrec.callbacks.best_checkpoint import BestCheckpoint
from hetrec.callbacks.predictions import PredictionWriter
from hetrec.callbacks.staleness import ObservedStaleness
from hetrec.callbacks.summary import RunSummary

__all__ = ["BestCheckpoint", "ObservedStaleness", "PredictionWriter", "RunSummary"]
