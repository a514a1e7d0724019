"""What a run measures: over a whole evaluation and all ranks, and the speed and traffic of training."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassF1Score
from torchmetrics.utilities.data import dim_zero_cat

from cache_backend.stats import LAG_BINS, CacheStats, lag_of_bin

__all__ = ["AUROC", "CTRMetrics", "Evaluation", "NodeMetrics", "TrainingMeter"]


class Evaluation(nn.Module):
    """Figures over a whole evaluation and all ranks: a module, so that they live where the model does."""

    #: Why a figure may be NaN: "the rows" ...
    why_undefined: str

    def compute_and_reset(self) -> dict[str, float]:
        """The figures, by name, of everything since the last reset (all ranks must call it together)."""
        raise NotImplementedError


class AUROC(BinaryAUROC):
    """Exact area under the ROC curve over everything it was given, on all ranks; ties count half.

    Where only one class (or nothing) was seen the area is undefined: NaN, where torchmetrics says 0.
    """

    def __init__(self) -> None:
        super().__init__(thresholds=None, validate_args=False)

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Takes probabilities and labels in [0, 1], both (B,). A label between 0 and 1 counts as the nearer of them."""
        self.preds.append(preds.detach())
        self.target.append((target.detach() >= 0.5).long())

    def compute(self) -> Tensor:  # type: ignore[override]  # BinaryAUROC's own signature
        target = dim_zero_cat(self.target) if len(self.target) else torch.empty(0)
        if int(target.sum()) in (0, target.numel()):
            return torch.tensor(math.nan, device=self.device)
        return super().compute()


class CTRMetrics(Evaluation):
    """``auc`` and ``logloss``."""

    why_undefined = "do not hold both labels, 0 and 1"

    def __init__(self) -> None:
        super().__init__()
        self.auc = AUROC()
        # A NaN loss must show as NaN. torchmetrics would leave it out; "replacing" NaN by NaN is its way to keep it.
        self.logloss = MeanMetric(nan_strategy=math.nan).set_dtype(torch.float64)

    def update(self, logits_B: Tensor, labels_B: Tensor) -> None:
        """Takes one batch; an empty one changes nothing."""
        if labels_B.numel() == 0:
            return
        self.auc.update(torch.sigmoid(logits_B), labels_B)
        self.logloss.update(binary_cross_entropy_with_logits(logits_B, labels_B).double(), labels_B.numel())

    def compute_and_reset(self) -> dict[str, float]:
        figures = {"auc": float(self.auc.compute()), "logloss": float(self.logloss.compute())}
        self.auc.reset()
        self.logloss.reset()
        return figures


class NodeMetrics(Evaluation):
    """``accuracy`` and ``macro_f1`` of classes; NaN where nothing was seen."""

    why_undefined = "hold no labelled node"

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.macro_f1 = MulticlassF1Score(num_classes, average="macro")
        self.seen = SumMetric()

    def update(self, logits_SC: Tensor, labels_S: Tensor) -> None:
        """Takes one batch; an empty one changes nothing."""
        if labels_S.numel() == 0:
            return
        self.accuracy.update(logits_SC, labels_S)
        self.macro_f1.update(logits_SC, labels_S)
        self.seen.update(labels_S.numel())

    def compute_and_reset(self) -> dict[str, float]:
        seen = float(self.seen.compute()) > 0
        found = {"accuracy": self.accuracy, "macro_f1": self.macro_f1}
        figures = {name: float(metric.compute()) if seen else math.nan for name, metric in found.items()}
        for metric in (*found.values(), self.seen):
            metric.reset()
        return figures


_COUNTERS = (
    *("steps", "unique", "hits", "fetched", "pushed", "evicted", "stale", "bypassed", "overflow", "nonfinite"),
    *("bytes_sent", "bytes_received", "wait_s"),
)


class TrainingMeter:
    """Speed, hit rate, traffic and observed staleness of training.

    The clock stands still between ``pause`` and ``resume``, so evaluation does not count as training time.

    Args:
        stats: reads the collection's cumulative counters of this rank.
        reduce: sums a float64 vector over all ranks.
    """

    def __init__(self, stats: Callable[[], CacheStats], reduce: Callable[[Tensor], Tensor]) -> None:
        self._stats = stats
        self._reduce = reduce
        self._samples = 0
        self._seconds = 0.0
        self._running_since: float | None = None
        self._origin = self._previous = self._read()

    def resume(self) -> None:
        """Starts the clock."""
        if self._running_since is None:
            self._running_since = time.perf_counter()

    def pause(self) -> None:
        """Stops the clock."""
        if self._running_since is not None:
            self._seconds += time.perf_counter() - self._running_since
            self._running_since = None

    def add(self, samples: int) -> None:
        """Counts trained samples of this rank."""
        self._samples += samples

    def window(self) -> dict[str, float]:
        """Rates since the last call of this, and row counts since the start (all ranks must call it together)."""
        now = self._read()
        rates = self._figures(now - self._previous)
        counts = {name: n for name, n in self._figures(now - self._origin).items() if name.startswith("rows_")}
        self._previous = now
        return rates | counts

    def total(self) -> dict[str, float]:
        """Rates and row counts since the start (all ranks must call it together)."""
        return self._figures(self._read() - self._origin)

    def lags(self) -> list[int]:
        """Observed staleness since the start, over all ranks: see ``CacheStats.lags``."""
        return [int(n) for n in self._reduce(self._read() - self._origin)[-LAG_BINS:].tolist()]

    def _read(self) -> Tensor:
        running = 0.0 if self._running_since is None else time.perf_counter() - self._running_since
        s = self._stats()
        counters = [getattr(s, name) for name in _COUNTERS]
        lags = [s.lags[lag_bin] for lag_bin in range(LAG_BINS)]
        return torch.tensor([self._samples, self._seconds + running, 1, *counters, *lags], dtype=torch.float64)

    def _figures(self, delta: Tensor) -> dict[str, float]:
        delta[2] = 1  # counts the ranks
        samples, seconds, ranks, *rest = self._reduce(delta).tolist()
        s = dict(zip(_COUNTERS, rest, strict=False))
        lags = rest[len(_COUNTERS) :]
        figures = {
            "samples_per_s": samples / max(seconds / ranks, 1e-9),
            "hit_rate": s["hits"] / max(s["unique"], 1.0),
            "exchange_wait": s["wait_s"] / max(seconds, 1e-9),
            "rows_fetched": s["fetched"],
            "rows_pushed": s["pushed"],
            "rows_evicted": s["evicted"],
            "rows_refreshed": s["stale"],
            "rows_bypassed": s["bypassed"],
            "rows_overflowed": s["overflow"],
            "rows_nonfinite": s["nonfinite"],
            "bytes_per_step": (s["bytes_sent"] + s["bytes_received"]) / max(s["steps"], 1.0),  # of one rank
        }
        if any(lags):  # a store with one client has nobody to lag behind
            figures |= {"staleness_p50": _quantile(lags, 0.5), "staleness_p99": _quantile(lags, 0.99)}
        return figures


def _quantile(lags: list[float], q: float) -> float:
    """The lag that a share ``q`` of the looks did not exceed, rounded up to the end of its bin."""
    reached = next(i for i, seen in enumerate(accumulate(lags)) if seen >= q * sum(lags))
    return float(lag_of_bin(reached))
