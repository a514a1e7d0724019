"""Ranks that train at once over the same servers, as fast as they can: whatever interleaves, no update is lost or made
twice."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count

import pytest
import torch
from bags import batch, table
from torchrec import KeyedJaggedTensor

from cache_backend import CacheConfig, EmbeddingOptimizer, RemoteStore
from hetrec import HetEmbeddingBagCollection

RANKS, STEPS, KEYS, SAMPLES, DIM = 3, 60, 90, 24, 4
_numbers = count()


def train(bags: HetEmbeddingBagCollection, batches: Sequence[KeyedJaggedTensor], unit: float) -> None:
    """Every key's row loses ``unit`` for each time that a batch holds the key; now and then a flush."""
    for i, features in enumerate(batches):
        bags.begin(features, batches[i + 1 : i + 4])
        pooled = bags(features).values()
        pooled.backward(torch.full_like(pooled, unit))
        bags.step(lr=1.0)
        if i % 17 == 16:
            bags.flush()
    bags.flush()


@pytest.mark.parametrize("clock", ["lamport", "sum"])
@pytest.mark.parametrize(("shards", "staleness", "depth"), [(1, 0, 1), (3, 1, 2), (1, 5, 3)])
def test_the_servers_end_with_the_sum_of_all_updates(
    shard_addresses: Callable[..., Sequence[str]], shards: int, staleness: int, depth: int, clock: str
) -> None:
    """Rank r's updates are whole multiples of 100^r: sums are exact in float32 and tell the ranks apart."""
    config = table(f"{os.getpid()}-at-once-{next(_numbers)}", ["x"], rows=KEYS, dim=DIM)
    config = replace(config, weight_init_min=0.0, weight_init_max=0.0)
    generator = torch.Generator().manual_seed(staleness)
    streams, ranks = [], []
    for _ in range(RANKS):
        bags = [[[int(k)] for k in torch.randint(0, KEYS, (SAMPLES,), generator=generator)] for _ in range(STEPS)]
        streams.append([batch(["x"], keys) for keys in bags])
        collection = HetEmbeddingBagCollection([config])
        cache = CacheConfig(rows=32, staleness=staleness, prefetch_depth=depth)
        collection.open(RemoteStore(list(shard_addresses(shards, clock))), cache, EmbeddingOptimizer("sgd"))
        ranks.append(collection)
    every = batch(["x"], [[k] for k in range(KEYS)])
    with ThreadPoolExecutor(RANKS) as threads:
        running = [
            threads.submit(train, rank, stream, 100.0**r)
            for r, (rank, stream) in enumerate(zip(ranks, streams, strict=True))
        ]
        for each in running:
            each.result(timeout=120)
    times = torch.stack([torch.bincount(torch.cat([b.values() for b in s]), minlength=KEYS) for s in streams])
    expected = -sum(100.0**r * times[r] for r in range(RANKS))
    for rank in ranks:
        assert torch.equal(rank.eval()(every).values(), expected[:, None].expand(KEYS, DIM))
        rank.close()
