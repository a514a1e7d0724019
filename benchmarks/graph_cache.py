"""Miss rates of small caches on the node ids of GraphSAGE's batches: HET's figure 8 (VLDB'22) on our graphs.

Batches of 128 seeds with their sampled neighbourhoods, HET's depth and width (fan-outs 2, 2) and our default (10, 10);
caches of 3, 5, 10 and 15 % of the nodes; a batch planned while the one before is in use, as in training. After one
epoch that fills the cache: the share of a batch's distinct nodes that are not cached, mean over an epoch of at most 400
batches. LRU and LFU are the figure's; `lookahead` (8 batches known) is our default.

The facebook page network is read where it lies at ../shared/data/graph/facebook beside the checkout, or at --facebook;
a generated power-law graph is measured always.

    python benchmarks/graph_cache.py [--json FILE] [--plot FILE] [--quick]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # datamodules is part of the checkout, not installed

import numpy as np
import torch
from policies import Run
from report import report_all
from rich.progress import track
from sampling import FACEBOOK, facebook, synthetic

from cache_backend import ops
from cache_backend.cache import UniqueRows
from datamodules.graph_format import Graph

FRACTIONS = (0.03, 0.05, 0.1, 0.15)
FANOUTS = {"2, 2": [2, 2], "10, 10": [10, 10]}
POLICIES = {"lru": 1, "lfu": 1, "lookahead": 8}
SEEDS = 128
ONE_TABLE = torch.zeros(1, dtype=torch.int32)


def batches(graph: Graph, fanouts: list[int], most: int) -> Iterator[UniqueRows]:
    """Node ids of two epochs' batches, at most ``most`` of each."""
    colptr, row = torch.from_numpy(np.array(graph.colptr)), torch.from_numpy(np.array(graph.row))
    for epoch in range(2):
        order = torch.from_numpy(np.random.default_rng(epoch).permutation(graph.nodes))
        for number, seeds in enumerate(order.split(SEEDS)[:most]):
            nodes, *_ = ops.sample_neighbors(colptr, row, seeds, fanouts, 0, epoch, number)
            yield UniqueRows(*ops.unique_rows(nodes, torch.tensor([0, nodes.numel()]), ONE_TABLE))


def measure(name: str, graph: Graph, most: int) -> Iterator[dict[str, Any]]:
    for shown, fanouts in FANOUTS.items():
        stream = list(batches(graph, fanouts, most))
        runs = {
            (f, p): Run(p, depth, rows=max(32, round(f * graph.nodes)))
            for f in FRACTIONS
            for p, depth in POLICIES.items()
        }
        for first in track(range(len(stream)), description=f"{name}, fan-outs {shown}", transient=True):
            window = deque(stream[first : first + max(POLICIES.values())])
            for run in runs.values():
                run.step(window)
        second = len(stream) // 2
        distinct = float(np.mean([rows.keys.numel() for rows in stream[second:]]))
        for fraction in FRACTIONS:
            misses = {f"{p} miss %": 100 * float(np.mean(runs[fraction, p].miss[second:])) for p in POLICIES}
            yield {
                "graph": name,
                "nodes": graph.nodes,
                "fan-outs": shown,
                "nodes a batch": round(distinct),
                "cached %": round(100 * fraction),
                **misses,
            }


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    """A panel a graph and fan-out, a line a policy."""
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((row["graph"], row["fan-outs"]) for row in rows))
    figure = Figure(figsize=(4 * len(panels), 4), layout="constrained")
    for axes, (graph, fanouts) in zip(figure.subplots(1, len(panels), sharey=True), panels, strict=True):
        mine = [row for row in rows if (row["graph"], row["fan-outs"]) == (graph, fanouts)]
        for policy in POLICIES:
            axes.plot([row["cached %"] for row in mine], [row[f"{policy} miss %"] for row in mine], "o-", label=policy)
        axes.set(title=f"{graph}, fan-outs {fanouts}", xlabel="nodes cached, %", xticks=[100 * f for f in FRACTIONS])
    figure.axes[0].set(ylabel="distinct nodes of a batch that miss, %", ylim=(0, None))
    figure.axes[0].legend()
    figure.savefig(file, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small graph and few batches: does it run?")
    parser.add_argument("--facebook", type=Path, default=FACEBOOK, help="folder of its edges.csv and target.csv")
    parser.add_argument("--json", type=Path, help="write the table there too")
    parser.add_argument("--plot", type=Path, help="draw it there, as PNG")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    most, nodes = (8, 3000) if arguments.quick else (400, 200_000)
    with tempfile.TemporaryDirectory() as folder:
        graphs = {f"power law, {nodes:,}": synthetic(nodes, Path(folder) / "synthetic")}
        if (arguments.facebook / "edges.csv").is_file():
            graphs = {"facebook": facebook(arguments.facebook, Path(folder) / "facebook"), **graphs}
        else:
            print(f"no facebook graph at {arguments.facebook}: the generated graph only")
        rows = [row for name, graph in graphs.items() for row in measure(name, graph, most)]
    report_all({"Misses of a cache of node embeddings": rows}, arguments.json, {"batches": most, "seeds": SEEDS})
    if arguments.plot is not None:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
