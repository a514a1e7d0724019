"""The worker of ``store.py``'s key stream: a turn for every line it reads, the turn's figures as a JSON line."""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import keystream
import numpy as np
import torch
from servers import cpu_seconds, fill
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

from cache_backend import CacheConfig, EmbeddingOptimizer, RemoteStore
from hetrec import HetEmbeddingBagCollection

FEATURES = [f"f{i}" for i in range(keystream.FEATURES)]


class Stream:
    """One width, way of rows over the wire and policy: the whole embedding work of a batch, gradients from outside."""

    def __init__(self, settings: dict[str, Any], dim: int, wire: str, policy: str) -> None:
        self._settings = settings
        self._known = settings["policies"][policy]
        config = EmbeddingBagConfig(
            name=f"stream{dim}-{wire}-{policy}",
            embedding_dim=dim,
            num_embeddings=settings["rows"],
            feature_names=FEATURES,
            weight_init_min=-0.01,
            weight_init_max=0.01,
        )
        self._rows = HetEmbeddingBagCollection([config])
        store = RemoteStore([settings["address"]], *settings["wires"][wire])
        cache = CacheConfig(rows=settings["cache_rows"], staleness=100, policy=policy)
        self._rows.open(store, cache, EmbeddingOptimizer("sgd", lr=0.01))
        schema = store.schemas()[-1]
        filler = RemoteStore([settings["address"]], push_codec="int8")  # zeros lose nothing
        fill(filler, schema, len(store.schemas()) - 1, settings["rows"])
        filler.close()
        self._grad = torch.from_numpy(keystream.gradients(dim)[: settings["samples"]])
        self._coming = [self._batch(i) for i in range(self._known)]
        self._next = self._known

    def turn(self, count: int) -> dict[str, float]:
        """Run ``count`` batches after one that is not counted; figures a batch."""
        # The very objects that were announced in the last turn come in this one.
        batches = self._coming + [self._batch(self._next + i) for i in range(count + 1)]
        self._next += count + 1
        self._coming = batches[count + 1 :]
        for i in range(count + 1):
            if i == 1:
                before = self._counters()
            self._rows.begin(batches[i], batches[i + 1 : i + 1 + self._known])
            self._rows(batches[i]).values().backward(self._grad)
            self._rows.step(0.01)
        after = self._counters()
        change = {name: (after[name] - before[name]) / count for name in after}
        hits, unique = change.pop("hits"), change.pop("unique")
        return {**change, "hit_rate": hits / unique}

    def _batch(self, number: int) -> KeyedJaggedTensor:
        keys = keystream.batch(number).reshape(keystream.FEATURES, -1)[:, : self._settings["samples"]]
        keys = np.ascontiguousarray(keys % self._settings["rows"]).ravel()
        lengths = torch.ones(len(keys), dtype=torch.int32)
        return KeyedJaggedTensor(FEATURES, torch.from_numpy(keys), lengths=lengths, stride=self._settings["samples"])

    def _counters(self) -> dict[str, float]:
        stats = self._rows.stats()
        return {
            "ms": time.perf_counter() * 1e3,
            "MB": sum(_link_bytes(direction) for direction in ("tx", "rx")) / 1e6,
            "rows_MB": (stats.bytes_sent + stats.bytes_received) / 1e6,
            "client_cpu_ms": time.process_time() * 1e3,
            "server_cpu_ms": cpu_seconds(self._settings["pid"]) * 1e3,
            "hits": float(stats.hits),
            "unique": float(stats.unique),
        }


def _link_bytes(direction: str) -> int:
    return int(Path(f"/sys/class/net/eth0/statistics/{direction}_bytes").read_text())


def main() -> None:
    settings = json.loads(sys.argv[1])
    logging.disable(logging.WARNING)  # torch.fx warns when torchrec is imported
    torch.set_num_threads(1)
    streams = {
        (d, w, p): Stream(settings, d, w, p)
        for d in settings["dims"]
        for w in settings["wires"]
        for p in settings["policies"]
    }
    # The first round fills the caches.
    for number in range(settings["rounds"] + 1):
        for (dim, wire, policy), stream in streams.items():
            sys.stdin.readline()
            figures = stream.turn(settings["batches"] if number else settings["warm_up"])
            said = {"dim": dim, "wire": wire, "policy": policy, "figures": figures if number else None}
            print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
