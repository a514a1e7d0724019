"""Callbacks of a run: its summary, its observed staleness, and predictions as Parquet."""

from hetrec.callbacks.predictions import PredictionWriter
from hetrec.callbacks.staleness import ObservedStaleness
from hetrec.callbacks.summary import RunSummary

__all__ = ["ObservedStaleness", "PredictionWriter", "RunSummary"]
