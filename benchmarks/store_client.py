"""One client of ``store.py``'s latency: small exchanges, one after the other; prints their seconds as JSON."""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from cache_backend import RemoteStore, TableSchema
from cache_backend.store import Check, ExchangeRequest, Fetch, Push


def main() -> None:
    address, rows, count, small, seed = sys.argv[1], *map(int, sys.argv[2:])
    store = RemoteStore([address])
    (number,) = store.open([TableSchema("t16", 16, "sgd", 7, -0.01, 0.01, 0.0)])
    random = np.random.default_rng(seed)
    tables, clocks = np.full(small, number, np.int32), np.zeros(small, np.int64)
    deltas = np.full((small, 16), 1e-3, np.float32)

    def exchange() -> float:
        pushed, fetched = random.choice(rows, (2, small), replace=False).astype(np.int64)
        request = ExchangeRequest(16, 0, Push(tables, pushed, clocks, clocks, deltas), Check(), Fetch(tables, fetched))
        start = time.perf_counter()
        store.exchange(request)
        return time.perf_counter() - start

    for _ in range(20):
        exchange()
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps([exchange() for _ in range(count)]), flush=True)
    store.close()


if __name__ == "__main__":
    main()
