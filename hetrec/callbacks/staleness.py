"""Observed staleness: how far the cached rows lagged behind the other ranks' updates, as a plot."""

from __future__ import annotations

from matplotlib.figure import Figure
from pytorch_lightning import Callback, LightningModule, Trainer

from cache_backend.stats import LAG_BINS, lag_of_bin
from hetrec.callbacks.figures import save_figure
from hetrec.callbacks.summary import run_folder
from hetrec.task import HetTask

__all__ = ["ObservedStaleness", "staleness_figure"]


class ObservedStaleness(Callback):
    """Draws ``CacheStats.lags`` of a fit, over all ranks: ``staleness.png`` in the run's folder, and in TensorBoard.

    Nothing is drawn where no clock was looked at, as with one rank on its own store.
    """

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, HetTask)
        folder = run_folder(trainer)
        if any(pl_module.training_lags):
            figure = staleness_figure(pl_module.training_lags, pl_module.staleness)
            save_figure(trainer, folder / "staleness.png", "observed staleness", figure)


def staleness_figure(lags: list[int], staleness: int) -> Figure:
    """A histogram of ``CacheStats.lags`` with the bound s = ``staleness`` marked."""
    last = max(lag_bin for lag_bin, n in enumerate(lags) if n)
    shares = [100 * n / sum(lags) for n in lags[: last + 1]]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    bars = axes.bar(range(last + 1), shares, color="#4c72b0")
    axes.bar_label(bars, [f"{share:.2g} %" if share else "" for share in shares], fontsize=8)
    axes.set_xticks(range(last + 1), [_bin_name(lag_bin) for lag_bin in range(last + 1)], rotation=30)
    # Where a lag of exactly s ends: within its bin in proportion.
    digits = staleness.bit_length()
    below = (staleness + 1) / 2 ** (digits - 1) - 1 if digits else 1.0
    axes.axvline(digits - 0.5 + below, color="#c44e52", linestyle="--", label=f"bound s = {staleness}")
    axes.set_xlim(-0.6, max(last, digits) + 0.6)
    axes.set_xlabel("updates by others that a cached row had missed when the store looked at its clock")
    axes.set_ylabel("share of looks, %")
    axes.set_title("Observed staleness (beyond the bound: refreshed before use)")
    axes.legend()
    return figure


def _bin_name(lag_bin: int) -> str:
    low, high = (lag_of_bin(lag_bin - 1) + 1 if lag_bin else 0), lag_of_bin(lag_bin)
    if lag_bin == LAG_BINS - 1:
        return f"{low:,}+"
    return f"{low:,}" if low == high else f"{low:,}\N{EN DASH}{high:,}"
