"""``data=graph``: a graph of your own, PyG's, or the Open Graph Benchmark's."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cached_property
from os.path import expanduser
from pathlib import Path
from typing import Any, Literal

from datamodules.atomic import make_once
from datamodules.errors import DataError
from datamodules.graph_base import GraphModule
from datamodules.graph_format import FORMAT, Graph, GraphSource, write_graph
from datamodules.graph_ogb import is_ogb, read_ogb
from datamodules.graph_pyg import read_pyg
from datamodules.graph_tables import GraphTables, find_table, read_tables
from datamodules.progress import say

__all__ = ["GraphDataModule"]


class GraphDataModule(GraphModule):
    """Node classification on a graph from files, in one of three layouts:

    * a folder with a table of edges and one of the nodes' classes, CSV (``.gz`` or not) or Parquet: ``edges.csv`` with
      the columns ``id_1``, ``id_2``, and ``target.csv`` with ``id``, ``target``, as in the MUSAE page networks;
    * a PyG file (``.pt``) that holds one ``torch_geometric.data.Data`` (see :func:`datamodules.graph_pyg.read_pyg`);
    * a folder of the Open Graph Benchmark with ``raw/`` and ``split/``: ogbn-arxiv, ogbn-mag (see
      :func:`datamodules.graph_ogb.read_ogb`).

    Nodes are numbered from 0. Self loops are dropped, an edge that occurs several times counts once. An edge goes from
    its first end (``source``) to its second (``target``), and a node samples those that point at it. Classes are
    integers from 0 (a negative one is none) or strings; nodes without a class are neighbours, and never seeds.

    The graph converts once to memory-mapped arrays (:mod:`datamodules.graph_format`), beside the source or in
    ``cache_dir``, and anew if the source changes.

    Args:
        path: the folder or ``.pt`` file.
        cache_dir: where converted copies are kept; null: at ``<path>.graph``, or ``<path>.digraph`` if directed.
        undirected: whether every edge is taken in both directions.
        edges: the table of edges in ``path``, with or without its suffix.
        targets: the table of the nodes' classes.
        source: the column of an edge's first end.
        target: the column of its second end.
        node: the column of node ids beside the classes.
        label: the column of classes.

    The others are those of :class:`datamodules.graph_base.GraphModule`.
    """

    def __init__(
        self,
        path: str = "data/graph",
        cache_dir: str | None = None,
        undirected: bool = True,
        edges: str = "edges",
        targets: str = "target",
        source: str = "id_1",
        target: str = "id_2",
        node: str = "id",
        label: str = "target",
        fanouts: Sequence[int] = (10, 10),
        eval_fanouts: Sequence[int] | None = None,
        val_fraction: float = 0.2,
        test_fraction: float = 0.2,
        split: Literal["auto", "hash"] = "auto",
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
            split=split,
            batch_size=batch_size,
            num_workers=num_workers,
            lookahead=lookahead,
            shuffle=shuffle,
            seed=seed,
        )
        self.cache_dir = cache_dir and expanduser(cache_dir)
        self.undirected = undirected
        self.edges = edges
        self.targets = targets
        self.columns = {"source": source, "target": target, "node": node, "label": label}

    @cached_property
    def graph(self) -> Graph:
        files, read = self._source()
        folder = self._copy_folder()
        states = [(str(file.resolve()), file.stat()) for file in files]
        parameters = {
            "format": FORMAT,
            "undirected": self.undirected,
            "columns": self.columns,
            "sources": [{"path": p, "bytes": s.st_size, "modified_ns": s.st_mtime_ns} for p, s in states],
        }

        def write(work: Path) -> dict[str, Any]:
            say(f"converting {self.path} to {folder}, once")
            return write_graph(read(), work, both_ways=self.undirected)

        manifest = make_once(folder, parameters, "data.cache_dir", write)
        self._announce(manifest)
        return Graph.open(folder)

    def prepare_data(self) -> None:
        """Converts the graph, unless that is done."""
        _ = self.graph

    def _announce(self, manifest: dict[str, Any]) -> None:
        direction = "counted in both directions" if self.undirected else "directed"
        say(
            f"graph {self.path}: {manifest['nodes']:,} nodes, {manifest['edges']:,} edges, {direction} "
            f"({manifest['self_loops']:,} self loops and {manifest['duplicates']:,} repetitions left out), "
            f"{manifest['classes']} classes"
        )

    def _source(self) -> tuple[list[Path], Callable[[], GraphSource]]:
        """The files that the graph depends on, and what reads them.

        Raises:
            DataError: ``path`` holds no graph.
        """
        path = Path(self.path)
        if path.is_file() and path.suffix == ".pt":
            return [path], lambda: read_pyg(path)
        if is_ogb(path):
            files = sorted(p for part in ("raw", "split") for p in (path / part).rglob("*.csv.gz"))
            return files, lambda: read_ogb(path)
        edges, targets = find_table(path, self.edges), find_table(path, self.targets)
        if edges is not None and targets is not None:
            tables = GraphTables(edges, targets, **self.columns)
            return [edges, targets], lambda: read_tables(tables)
        raise DataError(self._nothing_there(path))

    def _nothing_there(self, path: Path) -> str:
        what = "does not exist"
        if path.is_file():
            what = "is no .pt file"
        elif path.is_dir():
            absent = [f"{name}.csv" for name in (self.edges, self.targets) if find_table(path, name) is None]
            what = f"lacks {' and '.join(absent)}, and has no raw/ and split/"
        c = self.columns
        return (
            f"data.path={self.path!r} {what}; expected a folder with {self.edges}.csv (columns {c['source']}, "
            f"{c['target']}) and {self.targets}.csv (columns {c['node']}, {c['label']}), also .csv.gz or .parquet; or "
            f"a PyG file (.pt); or an unpacked OGB folder (ogbn_arxiv, ogbn_mag). Put the files there, or set "
            f"data.path; data=graph_synthetic needs none"
        )

    def _copy_folder(self) -> Path:
        path, suffix = Path(self.path), "graph" if self.undirected else "digraph"
        if self.cache_dir is None:
            return path.with_name(f"{path.name}.{suffix}")
        digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
        return Path(self.cache_dir) / f"{path.name}-{digest}.{suffix}"
