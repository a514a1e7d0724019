"""One training step's embedding work: the cache over the embedded store against FBGEMM's CPU table without a cache.

Ours: unique keys, plan, exchange, commit, pooled lookup, backward with row-wise Adagrad. Theirs: forward and backward
with fused row-wise Adagrad. One thread, the same batches in turn, so that the machine's noise meets both; medians
over the measured batches. The store holds all 1,000,000 rows before the first batch, as FBGEMM's table does.

    python benchmarks/cache_ops.py [--batches 100] [--json FILE]
"""

from __future__ import annotations

import argparse
import logging
import os
import time
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import keystream
import numpy as np
import torch
from report import report
from rich.progress import track

from cache_backend import EmbeddingOptimizer, LocalStore, TableSchema, ops
from cache_backend.cache import Bags, Cache, UniqueRows
from cache_backend.store import Check, ExchangeRequest, Fetch, Push

logging.disable(logging.WARNING)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # fbgemm-gpu-cpu warns of every GPU optimizer that it does not have
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

LR, EPS = 0.01, 1e-8
SPLITS = torch.arange(0, keystream.FEATURES * keystream.SAMPLES + 1, keystream.SAMPLES)
TABLES = torch.zeros(keystream.FEATURES, dtype=torch.int32)
OFFSETS = torch.arange(keystream.FEATURES * keystream.SAMPLES + 1)
BAGS = Bags(None, OFFSETS, None, torch.zeros(keystream.FEATURES, dtype=torch.uint8))


class Ours:
    """A cache of ``rows`` rows over an embedded store that holds every row."""

    def __init__(self, dim: int, rows: int) -> None:
        self.store = LocalStore()
        self.store.open([TableSchema("t", dim, "rowwise_adagrad", 7, -0.01, 0.01, 0.0)])
        self.cache = Cache(rows, dim, EmbeddingOptimizer("rowwise_adagrad", lr=LR, eps=EPS), self.store, 100)
        for keys in np.array_split(np.arange(keystream.ROWS, dtype=np.int64), 50):
            tables, clocks = np.zeros(len(keys), np.int32), np.zeros(len(keys), np.int64)
            push = Push(tables, keys, clocks, clocks, np.zeros((len(keys), dim + 1), np.float32))
            self.store.exchange(ExchangeRequest(dim, 1, push, Check(), Fetch(tables[:0], keys[:0])))
        if rows >= keystream.ROWS:  # everything resident
            for keys in torch.arange(keystream.ROWS).split(50_000):
                splits = torch.tensor([0, len(keys)])
                plan = self.cache.plan(UniqueRows(*ops.unique_rows(keys, splits, TABLES[:1])))
                self.cache.commit(plan, self.store.exchange(plan.request))
                self.cache.release(plan)

    def step(self, keys: torch.Tensor, grad: torch.Tensor, times: dict[str, list[float]]) -> None:
        clock = time.perf_counter
        marks = [clock()]
        rows = UniqueRows(*ops.unique_rows(keys, SPLITS, TABLES))
        marks.append(clock())
        plan = self.cache.plan(rows)
        marks.append(clock())
        reply = self.store.exchange(plan.request)
        marks.append(clock())
        self.cache.commit(plan, reply)
        marks.append(clock())
        self.cache.lookup(plan, BAGS)
        marks.append(clock())
        self.cache.update_bags(plan, grad, BAGS, 1.0, LR)
        marks.append(clock())
        for name, start, end in zip(
            ("unique", "plan", "exchange", "commit", "lookup", "update"), marks, marks[1:], strict=False
        ):
            times[name].append(end - start)
        times["ours"].append(marks[-1] - marks[0])


class Fbgemm:
    """FBGEMM's table-batched embedding on the CPU, one table of all rows read by every feature."""

    def __init__(self, dim: int) -> None:
        self.table = SplitTableBatchedEmbeddingBagsCodegen(
            [(keystream.ROWS, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
            feature_table_map=[0] * keystream.FEATURES,
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=LR,
            eps=EPS,
            pooling_mode=PoolingMode.SUM,
        )
        self.table.init_embedding_weights_uniform(-0.01, 0.01)

    def step(self, keys: torch.Tensor, grad: torch.Tensor, times: dict[str, list[float]]) -> None:
        start = time.perf_counter()
        self.table(keys, OFFSETS).backward(grad)
        times["fbgemm"].append(time.perf_counter() - start)


def measure(dim: int, rows: int, batches: int) -> dict[str, Any]:
    ours, theirs = Ours(dim, rows), Fbgemm(dim)
    grad = torch.from_numpy(keystream.gradients(dim))
    times: dict[str, list[float]] = defaultdict(list)
    warm_up = 100
    for number in track(range(warm_up + batches), description=f"D={dim}, cache {rows:,}", transient=True):
        if number == warm_up:
            times.clear()
            before = ours.cache.stats + type(ours.cache.stats)()
        keys = torch.from_numpy(keystream.batch(number))
        ours.step(keys, grad, times)
        theirs.step(keys, grad, times)
    stats = ours.cache.stats - before
    median = {name: float(np.median(values)) * 1e3 for name, values in times.items()}
    ratio = float(np.median(np.array(times["ours"]) / np.array(times["fbgemm"])))
    parts = {name: median[name] for name in ("unique", "plan", "exchange", "commit", "lookup", "update")}
    return {
        "D": dim,
        "cache rows": rows,
        "miss": 1 - stats.hit_rate,
        **parts,
        "ours ms": median["ours"],
        "FBGEMM ms": median["fbgemm"],
        "ratio": ratio,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=100, help="measured batches, after 100 to warm up")
    parser.add_argument("--json", type=Path, help="write the table there too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(dim, size, arguments.batches) for dim in (16, 128) for size in (100_000, 1_500_000)]
    report("Embedding work of one step, ms (medians)", rows, arguments.json)


if __name__ == "__main__":
    main()
