"""``data=graph_synthetic``: a generated graph with communities to find."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

from datamodules.graph_base import GraphModule
from datamodules.graph_format import Graph
from datamodules.graph_synthetic_edges import SyntheticGraph, write_synthetic_graph
from datamodules.progress import say
from hetrec.data import GraphSpec

__all__ = ["SyntheticGraphDataModule"]


class SyntheticGraphDataModule(GraphModule):
    """An undirected graph whose degrees follow a power law and whose nodes' classes are its planted communities.

    It is written as it is made, any size in bounded memory, in a folder below ``path``, and used again while the
    parameters are the same.

    Args:
        path: the folder below which the graph is kept.
        nodes: how many.
        degree: mean number of edges at a node, before repeated ones are merged.
        communities: how many; they are the classes.
        homophily: share of the edges whose second end is drawn from the community of the first; the others' is drawn
            from all nodes.
        exponent: of the degrees' power law, above 2.
        graph_seed: of the graph.

    The others are those of :class:`datamodules.graph_base.GraphModule`.
    """

    def __init__(
        self,
        path: str = "data/graph_synthetic",
        nodes: int = 100_000,
        degree: float = 20.0,
        communities: int = 10,
        homophily: float = 0.7,
        exponent: float = 2.5,
        graph_seed: int = 0,
        fanouts: Sequence[int] = (10, 10),
        eval_fanouts: Sequence[int] | None = None,
        val_fraction: float = 0.2,
        test_fraction: float = 0.2,
        batch_size: int = 512,
        num_workers: int = 0,
        lookahead: int = 1,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(
            path=path,
            fanouts=fanouts,
            eval_fanouts=eval_fanouts,
            val_fraction=val_fraction,
            test_fraction=test_fraction,
            split="hash",  # it brings none of its own, and need not be made to say so
            batch_size=batch_size,
            num_workers=num_workers,
            lookahead=lookahead,
            shuffle=shuffle,
            seed=seed,
        )
        self.parameters = SyntheticGraph(nodes, degree, communities, homophily, exponent, graph_seed)
        digest = hashlib.sha256(json.dumps(asdict(self.parameters), sort_keys=True).encode()).hexdigest()[:8]
        self.folder = Path(self.path) / f"nodes{nodes}-degree{degree:g}-seed{graph_seed}-{digest}"

    @property
    def spec(self) -> GraphSpec:
        return self.make_spec(self.parameters.nodes, self.parameters.communities, columns={}, width=0)

    @cached_property
    def graph(self) -> Graph:
        manifest = write_synthetic_graph(self.parameters, self.folder)
        say(
            f"synthetic graph in {self.folder}: {manifest['nodes']:,} nodes, {manifest['edges']:,} edges, counted in "
            f"both directions, {manifest['classes']} communities"
        )
        return Graph.open(self.folder)

    def prepare_data(self) -> None:
        """Makes the graph, unless it is there."""
        _ = self.graph
