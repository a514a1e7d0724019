"""A step of our collection under TorchRec against a step of TorchRec's own, one rank, everything cached.

Both sit under `DistributedModelParallel` at world size 1 with row-wise Adagrad fused into backward; TorchRec's shard is
FBGEMM's CPU table. The same Zipf batches (`keystream.py`: 26 features, 2,048 samples) in turn, gradients from outside,
one thread; medians over the measured batches, and the median of their ratios. One table of 1,000,000 rows that all
features read, and 26 tables of 38,462 rows.

    .venv/bin/python benchmarks/torchrec_step.py [--batches 100] [--json FILE] [--quick]
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import keystream
import numpy as np
import torch
import torch.distributed as dist
from report import report_all
from rich.progress import track
from torch import nn

logging.disable(logging.WARNING)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # fbgemm-gpu-cpu warns of every GPU optimizer that it does not have
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel

    import hetrec
    from cache_backend import CacheConfig, EmbeddingOptimizer, LocalStore

FEATURES = [f"f{i}" for i in range(keystream.FEATURES)]
LR, EPS = 0.01, 1e-8
CPU = torch.device("cpu")
LAYOUTS = {"one table": 1, "26 tables": keystream.FEATURES}


class Model(nn.Module):
    """Nothing but the collection: a step is the embedding work."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.collection = collection

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.collection(features).values()


def configs(dim: int, tables: int) -> list[EmbeddingBagConfig]:
    rows = -(-keystream.ROWS // tables)
    return [
        EmbeddingBagConfig(
            name=f"t{i}",
            embedding_dim=dim,
            num_embeddings=rows,
            feature_names=FEATURES if tables == 1 else [FEATURES[i]],
            weight_init_min=-0.01,
            weight_init_max=0.01,
        )
        for i in range(tables)
    ]


def ours(dim: int, tables: int, cache_rows: int) -> DistributedModelParallel:
    model = Model(hetrec.HetEmbeddingBagCollection(configs(dim, tables)))
    optimizer = EmbeddingOptimizer("rowwise_adagrad", lr=LR, eps=EPS)
    sharders = [hetrec.HetEmbeddingBagCollectionSharder(LocalStore(), CacheConfig(rows=cache_rows), optimizer)]
    return DistributedModelParallel(model, device=CPU, sharders=sharders, plan=hetrec.plan(model, sharders))


def torchrecs(dim: int, tables: int) -> DistributedModelParallel:
    model = Model(EmbeddingBagCollection(configs(dim, tables), device=torch.device("meta")))
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": LR, "eps": EPS}
    return DistributedModelParallel(model, device=CPU, sharders=[EmbeddingBagCollectionSharder(fused)])


def features(number: int, tables: int) -> KeyedJaggedTensor:
    keys = torch.from_numpy(np.ascontiguousarray(keystream.batch(number).reshape(-1, keystream.FEATURES).T))
    lengths = torch.ones(keys.numel(), dtype=torch.int32)
    return KeyedJaggedTensor(FEATURES, (keys % -(-keystream.ROWS // tables)).flatten(), lengths=lengths)


def measure(dim: int, layout: str, warm_up: int, batches: int) -> dict[str, Any]:
    tables = LAYOUTS[layout]
    models = {"ours": ours(dim, tables, 2 * keystream.ROWS), "TorchRec": torchrecs(dim, tables)}
    grad = torch.from_numpy(keystream.gradients(dim)).reshape(keystream.SAMPLES, -1)
    times: dict[str, list[float]] = {name: [] for name in models}
    # All rows are cached once every one was seen; the misses of the measured batches are shown.
    if warm_up > 10:
        fill(models["ours"], tables)
    collection = models["ours"].module.collection.collection
    for number in track(range(warm_up + batches), description=f"D={dim}, {layout}", transient=True):
        if number == warm_up:
            times = {name: [] for name in models}
            misses = collection.stats().misses
        batch = features(number, tables)
        # Each goes first in every other round: what lies in the processor's cache meets both.
        for name, model in list(models.items())[:: 1 if number % 2 else -1]:
            start = time.perf_counter()
            model(batch).backward(grad)
            times[name].append(time.perf_counter() - start)
    medians = {f"{name} ms": float(np.median(values)) * 1e3 for name, values in times.items()}
    ratio = float(np.median(np.array(times["ours"]) / np.array(times["TorchRec"])))
    found = {"D": dim, "layout": layout, "missed rows": collection.stats().misses - misses, **medians, "ratio": ratio}
    collection.close()
    return found


def fill(model: nn.Module, tables: int) -> None:
    """Bring every row into the cache."""
    rows = -(-keystream.ROWS // tables)
    for keys in torch.arange(rows).split(4096):
        every = keys.repeat(keystream.FEATURES)
        model(KeyedJaggedTensor(FEATURES, every, lengths=torch.ones(every.numel(), dtype=torch.int32))).sum().backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=100, help="measured batches, after 20 to warm up")
    parser.add_argument("--json", type=Path, help="write the table there too")
    parser.add_argument("--quick", action="store_true", help="few batches: does everything run?")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of TorchRec's own calls
    warm_up, batches = (1, 2) if arguments.quick else (20, arguments.batches)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        rows = [measure(dim, layout, warm_up, batches) for dim in (16, 128) for layout in LAYOUTS]
        dist.destroy_process_group()
    title = "A training step's embedding work under DistributedModelParallel, ms (medians)"
    report_all({title: rows}, arguments.json, {"quick": arguments.quick, "batches": batches})


if __name__ == "__main__":
    main()
