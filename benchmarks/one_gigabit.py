"""Training over 1 Gbit/s: one parameter server and two workers, three hosts on one machine (``netlab.py``).

DeepFM on Criteo-shaped rows (Kaggle's 26 tables, none above 130,000 rows: 1,050,000 in all; about as many distinct
keys a batch as Kaggle's), 2,048 rows a worker and step, row-wise Adagrad, caches of 100,000 rows. A worker has one
core, which it shares with the server; rows are D wide, the first-order weight among them. Every variant keeps its own
tables, all of whose rows exist beforehand, trains on the same batches, and has its turn in every round; figures are
medians over rounds.

    sudo .venv/bin/python benchmarks/one_gigabit.py [--json FILE] [--plot FILE] [--quick]

Columns: ms a step; times the step without any network; MB a step over a worker's link, out and in, all-reduce of the
dense gradients included; hit rate of the cache; ms a step waited for rows; processor ms a step of a worker and of the
server (for both workers).
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from netlab import Netlab, NetlabError
from report import report_all
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from servers import ROOT, parameter_server

HERE = Path(__file__).resolve().parent

ALONE = "no network"
VARIANTS: dict[str, dict[str, Any]] = {
    ALONE: {"local": "alone", "staleness": 100},
    "no network, both cores busy": {"local": "both", "staleness": 100},
    **{
        f"no cache, {codec}{', overlapped' if overlapped else ''}": {
            "cache": False,
            "codec": codec,
            "overlapped": overlapped,
        }
        for codec in ("fp32", "fp16")
        for overlapped in (False, True)
    },
    **{
        f"HET s={staleness}, {codec}": {"staleness": staleness, "codec": codec}
        for codec in ("fp32", "fp16")
        for staleness in (0, 10, 100)
    },
    "HET s=100, fp16, 16 known": {"staleness": 100, "codec": "fp16", "known": 16},
    "HET s=100, fp16, dense bf16": {"staleness": 100, "codec": "fp16", "half": True},
    "HET s=100, fp16, stock DDP": {"staleness": 100, "codec": "fp16", "ddp": True},
    "TorchRec, its planner": {"plan": "planner"},
    "TorchRec, table-wise": {"plan": "table_wise"},
}
FULL = {"batch": 2048, "cache_rows": 100_000, "largest_table": 130_000, "warm_up": 40, "rounds": 7, "steps": 10}
QUICK = {"batch": 64, "cache_rows": 640, "largest_table": 200, "warm_up": 2, "rounds": 2, "steps": 2}
SKIPPED = 2  # steps at the beginning of a turn, not counted: the exchange of the first had all the time it wanted
SKEW = 1.07  # 13,500 distinct keys a batch; Kaggle's first rows have 13,400
WORKERS, DIMS = 2, (16, 128)
GIVE_UP_S = 900.0  # without a word from any worker


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", type=int, nargs="+", default=list(DIMS), help="widths of a row")
    parser.add_argument("--rounds", type=int, help="interleaved repetitions")
    parser.add_argument("--rate", default="1gbit", help="of every link, as tc writes it")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="variants, by name")
    parser.add_argument("--json", type=Path, help="write the table there too")
    parser.add_argument("--plot", type=Path, default=HERE / "results" / "one_gigabit.png", help="where the plot goes")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does everything run?")
    arguments = parser.parse_args()
    settings = {**(QUICK if arguments.quick else FULL), "skipped": SKIPPED, "skew": SKEW, "dims": arguments.dims}
    if arguments.rounds:
        settings["rounds"] = arguments.rounds
    chosen = {name: setting for name, setting in VARIANTS.items() if name in {ALONE, *arguments.only}}
    load = os.getloadavg()[0]
    try:
        blocks, plans = measure(settings, chosen, arguments.rate)
    except NetlabError as error:
        parser.exit(2, f"one_gigabit.py: {error}\n")
    rows = summary(blocks, chosen, arguments.dims)
    settings |= {"rate": arguments.rate, "load before": load, "plans": plans}
    report_all(
        {f"A step over {arguments.rate}, medians of {settings['rounds']} rounds": rows}, arguments.json, settings
    )
    plot(rows, arguments.dims, arguments.rate, arguments.plot)
    print(f"plot: {arguments.plot}")


def measure(
    settings: Mapping[str, Any], variants: Mapping[str, Any], rate: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Every block's figures, of both workers; and how TorchRec sharded its tables."""
    blocks, plans = [], []
    dims = settings["dims"]
    with ExitStack() as stack:
        lab = stack.enter_context(Netlab(WORKERS + 1, rate))
        listen = f"grpc://{lab.address(0)}:0"
        servers = {}
        for dim in dims:
            server = stack.enter_context(
                parameter_server(listen, lambda command, **options: lab.popen(0, command, **options))
            )
            servers[str(dim)] = {"address": server.address, "pid": server.pid}
        cores = sorted(os.sched_getaffinity(0))
        workers = []
        for rank in range(WORKERS):
            config = {
                **settings,
                "rank": rank,
                "world": WORKERS,
                "rendezvous": f"tcp://{lab.address(1)}:29500",
                "servers": servers,
                "variants": variants,
                "bits_per_s": bits_per_s(rate),
            }
            log = stack.enter_context(tempfile.TemporaryFile("w+"))
            command = [sys.executable, str(HERE / "one_gigabit_worker.py"), json.dumps(config)]
            environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
            worker = lab.popen(
                1 + rank,
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **environment},
                preexec_fn=partial(os.sched_setaffinity, 0, {cores[rank % len(cores)]}),
            )
            workers.append((worker, log))
        total = len(dims) * len(variants) * (2 + settings["rounds"])
        columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, TextColumn("{task.fields[note]}"), transient=True) as progress:
            task = progress.add_task("one gigabit", total=total, note="starting")
            for said in listen_to(workers):
                if said["event"] == "plan":
                    if said["rank"] == 0:
                        plans.append(said)
                    continue
                if said["event"] == "block" and said["figures"] is not None:
                    blocks.append(said)
                if said["rank"] == 0:
                    progress.update(task, advance=1, note=f"D={said['dim']}: {said['variant']} {said['event']}")
    return blocks, plans


def bits_per_s(rate: str) -> float:
    for suffix, factor in (("gbit", 1e9), ("mbit", 1e6)):
        if rate.endswith(suffix):
            return float(rate.removesuffix(suffix)) * factor
    raise SystemExit(f"one_gigabit.py: rate {rate!r} is not like 1gbit or 250mbit")


def listen_to(workers: Sequence[tuple[subprocess.Popen[str], Any]]) -> Iterator[dict[str, Any]]:
    """What the workers say, until all have ended well.

    Raises:
        RuntimeError: a worker failed, or all are silent.
    """
    with selectors.DefaultSelector() as selector:
        for process, _ in workers:
            assert process.stdout is not None
            selector.register(process.stdout, selectors.EVENT_READ, process)
        last = time.monotonic()
        while selector.get_map():
            for key, _ in selector.select(timeout=5):
                line = key.fileobj.readline()  # type: ignore[union-attr]  # a text stream, as opened above
                if line:
                    last = time.monotonic()
                    yield json.loads(line)
                else:
                    selector.unregister(key.fileobj)
            failed = [(process, log) for process, log in workers if process.poll()]
            if failed:
                failed[0][1].seek(0)
                raise RuntimeError(f"a worker failed:\n{failed[0][1].read()[-4000:]}")
            if time.monotonic() - last > GIVE_UP_S:
                raise RuntimeError(f"no worker has said anything for {GIVE_UP_S:g} s")
    for process, log in workers:
        if process.wait():
            log.seek(0)
            raise RuntimeError(f"a worker failed:\n{log.read()[-4000:]}")


def summary(
    blocks: Sequence[Mapping[str, Any]], variants: Mapping[str, Any], dims: Sequence[int]
) -> list[dict[str, Any]]:
    """One row a width and variant: means of the workers, medians over rounds."""

    def figure(name: str, dim: int, what: str) -> float:
        return median(per_round(blocks, name, dim, what))

    rows = []
    for dim in dims:
        alone = per_round(blocks, ALONE, dim, "ms")
        for name in variants:
            ms = per_round(blocks, name, dim, "ms")
            remote = "codec" in variants[name]
            rows.append(
                {
                    "D": dim,
                    "variant": name,
                    "ms": median(ms),
                    "fastest": min(ms),
                    "slowest": max(ms),
                    "x no network": median(a / b for a, b in zip(ms, alone, strict=True)),
                    "MB out": figure(name, dim, "sent_MB"),
                    "MB in": figure(name, dim, "received_MB"),
                    "rows MB": figure(name, dim, "rows_MB") if remote else None,
                    "hit rate": figure(name, dim, "hit_rate") if "plan" not in variants[name] else None,
                    "wait": figure(name, dim, "wait_ms") if remote else None,
                    "worker cpu": figure(name, dim, "worker_cpu_ms"),
                    "server cpu": figure(name, dim, "server_cpu_ms") if remote else None,
                }
            )
    return rows


def per_round(blocks: Sequence[Mapping[str, Any]], name: str, dim: int, what: str) -> list[float]:
    rounds: dict[int, list[float]] = {}
    for block in blocks:
        if (block["variant"], block["dim"]) == (name, dim):
            rounds.setdefault(block["round"], []).append(block["figures"][what])
    return [sum(values) / len(values) for _, values in sorted(rounds.items())]


_COLOURS = {"no network": "0.55", "no cache": "C1", "HET": "C0", "TorchRec": "C3"}


def _colour(name: str) -> str:
    return next(colour for start, colour in _COLOURS.items() if name.startswith(start))


def plot(rows: Sequence[Mapping[str, Any]], dims: Sequence[int], rate: str, file: Path) -> None:
    """Bars of step times, a panel a width, with the step without network as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(dims), figsize=(6.5 * len(dims), 5.5), squeeze=False, layout="constrained")
    for panel, dim in zip(panels[0], dims, strict=True):
        mine = [row for row in rows if row["D"] == dim]
        names = [row["variant"] for row in mine]
        times = [row["ms"] for row in mine]
        spread = [[t - row["fastest"] for t, row in zip(times, mine, strict=True)]]
        spread.append([row["slowest"] - t for t, row in zip(times, mine, strict=True)])
        panel.barh(names, times, xerr=spread, color=[_colour(name) for name in names], error_kw={"elinewidth": 0.8})
        panel.axvline(times[0], color="0.3", linestyle=":", linewidth=1)
        for i, row in enumerate(mine):
            text = f" {row['ms']:.0f} ms, {row['MB out'] + row['MB in']:.1f} MB"
            panel.text(row["slowest"], i, text, va="center", fontsize=8)
        panel.set_xlim(0, 1.3 * max(row["slowest"] for row in mine))
        panel.invert_yaxis()
        panel.set_xlabel("ms a step: median and range of the rounds")
        panel.set_title(f"DeepFM, rows {dim} wide, two workers over {rate}")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)


if __name__ == "__main__":
    main()
