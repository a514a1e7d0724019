"""One worker of ``one_gigabit.py``: trains every variant in turn and writes what it measured, a JSON line a block."""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from no_cache import without_cache
from servers import cpu_seconds, fill
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cache_backend import CacheConfig, CacheStats, EmbeddingOptimizer, LocalStore, RemoteStore, TableSchema
from cache_backend.store import EmbeddingStore
from datamodules.criteo_layout import CATEGORICAL, INTEGERS, LABEL, kaggle_cardinalities
from datamodules.synthetic_rows import SyntheticRows
from hetrec.data import Batch, FeatureSpec, SparseFeature, TableSpec
from models.deepfm import DeepFM

LR, EPS = 0.02, 1e-8
LARGE = 1 << 16  # elements of a gradient that is all-reduced by itself


@dataclass(frozen=True)
class CappedRows(SyntheticRows):
    """Criteo Kaggle's 26 cardinalities, the large ones cut down to ``most``: scaling all of them down would make the
    small tables tiny, and those TorchRec can replicate for little."""

    most: int

    @cached_property
    def cardinalities(self) -> tuple[int, ...]:
        return tuple(min(n, self.most) for n in kaggle_cardinalities)


def spec(rows: SyntheticRows, prefix: str) -> FeatureSpec:
    """Criteo's columns; the variants' tables live on one server, so their names begin with ``prefix``."""
    return FeatureSpec(
        dense=INTEGERS,
        sparse=tuple(SparseFeature(name, prefix + name) for name in CATEGORICAL),
        tables=tuple(
            TableSpec(prefix + name, num_embeddings=n + 1)
            for name, n in zip(CATEGORICAL, rows.cardinalities, strict=True)
        ),
        label=LABEL,
    )


def batches(rows: SyntheticRows, rank: int, world: int, count: int, size: int) -> list[Batch]:
    """Different rows for every rank and step, the same for every variant."""
    made = []
    for step in range(count):
        integers, keys = rows.features(step * world + rank, size)
        dense = np.log1p(np.maximum(np.nan_to_num(integers), 0)).astype(np.float32)
        labels = rows.labels(step * world + rank, rows.hidden.logits(integers, keys)).astype(np.float32)
        sparse = KeyedJaggedTensor(
            keys=list(CATEGORICAL),
            values=torch.from_numpy(np.ascontiguousarray(keys.T).ravel()),
            lengths=torch.ones(keys.size, dtype=torch.int32),
            stride=size,
        )
        made.append(Batch(torch.from_numpy(dense), sparse, torch.from_numpy(labels)))
    return made


class Variant(Protocol):
    """One way to train; ``step`` i trains on batch i."""

    def step(self, i: int) -> None: ...

    def finish(self) -> None:
        """Complete the last step."""
        ...

    def stats(self) -> CacheStats: ...

    def close(self) -> None: ...


class Dense:
    """The dense half. A large gradient is all-reduced from the moment backward has made it, the small ones together
    after backward; both run on while rows are updated and brought in, and are waited for before the next forward.
    ``half``: large gradients travel as bf16."""

    def __init__(self, model: nn.Module, alone: bool, half: bool) -> None:
        parameters = list(model.parameters())
        self._optimizer = torch.optim.Adagrad(parameters, lr=LR)
        self._world = 1 if alone else dist.get_world_size()
        small = [p for p in parameters if p.numel() < LARGE]
        large = [p for p in parameters if p.numel() >= LARGE]
        sizes = [p.numel() for p in small]
        flat = torch.zeros(sum(sizes))
        for parameter, part in zip(small, flat.split(sizes), strict=True):
            parameter.grad = part.view_as(parameter)
        self._small = flat
        self._gradients = [flat]
        for parameter in large:
            parameter.grad = torch.zeros_like(parameter)
            self._gradients.append(parameter.grad)
            if self._world > 1:
                parameter.register_post_accumulate_grad_hook(self._reduce)
        self._half = half
        self._halves: list[tuple[Tensor, Tensor]] = []
        self._works: list[dist.Work] = []
        self._due = False

    def _reduce(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if self._half:
            self._halves.append((gradient, gradient.bfloat16()))
            gradient = self._halves[-1][1]
        work = dist.all_reduce(gradient, async_op=True)
        assert work is not None
        self._works.append(work)

    def launch(self) -> None:
        """After backward."""
        if self._world > 1:
            work = dist.all_reduce(self._small, async_op=True)
            assert work is not None
            self._works.append(work)
        self._due = True

    def finish(self) -> None:
        """Before the next forward."""
        if not self._due:
            return
        for work in self._works:
            work.wait()
        self._works = []
        for gradient, half in self._halves:
            gradient.copy_(half)
        self._halves = []
        if self._world > 1:
            torch._foreach_div_(self._gradients, self._world)
        self._optimizer.step()
        torch._foreach_zero_(self._gradients)
        self._due = False


class Het:
    """DeepFM over ``HetEmbeddingBagCollection``, in a plain loop."""

    def __init__(self, job: Job, name: str, dim: int, store: EmbeddingStore, setting: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self._data = job.data
        # Coming batches that the collection is told of.
        self._known = setting.get("known", 1) if setting.get("overlapped", True) else 0
        self._store = store
        # The first-order weight is a column of the row: rows are `dim` wide for every variant.
        self._model = DeepFM(spec(job.rows, f"{name}/"), embedding_dim=dim - 1)
        self._rows = self._model.embeddings
        alone = isinstance(store, LocalStore)
        self._rows.open(
            store,
            CacheConfig(rows=job.config["cache_rows"], staleness=setting.get("staleness", 0)),
            EmbeddingOptimizer("rowwise_adagrad", lr=LR, eps=EPS),
            world_size=1 if alone else job.world,
        )
        if setting.get("cache", True) is False:
            without_cache(self._rows, job.config["batch"] * len(CATEGORICAL))
        self._ddp: nn.Module | None = None
        if setting.get("ddp"):
            self._ddp = DistributedDataParallel(self._model)
            self._optimizer = torch.optim.Adagrad(self._model.parameters(), lr=LR)
        else:
            self._dense = Dense(self._model, alone, setting.get("half", False))
        self.tables = [(s, i) for i, s in enumerate(store.schemas()) if s.name.startswith(f"{name}/")]

    def step(self, i: int) -> None:
        batch = self._data[i]
        self._rows.begin(batch.sparse_features, [b.sparse_features for b in self._data[i + 1 : i + 1 + self._known]])
        if self._ddp is not None:
            loss = self._loss(self._ddp(batch.dense_features, batch.sparse_features), batch)
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
        else:
            self._dense.finish()
            self._loss(self._model(batch.dense_features, batch.sparse_features), batch).backward()
            self._dense.launch()
        self._rows.step(LR)

    def finish(self) -> None:
        if self._ddp is None:
            self._dense.finish()

    def stats(self) -> CacheStats:
        return self._rows.stats()

    def close(self) -> None:
        self._rows.close()
        self._store.close()

    @staticmethod
    def _loss(logits: Tensor, batch: Batch) -> Tensor:
        return binary_cross_entropy_with_logits(logits, batch.labels)


class TorchRec:
    """The same network over TorchRec's own sharded collection, under its ``TrainPipelineSparseDist``.

    ``plan``: ``planner``, what TorchRec's planner chooses when it is told of the links; or ``table_wise``, whole tables
    dealt to the hosts in turn.
    """

    def __init__(self, job: Job, name: str, dim: int, plan: str) -> None:
        from peer import pipeline

        torch.manual_seed(0)
        network = DeepFM(spec(job.rows, f"{name}/"), embedding_dim=dim - 1)
        self._pipeline, self.plan = pipeline(network, plan, job.config["batch"], job.config["bits_per_s"], LR, EPS)
        self._upcoming = self._stream(job.data)

    @staticmethod
    def _stream(data: list[Batch]) -> Iterator[Batch]:
        # The pipeline reads ahead of the step that it runs; past the end it meets the first batches again.
        while True:
            yield from data

    def step(self, i: int) -> None:
        self._pipeline.progress(self._upcoming)

    def finish(self) -> None:
        # It only warns where it cannot pipeline a module, and then nothing overlaps.
        assert len(self._pipeline._pipelined_modules) == 1, "TorchRec's collection is not pipelined"

    def stats(self) -> CacheStats:
        return CacheStats()

    def close(self) -> None: ...


@dataclass
class Job:
    config: dict[str, Any]
    rank: int
    world: int
    rows: SyntheticRows
    data: list[Batch]

    def say(self, **what: Any) -> None:
        print(json.dumps({"rank": self.rank, **what}), flush=True)

    def make(self, name: str, dim: int, setting: dict[str, Any]) -> Variant:
        if "plan" in setting:
            made = TorchRec(self, name, dim, setting["plan"])
            self.say(event="plan", variant=name, dim=dim, plan=made.plan)
            return made
        if setting.get("local"):
            store: EmbeddingStore = LocalStore()
            local = Het(self, name, dim, store, setting)
            if setting["local"] == "both" or self.rank == 0:
                _fill(store, local.tables, self.rows, 0, 1)
            return local
        codec = setting["codec"]
        remote = Het(self, name, dim, RemoteStore([self._server(dim)], codec, codec), setting)
        # Zeros lose nothing in int8, and are quickest over the link.
        filler = RemoteStore([self._server(dim)], push_codec="int8")
        _fill(filler, remote.tables, self.rows, self.rank, self.world)
        filler.close()
        return remote

    def _server(self, dim: int) -> str:
        return str(self.config["servers"][str(dim)]["address"])

    def block(self, variant: Variant, dim: int, first: int, steps: int) -> dict[str, float]:
        """Run ``steps`` steps beginning with batch ``first``; figures a step."""
        pid = self.config["servers"][str(dim)]["pid"]
        before, start = self._counters(variant, pid), time.perf_counter()
        for i in range(first, first + steps):
            variant.step(i)
        variant.finish()
        ms = (time.perf_counter() - start) * 1e3 / steps
        after = self._counters(variant, pid)
        change = {name: (after[name] - before[name]) / steps for name in after}
        unique = change.pop("unique")
        return {"ms": ms, **change, "hit_rate": change.pop("hits") / unique if unique else 0.0, "unique": unique}

    @staticmethod
    def _counters(variant: Variant, server: int) -> dict[str, float]:
        stats = variant.stats()
        return {
            "sent_MB": _link_bytes("tx") / 1e6,
            "received_MB": _link_bytes("rx") / 1e6,
            "rows_MB": (stats.bytes_sent + stats.bytes_received) / 1e6,
            "wait_ms": stats.wait_s * 1e3,
            "worker_cpu_ms": time.process_time() * 1e3,
            "server_cpu_ms": cpu_seconds(server) * 1e3,
            "unique": float(stats.unique),
            "hits": float(stats.hits),
        }


def _link_bytes(direction: str) -> int:
    return int(Path(f"/sys/class/net/eth0/statistics/{direction}_bytes").read_text())


def _fill(
    store: EmbeddingStore, tables: list[tuple[TableSchema, int]], rows: SyntheticRows, rank: int, world: int
) -> None:
    sizes = [n + 1 for n in rows.cardinalities]
    for number, ((schema, table), size) in enumerate(zip(tables, sizes, strict=True)):
        if number % world == rank:
            fill(store, schema, table, size)


def main() -> None:
    warnings.filterwarnings("ignore")  # fbgemm-gpu-cpu and torchrec speak of the GPU parts that they lack
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    config: dict[str, Any] = json.loads(sys.argv[1])
    rank, world = config["rank"], config["world"]
    dist.init_process_group("gloo", init_method=config["rendezvous"], rank=rank, world_size=world)
    warm_up, rounds, skipped, steps = (config[name] for name in ("warm_up", "rounds", "skipped", "steps"))
    needed = warm_up + rounds * (skipped + steps) + 1
    total = needed * world * config["batch"]
    rows = CappedRows(rows=total, scale=1, skew=config["skew"], seed=0, most=config["largest_table"])
    job = Job(config, rank, world, rows, batches(rows, rank, world, needed, config["batch"]))
    for dim in config["dims"]:
        variants: dict[str, Variant] = {}
        for name, setting in config["variants"].items():
            variants[name] = job.make(name, dim, setting)
            dist.barrier()
            job.say(event="made", variant=name, dim=dim)
        alone = [name for name, setting in config["variants"].items() if setting.get("local") == "alone"]

        def run(name: str, first: int, count: int, dim: int = dim, made: Any = variants, one: Any = alone) -> Any:
            dist.barrier()
            figures = None
            if rank == 0 or name not in one:
                figures = job.block(made[name], dim, first, count)
            dist.barrier()
            return figures

        for name in variants:
            run(name, 0, warm_up)
            job.say(event="warm", variant=name, dim=dim)
        for number in range(rounds):
            first = warm_up + number * (skipped + steps)
            for name in variants:
                run(name, first, skipped)
                figures = run(name, first + skipped, steps)
                job.say(event="block", variant=name, dim=dim, round=number, figures=figures)
        for variant in variants.values():
            variant.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
