"""Cache policies on the key stream: how many distinct rows of a batch miss, and what deciding it costs.

200 batches of 53,248 keys (18,200 distinct) through caches of a tenth of the rows, batch t + 1 planned while batch t is
in use, as in training. A second stream moves all keys by half the table at batch 100: the hot set of yesterday is cold.
All policies plan each batch in turn, so that the machine's noise meets all of them. A row that passes through without a
slot is a miss. ``Belady`` is the optimum: the same number of rows in one set, with all of the future known. Costs are
processor time of the planning thread, per distinct row: of the plan, the cut of what leaves included, and, for
``lookahead``, of telling the cache about a batch that comes into view.

    python benchmarks/policies.py [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keystream
import numpy as np
import torch
from report import report_all
from rich.progress import track

from cache_backend import EmbeddingOptimizer, LocalStore, TableSchema, ops
from cache_backend.cache import Cache, CachePlan, UniqueRows

BATCHES = 200
ROWS = keystream.ROWS // 10
SPLITS = torch.arange(0, keystream.FEATURES * keystream.SAMPLES + 1, keystream.SAMPLES)
TABLES = torch.zeros(keystream.FEATURES, dtype=torch.int32)
#: Policy and the depth of the loader's lookahead, ``data.lookahead``.
VARIANTS = [("lru", 1), ("lfu", 1), ("light_lfu", 1), ("tiny_lfu", 1)] + [("lookahead", depth) for depth in (4, 16, 64)]


def unique(number: int, batches: int, drifts: bool) -> UniqueRows:
    """The distinct rows of a batch; in the stream that drifts, the second half's keys are moved."""
    keys = torch.from_numpy(keystream.batch(number))
    if drifts and number >= batches // 2:
        keys = (keys + keystream.ROWS // 2) % keystream.ROWS
    return UniqueRows(*ops.unique_rows(keys, SPLITS, TABLES))


@dataclass
class Run:
    """One policy on its way through a stream. miss: share of each batch; plan_ns, reveal_ns: processor time a row."""

    policy: str
    depth: int
    rows: int = ROWS
    miss: list[float] = field(default_factory=list)
    plan_ns: list[float] = field(default_factory=list)
    reveal_ns: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = LocalStore()
        self.store.open([TableSchema("t", 4, "sgd", 7, -0.01, 0.01, 0.0)])
        self.cache = Cache(self.rows, 4, EmbeddingOptimizer("sgd"), self.store, 100, self.policy)
        self.in_use: deque[CachePlan] = deque()
        self.seen = 0

    def step(self, window: deque[UniqueRows]) -> None:
        """Plan the first batch of ``window`` while the one before is in use."""
        rows = window[0].keys.numel()
        if self.cache.looks_ahead:
            new = list(window)[self.seen : self.depth]
            self.seen += len(new) - 1  # the first one is planned now
            start = time.thread_time_ns()
            for batch in new:
                self.cache.reveal(batch)
            if new:
                self.reveal_ns.append((time.thread_time_ns() - start) / sum(batch.keys.numel() for batch in new))
        before, start = self.cache.stats.misses, time.thread_time_ns()
        plan = self.cache.plan(window[0])
        self.plan_ns.append((time.thread_time_ns() - start) / rows)
        self.miss.append((self.cache.stats.misses - before) / rows)
        self.cache.commit(plan, self.store.exchange(plan.request))
        self.in_use.append(plan)
        if len(self.in_use) == 2:
            self.cache.release(self.in_use.popleft())


def belady(batches: int, drifts: bool) -> list[float]:
    """The least possible misses: of the cached rows and a batch's own, those stay that are used again first."""
    keys = [unique(number, batches, drifts).keys.numpy() for number in range(batches)]
    never = batches
    next_use = np.full(keystream.ROWS, never, dtype=np.int32)
    after: list[np.ndarray] = [np.empty(0)] * batches
    for number in reversed(range(batches)):
        after[number] = next_use[keys[number]]
        next_use[keys[number]] = number
    cached = np.zeros(keystream.ROWS, dtype=bool)
    held = np.empty(0, dtype=np.int64)
    miss = []
    for number in range(batches):
        is_held = cached[keys[number]]
        miss.append(1 - float(is_held.mean()))
        next_use[keys[number]] = after[number]
        held = np.concatenate([held, keys[number][~is_held]])
        if len(held) > ROWS:
            order = np.argpartition(next_use[held], ROWS)
            cached[held[order[ROWS:]]] = False
            held = held[order[:ROWS]]
        cached[held] = True
    return miss


def run_all(batches: int, drifts: bool) -> list[Run]:
    runs = [Run(policy, depth) for policy, depth in VARIANTS]
    window: deque[UniqueRows] = deque()
    coming = 0
    name = "the hot set moves" if drifts else "one hot set"
    for _ in track(range(batches), description=name, transient=True):
        while coming < batches and len(window) < max(run.depth for run in runs):
            window.append(unique(coming, batches, drifts))
            coming += 1
        for run in runs:
            run.step(window)
        window.popleft()
    return runs


def row(policy: str, steady: list[float], drifting: list[float], optimum: float) -> dict[str, Any]:
    half = len(steady) // 2
    miss = float(np.mean(steady[half:]))
    return {
        "policy": policy,
        "miss %": 100 * miss,
        "above Belady": 100 * (miss - optimum),
        "moved, 10 batches on": 100 * float(np.mean(drifting[half + 5 : half + 15])),
        "50 on": 100 * float(np.mean(drifting[half + 45 : half + 55])),
        "last": 100 * drifting[-1],
    }


def plot(file: Path, curves: dict[str, list[float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    for name, miss in curves.items():
        smooth = np.convolve(miss, np.ones(3) / 3, "valid")
        axes.plot(range(1, len(smooth) + 1), smooth, label=name, color="black" if name == "Belady" else None, lw=1.2)
    half = len(miss) // 2
    axes.axvline(half, color="grey", lw=0.8, ls=":")
    axes.text(half - 1, 0.79, "the hot set moves", color="grey", va="top", ha="right")
    axes.set(xlabel="batch", ylabel="share of a batch's distinct rows that miss", ylim=(0.2, 0.8), xlim=(0, len(miss)))
    axes.legend(ncols=2, frameon=False)
    figure.savefig(file, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="a few batches: shows that it runs, its figures mean little"
    )
    parser.add_argument("--json", type=Path, help="write the table there too")
    parser.add_argument("--plot", type=Path, help="draw the misses of the moving stream there, as PNG")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    batches = 12 if arguments.quick else BATCHES
    steady, drifting = run_all(batches, drifts=False), run_all(batches, drifts=True)
    least, least_drifting = belady(batches, drifts=False), belady(batches, drifts=True)
    optimum = float(np.mean(least[batches // 2 :]))
    rows, curves = [], {}
    for run, moved in zip(steady, drifting, strict=True):
        name = f"{run.policy}, {run.depth} batches" if run.cache.looks_ahead else run.policy
        plan = float(np.median(run.plan_ns[batches // 2 :]))
        reveal = float(np.median(run.reveal_ns)) if run.reveal_ns else None
        rows.append(row(name, run.miss, moved.miss, optimum) | {"plan ns/row": plan, "reveal ns/row": reveal})
        curves[name] = moved.miss
    rows.append(row("Belady", least, least_drifting, optimum) | {"plan ns/row": None, "reveal ns/row": None})
    curves["Belady"] = least_drifting
    report_all({f"Misses of a cache of {ROWS:,} rows": rows}, arguments.json, {"batches": batches})
    if arguments.plot is not None:
        plot(arguments.plot, curves)


if __name__ == "__main__":
    main()
