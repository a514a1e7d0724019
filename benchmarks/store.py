"""The store by itself: rows a second, bytes a second, latency, and a cache's key stream over it.

1. Rows fetched and pushed a second and core, 20,000 distinct rows a call out of 1,000,000: the table in this process,
   and a server over loopback (a core of the server, and of server and client together).
2. Bytes a second of these exchanges over loopback, beside what iperf3 reaches in the same run.
3. Latency of a small exchange (16 rows pushed and 16 fetched, D=16) with 1, 4 and 16 clients at once.
4. The key stream (``keystream.py``) through a cache of 100,000 rows at s=100, one worker and one server, SGD: ms and MB
   a batch, beside the original HET client (its best policy) and ps-lite on the same stream. A batch's exchange runs
   while the batch before is looked up and updated; policy `lookahead` knows 16 coming batches, `tiny_lfu` none. Over
   links of two hosts (``netlab.py``), without a limit and at 1 Gbit/s; that part needs root.

    sudo .venv/bin/python benchmarks/store.py [--json FILE] [--quick] [--parts table loopback latency stream]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from netlab import Netlab, NetlabError
from report import report_all
from rich.progress import Progress, track
from servers import ROOT, Server, cpu_seconds, fill, parameter_server

from cache_backend import EmbeddingStore, LocalStore, RemoteStore, TableSchema
from cache_backend.store import Check, ExchangeRequest, Fetch, Push
from cache_backend.stores.remote import RowCodec

HERE = Path(__file__).resolve().parent
DIMS = (16, 128)
CODECS: tuple[RowCodec, ...] = ("fp32", "fp16")
# How rows travel on the key stream: (pushed, fetched).
WIRES = {"fp32": ("fp32", "fp32"), "fp16": ("fp16", "fp16"), "int8 out, fp16 in": ("int8", "fp16")}
# Cache policies on the key stream, and how many coming batches are known.
POLICIES = {"lookahead": 16, "tiny_lfu": 1}
LINKS = {"plain": None, "1 Gbit/s": "1gbit"}
CLIENTS = (1, 4, 16)
SMALL = 16  # rows of a small exchange

# The peers on this key stream, measured beside each other on another occasion on 2 noisy cores: trust their ratios,
# within 20 %. (link, D): ms a batch; D: MB a batch, both ways.
PEERS = {
    "ps-lite, no cache": (47, 66, 74, 217, 2.63, 19.0),
    "HET's client, no cache": (35, 59, 66, 219, 3.21, 19.6),
    "HET's cache, s=0": (52, 71, 80, 197, 2.43, 14.4),
    "HET's cache, s=100": (48, 60, 78, 150, 1.67, 9.35),
}


@dataclass(frozen=True)
class Sizes:
    """rows: of the table; call: rows a bulk call; seconds, rounds: of each measurement; batches: of the key stream."""

    rows: int
    call: int
    seconds: float
    rounds: int
    exchanges: int
    warm_up: int
    batches: int
    samples: int
    cache_rows: int
    stream_rounds: int


FULL = Sizes(1_000_000, 20_000, 0.5, 7, 2000, 40, 20, 2048, 100_000, 7)
QUICK = Sizes(2_000, 500, 0.02, 2, 20, 2, 2, 32, 320, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts: dict[str, Callable[[Sizes], dict[str, Any]]] = {
        "table": table,
        "loopback": loopback,
        "latency": latency,
        "stream": stream,
    }
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts), help="what to measure")
    parser.add_argument("--json", type=Path, help="write the tables there too")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does everything run?")
    arguments = parser.parse_args()
    sizes = QUICK if arguments.quick else FULL
    load = os.getloadavg()[0]
    tables: dict[str, Any] = {}
    for part in arguments.parts:
        tables |= parts[part](sizes)
    report_all(tables, arguments.json, {"quick": arguments.quick, "load before": load})


def schema(dim: int) -> TableSchema:
    """A table of SGD's rows, ``dim`` wide."""
    return TableSchema(f"t{dim}", dim, "sgd", 7, -0.01, 0.01, 0.0)


class Bulk:
    """Fetches and pushes of ``call`` distinct random rows, against any store."""

    def __init__(self, store: EmbeddingStore, dim: int, sizes: Sizes, filler: EmbeddingStore | None = None) -> None:
        self._store, self._dim = store, dim
        (self._table,) = store.open([schema(dim)])
        fill(filler or store, schema(dim), self._table, sizes.rows)
        random = np.random.default_rng(1)
        self._keys = [random.permutation(sizes.rows)[: sizes.call].astype(np.int64) for _ in range(16)]
        self._tables = np.full(sizes.call, self._table, np.int32)
        self._clocks = np.zeros(sizes.call, np.int64)
        self._deltas = random.standard_normal((sizes.call, dim), dtype=np.float32) * np.float32(1e-3)
        self._turn = 0
        self.bytes = 0

    def fetch(self) -> None:
        self._exchange(Push.nothing(self._dim), Fetch(self._tables, self._next()))

    def push(self) -> None:
        keys = self._next()
        push = Push(self._tables, keys, self._clocks, self._clocks, self._deltas.copy())
        self._exchange(push, Fetch(self._tables[:0], keys[:0]))

    def _next(self) -> np.ndarray:
        self._turn += 1
        return self._keys[self._turn % len(self._keys)]

    def _exchange(self, push: Push, fetch: Fetch) -> None:
        reply = self._store.exchange(ExchangeRequest(self._dim, 0, push, Check(), fetch))
        self.bytes += reply.bytes_sent + reply.bytes_received


def repeated(action: Callable[[], None], seconds: float) -> tuple[int, float]:
    """Calls made, and the seconds they took: at least ``seconds``."""
    start, calls = time.perf_counter(), 0
    while (passed := time.perf_counter() - start) < seconds:
        action()
        calls += 1
    return calls, passed


def table(sizes: Sizes) -> dict[str, Any]:
    """Part 1, in process: one thread, which is one core."""
    rates: dict[tuple[int, str], list[float]] = {}
    bulks = {dim: Bulk(LocalStore(), dim, sizes) for dim in DIMS}
    for _ in track(range(sizes.rounds), description="table", transient=True):
        for dim, bulk in bulks.items():
            for what in ("fetch", "push"):
                calls, passed = repeated(getattr(bulk, what), sizes.seconds)
                rates.setdefault((dim, what), []).append(calls * sizes.call / passed / 1e6)
    rows = [
        {"D": dim, "million rows/s fetched": median(rates[dim, "fetch"]), "pushed": median(rates[dim, "push"])}
        for dim in DIMS
    ]
    return {"The table in process, one core": rows}


def loopback(sizes: Sizes) -> dict[str, Any]:
    """Parts 1 and 2 over loopback, one client."""
    found: dict[tuple[int, str, str], list[dict[str, float]]] = {}
    peer: list[float] = []
    with ExitStack() as stack:
        server = stack.enter_context(parameter_server())
        filler = RemoteStore([server.address], push_codec="int8")
        stack.callback(filler.close)
        bulks = {}
        for dim in DIMS:
            for codec in CODECS:
                store = RemoteStore([server.address], codec, codec)
                stack.callback(store.close)
                bulks[dim, codec] = Bulk(store, dim, sizes, filler)
        iperf = stack.enter_context(Iperf(sizes.seconds))
        for _ in track(range(sizes.rounds), description="loopback", transient=True):
            if (rate := iperf.gigabytes_per_s()) is not None:
                peer.append(rate)
            for (dim, codec), bulk in bulks.items():
                for what in ("fetch", "push"):
                    figures = bulk_figures(bulk, what, sizes, server)
                    found.setdefault((dim, codec, what), []).append(figures)
    rows = [
        {
            "D": dim,
            "rows": codec,
            "call": what,
            **{name: median(f[name] for f in figures) for name in figures[0]},
            "iperf3 GB/s": median(peer) if peer else None,
        }
        for (dim, codec, what), figures in found.items()
    ]
    return {f"A server over loopback, one client, {sizes.call:,} rows a call": rows}


def bulk_figures(bulk: Bulk, what: str, sizes: Sizes, server: Server) -> dict[str, float]:
    busy, mine, moved = cpu_seconds(server.pid), time.process_time(), bulk.bytes
    calls, passed = repeated(getattr(bulk, what), sizes.seconds)
    # The kernel counts in ticks: a short measurement may see none.
    busy, mine = max(cpu_seconds(server.pid) - busy, 0.01), time.process_time() - mine
    million = calls * sizes.call / 1e6
    return {
        "million rows/s": million / passed,
        "a core of the server": million / busy,
        "a core of both": million / (busy + mine),
        "GB/s": (bulk.bytes - moved) / passed / 1e9,
    }


class Iperf:
    """An iperf3 server on loopback; a client asks it for seconds at a time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = max(1, round(seconds))
        self._server: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Iperf:
        if shutil.which("iperf3") is None:
            print("iperf3 not found, its column stays empty; on Debian and Ubuntu: apt install iperf3", file=sys.stderr)
            return self
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._port = str(probe.getsockname()[1])
        quiet = subprocess.DEVNULL
        self._server = subprocess.Popen(
            ["iperf3", "-s", "-B", "127.0.0.1", "-p", self._port], stdout=quiet, stderr=quiet
        )
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", int(self._port))) == 0:
                    break
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.terminate()
            self._server.wait()

    def gigabytes_per_s(self) -> float | None:
        """One stream's payload a second; None without iperf3."""
        if self._server is None:
            return None
        command = ["iperf3", "-c", "127.0.0.1", "-p", self._port, "-t", str(self._seconds), "-J"]
        said = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        return float(said["end"]["sum_received"]["bits_per_second"]) / 8e9


def latency(sizes: Sizes) -> dict[str, Any]:
    """Part 3: every client is a process of its own, and asks again as soon as it is answered."""
    found: dict[int, list[dict[str, float]]] = {}
    with parameter_server() as server:
        store = RemoteStore([server.address])
        (number,) = store.open([schema(16)])
        fill(store, schema(16), number, sizes.rows)
        store.close()
        for _ in track(range(max(1, sizes.rounds // 2)), description="latency", transient=True):
            for clients in CLIENTS:
                found.setdefault(clients, []).append(latency_of(clients, server, sizes))
    rows = [
        {"clients": clients, **{name: median(f[name] for f in figures) for name in figures[0]}}
        for clients, figures in found.items()
    ]
    return {f"Latency of a small exchange over loopback, ms ({SMALL} rows each way, D=16)": rows}


def latency_of(clients: int, server: Server, sizes: Sizes) -> dict[str, float]:
    each = max(sizes.exchanges // clients, 10)
    command = [sys.executable, str(HERE / "store_client.py"), server.address, str(sizes.rows), str(each), str(SMALL)]
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen([*command, str(i)], stdin=pipe, stdout=pipe, text=True, cwd=ROOT) for i in range(clients)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", "a client failed"
    start = time.perf_counter()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [process.communicate()[0] for process in processes]
    passed = time.perf_counter() - start
    times = np.concatenate([np.array(json.loads(line)) for line in said])
    return {
        "median": float(np.median(times)) * 1e3,
        "p99": float(np.quantile(times, 0.99)) * 1e3,
        "exchanges/s": len(times) / passed,
    }


def stream(sizes: Sizes) -> dict[str, Any]:
    """Part 4: one process over each kind of link, so that they take turns."""
    settings = {
        "dims": DIMS,
        "wires": WIRES,
        "policies": POLICIES,
        "rows": sizes.rows,
        "cache_rows": sizes.cache_rows,
        "samples": sizes.samples,
        "warm_up": sizes.warm_up,
        "batches": sizes.batches,
        "rounds": sizes.stream_rounds,
    }
    found: dict[tuple[int, str, str, str], list[dict[str, float]]] = {}
    try:
        with ExitStack() as stack, Progress(transient=True) as progress:
            workers = {}
            for link, rate in LINKS.items():
                lab = stack.enter_context(Netlab(2, rate))
                server = stack.enter_context(parameter_server(f"grpc://{lab.address(0)}:0", partial(lab.popen, 0)))
                workers[link] = start_stream(lab, {**settings, "address": server.address, "pid": server.pid}, stack)
            turns = len(DIMS) * len(WIRES) * len(POLICIES) * (sizes.stream_rounds + 1)
            task = progress.add_task("key stream", total=turns * len(LINKS))
            for _ in range(turns):
                for link, worker in workers.items():
                    said = worker("go")
                    progress.update(task, advance=1)
                    if said["figures"] is not None:
                        key = (said["dim"], link, said["wire"], said["policy"])
                        found.setdefault(key, []).append(said["figures"])
    except NetlabError as error:
        print(f"the key stream is left out: {error}", file=sys.stderr)
        return {}
    rows = []
    for dim in DIMS:
        for link in LINKS:
            column = list(LINKS).index(link) + (2 if dim == 128 else 0)
            het, het_mb = PEERS["HET's cache, s=100"][column], PEERS["HET's cache, s=100"][4 if dim == 16 else 5]
            for wire in WIRES:
                for policy in POLICIES:
                    figures = {
                        name: median(f[name] for f in found[dim, link, wire, policy])
                        for name in ("ms", "MB", "client_cpu_ms", "server_cpu_ms", "hit_rate")
                    }
                    rows.append(
                        {
                            "D": dim,
                            "link": link,
                            "client": f"hetrec, {wire}",
                            "policy": policy,
                            "ms": figures["ms"],
                            "MB": figures["MB"],
                            "time / HET's": figures["ms"] / het,
                            "bytes / HET's": figures["MB"] / het_mb,
                            "client cpu": figures["client_cpu_ms"],
                            "server cpu": figures["server_cpu_ms"],
                            "hit rate": figures["hit_rate"],
                        }
                    )
            for name, peer in PEERS.items():
                mb = peer[4 if dim == 16 else 5]
                own = {"D": dim, "link": link, "client": name, "policy": "-", "ms": float(peer[column]), "MB": mb}
                ratios = {"time / HET's": peer[column] / het, "bytes / HET's": mb / het_mb}
                rows.append({**own, **ratios, "client cpu": None, "server cpu": None, "hit rate": None})
    return {f"The key stream, cache of {sizes.cache_rows:,} rows, s=100, SGD; ms and MB a batch": rows}


def start_stream(lab: Netlab, settings: dict[str, Any], stack: ExitStack) -> Callable[[str], dict[str, Any]]:
    """A worker on host 1 of a lab: each ``go`` lets it run its next turn and answers with the figures."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "store_stream.py"), json.dumps(settings)]
    pipe = subprocess.PIPE
    process = stack.enter_context(lab.popen(1, command, stdin=pipe, stdout=pipe, text=True, env=environment))

    def say(word: str) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(word + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("the worker of the key stream ended; what it said is above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    return say


if __name__ == "__main__":
    main()
