"""A graph with planted communities and a power law of degrees, as a stream of edges.

The model is a degree-corrected stochastic block model (Karrer and Newman, Phys. Rev. E 83, 2011) in which everything is
a closed form of the parameters: neither a table of nodes nor of edges is ever made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from datamodules.atomic import make_once
from datamodules.errors import DataError
from datamodules.graph_format import FORMAT, GraphSource, Relation, write_graph
from datamodules.scatter import rank_of, scatter

__all__ = ["SyntheticGraph", "write_synthetic_graph"]

CHUNK_EDGES = 1 << 20
_CHUNK_NODES = 1 << 20

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SyntheticGraph:
    """The parameters of a synthetic graph.

    Node number ``r`` by popularity has a weight proportional to ``(r + 1) ** -1 / (exponent - 1)``, which gives degrees
    whose distribution falls as ``degree ** -exponent``. It belongs to the community ``r % communities``, so all
    communities have the same mixture of degrees.

    Args:
        nodes: how many.
        degree: mean number of edges at a node, before repeated ones are merged.
        communities: how many; they are the classes.
        homophily: share of the edges whose second end is drawn from the community of the first; the others' is drawn
            from all nodes.
        exponent: of the degrees' power law, above 2.
        seed: of everything.
    """

    nodes: int
    degree: float
    communities: int
    homophily: float
    exponent: float
    seed: int

    def __post_init__(self) -> None:
        if not 1 <= self.communities <= self.nodes:
            raise DataError(
                f"data.nodes={self.nodes} and data.communities={self.communities}; expected 1 community or more, and "
                f"a node for each at least"
            )
        if self.nodes >= 3_000_000_000:
            raise DataError(f"data.nodes={self.nodes}; expected less than 3,000,000,000")
        if self.degree < 0:
            raise DataError(f"data.degree={self.degree}; expected 0 or more")
        if not 0 <= self.homophily <= 1:
            raise DataError(f"data.homophily={self.homophily}; expected a share, 0 to 1")
        if self.exponent <= 2:
            raise DataError(f"data.exponent={self.exponent}; expected more than 2")
        if self.seed < 0:
            raise DataError(f"data.graph_seed={self.seed}; expected 0 or more")

    @property
    def edges(self) -> int:
        """Edges drawn, self loops and repetitions included."""
        return round(self.nodes * self.degree / 2)

    def chunk(self, number: int) -> tuple[Int64, Int64]:
        """The two ends of a chunk of edges, as node ids."""
        count = min(CHUNK_EDGES, self.edges - number * CHUNK_EDGES)
        random = np.random.default_rng([self.seed, number])
        everyone = np.full(count, self.nodes, dtype=np.int64)
        first = self._rank(random.random(count), everyone)
        community = first % self.communities
        members = (self.nodes - community + self.communities - 1) // self.communities
        inside = self._rank(random.random(count), members) * self.communities + community
        outside = self._rank(random.random(count), everyone)
        second = np.where(random.random(count) < self.homophily, inside, outside)
        return scatter(first, self.nodes), scatter(second, self.nodes)

    def _rank(self, uniform: npt.NDArray[np.float64], n: Int64) -> Int64:
        """Ranks 0 .. n - 1 with a power law: the inverse of the continuous distribution on [1, n + 1)."""
        rest = 1 - 1 / (self.exponent - 1)
        x = (1 + uniform * ((n + 1.0) ** rest - 1)) ** (1 / rest)
        return np.clip(x.astype(np.int64) - 1, 0, n - 1)

    def labels(self) -> Iterator[Int64]:
        """The communities of nodes 0, 1, 2 ..., in chunks."""
        for begin in range(0, self.nodes, _CHUNK_NODES):
            ids = np.arange(begin, min(begin + _CHUNK_NODES, self.nodes), dtype=np.int64)
            yield rank_of(ids, self.nodes) % self.communities


def write_synthetic_graph(graph: SyntheticGraph, folder: Path) -> dict[str, Any]:
    """Writes the graph to ``folder``, once: a finished folder of the same parameters is used as it is.

    Returns:
        The manifest of :func:`datamodules.graph_format.write_graph`, with the parameters.
    """

    def write(work: Path) -> dict[str, Any]:
        chunks = range(-(-graph.edges // CHUNK_EDGES))
        edges = Relation(map(graph.chunk, chunks), keys=graph.nodes, total=graph.edges, what="synthetic edges")
        return write_graph(GraphSource(graph.nodes, edges, graph.labels(), graph.communities), work, both_ways=True)

    return make_once(folder, {"format": FORMAT, **asdict(graph)}, "data.path", write)
