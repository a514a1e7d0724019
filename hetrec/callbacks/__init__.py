"""Callbacks of a run: its summary, and predictions as Parquet."""

from hetrec.callbacks.predictions import PredictionWriter
from hetrec.callbacks.summary import RunSummary

__all__ = ["PredictionWriter", "RunSummary"]
