"""Neighbour sampling: edges drawn a second on one core, with all that makes a batch of them.

A batch is what the graph data modules' readers ask of the op, of memory-mapped arrays as theirs: seeds, two hops,
neighbours without replacement, every node once, edges relabelled to positions. The seeds of a round are all nodes in
a shuffled order, a batch at a time, so the graph is as cold in the processor's caches as its size makes it. "As
batches": the same through the data modules' loader, with labels and KeyedJaggedTensor. Edges a second of processor
time (of the one thread that works) are what a core does; those of wall time are lower where other work shares the
machine. Medians over rounds.

The facebook page network is read where it lies at ../shared/data/graph/facebook beside the checkout, or at --facebook;
synthetic graphs (datamodules.graph_synthetic) are measured always.

    python benchmarks/sampling.py [--quick] [--facebook FOLDER] [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # datamodules is part of the checkout, not installed

import numpy as np
import torch
from report import report_all
from rich.progress import track

from cache_backend import ops
from datamodules.atomic import make_once
from datamodules.graph_format import Graph, write_graph
from datamodules.graph_loader import GraphLoader
from datamodules.graph_reader import GraphReader, seed_plan
from datamodules.graph_synthetic_edges import SyntheticGraph, write_synthetic_graph
from datamodules.graph_tables import GraphTables, read_tables

FACEBOOK = Path(__file__).resolve().parents[2] / "shared" / "data" / "graph" / "facebook"
FANOUTS = [10, 10]


def facebook(folder: Path, work: Path) -> Graph:
    tables = GraphTables(folder / "edges.csv", folder / "target.csv", "id_1", "id_2", "id", "target")
    make_once(work, {}, "--facebook", lambda path: write_graph(read_tables(tables), path, both_ways=True))
    return Graph.open(work)


def synthetic(nodes: int, work: Path) -> Graph:
    write_synthetic_graph(SyntheticGraph(nodes, 30.0, 10, 0.7, 2.5, 0), work)
    return Graph.open(work)


def measure(name: str, graph: Graph, batch_size: int, rounds: int, most: int) -> dict[str, Any]:
    colptr, row = torch.from_numpy(graph.colptr), torch.from_numpy(graph.row)
    plan = seed_plan(graph.nodes, batch_size, shuffle=True, seed=0, rank=0, world_size=1)
    nodes = np.arange(graph.nodes, dtype=np.int64)
    loader = GraphLoader(GraphReader(graph, nodes, plan, tuple(FANOUTS), every_epoch_differs=True))
    seeds = torch.from_numpy(np.random.default_rng(0).permutation(nodes)).split(batch_size)[:most]

    def sampled(number: int) -> Iterator[tuple[int, int]]:
        for batch, part in enumerate(seeds):
            found, edge_index, *_ = ops.sample_neighbors(colptr, row, part, FANOUTS, 0, number, batch)
            yield found.numel(), edge_index.shape[1]

    def batches(number: int) -> Iterator[tuple[int, int]]:
        for batch in islice(loader.read(number, 0), most):
            yield sum(batch.nodes_per_hop), batch.edge_index.shape[1]

    rates: dict[str, list[float]] = defaultdict(list)
    counts = []
    for number in track(range(rounds + 1), description=name, transient=True):  # the first round warms up
        for what, run in (("op", sampled), ("batches", batches)):
            core, wall = time.thread_time(), time.perf_counter()
            drawn = list(run(number))
            edges = sum(e for _, e in drawn)
            if number:
                rates[what].append(edges / (time.thread_time() - core) / 1e6)
                rates[f"{what}, wall"].append(edges / (time.perf_counter() - wall) / 1e6)
                counts += drawn
    median = {what: statistics.median(values) for what, values in rates.items()}
    return {
        "graph": name,
        "nodes": graph.nodes,
        "edges": graph.edges,
        "seeds": batch_size,
        "nodes a batch": round(statistics.fmean(n for n, _ in counts)),
        "edges a batch": round(statistics.fmean(e for _, e in counts)),
        "million edges/s": median["op"],
        "wall": median["op, wall"],
        "as batches": median["batches"],
        "as batches, wall": median["batches, wall"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small graphs and few batches: does it run?")
    parser.add_argument("--facebook", type=Path, default=FACEBOOK, help="folder of its edges.csv and target.csv")
    parser.add_argument("--json", type=Path, help="write the table there too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rounds, most = (2, 5) if arguments.quick else (15, 100)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        graphs = {
            f"synthetic, {nodes:,}": synthetic(nodes, work / str(nodes))
            for nodes in ((3000,) if arguments.quick else (20_000, 1_000_000))
        }
        if (arguments.facebook / "edges.csv").is_file():
            graphs = {"facebook": facebook(arguments.facebook, work / "facebook"), **graphs}
        else:
            print(f"no facebook graph at {arguments.facebook}: synthetic graphs only")
        rows = [measure(name, graph, size, rounds, most) for name, graph in graphs.items() for size in (128, 1024)]
    settings = {"fanouts": FANOUTS, "rounds": rounds, "batches": most, "facebook": "facebook" in graphs}
    report_all({"Neighbours drawn, deduplicated and relabelled": rows}, arguments.json, settings)


if __name__ == "__main__":
    main()
