"""Graphs of the Open Graph Benchmark (Hu et al., NeurIPS 2020), from the folders that its archives unpack to.

    ogbn_arxiv/                             ogbn_mag/
      raw/edge.csv.gz                         raw/num-node-dict.csv.gz
      raw/num-node-list.csv.gz                raw/relations/paper___cites___paper/edge.csv.gz
      raw/node-feat.csv.gz                    raw/relations/paper___has_topic___field_of_study/edge.csv.gz
      raw/node-label.csv.gz                   raw/relations/author___writes___paper/edge.csv.gz
      split/time/train.csv.gz ...             raw/node-feat/paper/node-feat.csv.gz
                                              raw/node-label/paper/node-label.csv.gz
                                              split/time/paper/train.csv.gz ...

Of these files only ``num-node-dict.csv.gz`` has a header.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from datamodules.errors import DataError
from datamodules.graph_csv import column_chunks, headerless, integers
from datamodules.graph_format import SPLITS, GraphSource, Relation

__all__ = ["is_ogb", "read_ogb"]

Int64 = npt.NDArray[np.int64]

_TYPES = "num-node-dict.csv.gz"  # only a graph of several node types has it
_CITES = "paper___cites___paper"
_PAPER = "paper"
# Columns of keys a paper: the relation, the key's node type, and where the key stands in a pair.
_COLUMNS = {
    "field": ("paper___has_topic___field_of_study", "field_of_study", 1),
    "author": ("author___writes___paper", "author", 0),
}


def is_ogb(folder: Path) -> bool:
    """Whether a folder has the parts of an OGB data set."""
    return (folder / "raw").is_dir() and (folder / "split").is_dir()


def read_ogb(folder: Path) -> GraphSource:
    """ogbn-arxiv, or any node classification of one node type and one graph; or the papers of ogbn-mag.

    Of ogbn-mag the nodes are the papers and the edges their citations. The fields of study and the authors of a paper
    are two columns of keys, ``field`` and ``author``; institutions are left out.

    Raises:
        DataError: a file is absent or does not fit the others.
    """
    raw = folder / "raw"
    if not (raw / _TYPES).is_file():
        nodes = _only(raw / "num-node-list.csv.gz")
        edges = Relation(_pairs(raw / "edge.csv.gz"), keys=nodes, file=raw / "edge.csv.gz")
        return _source(nodes, edges, raw, folder / "split", {}, inner="")
    (batch,) = column_chunks(raw / _TYPES, (_PAPER, *(kind for _, kind, _ in _COLUMNS.values())))
    counts = {name: int(integers(batch[name], name, raw / _TYPES)[0]) for name in batch.schema.names}
    columns = {
        name: Relation(_pairs(raw / "relations" / relation / "edge.csv.gz", at), counts[kind], what=f"pairs of {name}")
        for name, (relation, kind, at) in _COLUMNS.items()
    }
    edges = Relation(_pairs(raw / "relations" / _CITES / "edge.csv.gz"), counts[_PAPER])
    return _source(counts[_PAPER], edges, raw, folder / "split", columns, inner=_PAPER)


def _source(
    nodes: int, edges: Relation, raw: Path, splits: Path, columns: dict[str, Relation], inner: str
) -> GraphSource:
    """``inner`` is the folder of the node type, where there are several."""
    labels_file = raw / "node-label" / inner / "node-label.csv.gz" if inner else raw / "node-label.csv.gz"
    labels = _labels(labels_file, nodes)
    features = raw / "node-feat" / inner / "node-feat.csv.gz" if inner else raw / "node-feat.csv.gz"
    first = next(headerless(features, pa.float32()), None) if features.is_file() else None
    return GraphSource(
        nodes=nodes,
        edges=edges,
        labels=[labels],
        classes=int(labels.max(initial=-1)) + 1,
        split=_split(splits, inner, nodes),
        width=0 if first is None else first.shape[1],
        dense=() if first is None else _floats(features),
        columns=columns,
    )


def _only(path: Path) -> int:
    counts = _column(path)
    if len(counts) != 1:
        raise DataError(f"{path} counts the nodes of {len(counts)} graphs; expected one graph")
    return int(counts[0])


def _pairs(path: Path, key: int = 0) -> Iterator[tuple[Int64, Int64]]:
    """(key, node) of every line; ``key`` says which of the two comes first in a line, by its place."""
    for chunk in headerless(path, pa.int64()):
        if chunk.shape[1] != 2:
            raise DataError(f"{path} has {chunk.shape[1]} columns; expected two, the ends of an edge")
        yield np.ascontiguousarray(chunk[:, key]), np.ascontiguousarray(chunk[:, 1 - key])


def _floats(path: Path) -> Iterator[npt.NDArray[np.float32]]:
    for chunk in headerless(path, pa.float32()):
        yield chunk.astype(np.float32, copy=False)


def _column(path: Path) -> Int64:
    chunks = [chunk[:, 0] for chunk in headerless(path, pa.int64())]
    return np.concatenate([np.empty(0, dtype=np.int64), *chunks])


def _labels(path: Path, nodes: int) -> Int64:
    # As numbers with a point, as they may be missing: "nan".
    chunks = [chunk[:, 0] for chunk in headerless(path, pa.float64())]
    values = np.concatenate([np.empty(0), *chunks])
    if len(values) != nodes:
        raise DataError(f"{path} has {len(values):,} lines for {nodes:,} nodes; expected one class a node")
    return np.where(values >= 0, np.nan_to_num(values), -1).astype(np.int64)


def _split(splits: Path, inner: str, nodes: int) -> npt.NDArray[np.uint8]:
    schemes = sorted(p for p in splits.iterdir() if p.is_dir() and not p.name.startswith("."))
    if len(schemes) != 1:
        listed = ", ".join(p.name for p in schemes) or "none"
        raise DataError(f"{splits} has the splits: {listed}; expected one, as OGB's archives have")
    split = np.zeros(nodes, dtype=np.uint8)
    for name, part in (("train", "train"), ("valid", "val"), ("test", "test")):
        path = schemes[0] / inner / f"{name}.csv.gz"
        members = _column(path)
        if len(members) and not 0 <= int(members.min()) <= int(members.max()) < nodes:
            raise DataError(f"{path} names node {members.max()}; expected 0 .. {nodes - 1}")
        if split[members].any():
            raise DataError(f"{path} names node {members[split[members] > 0][0]}, which is in another part as well")
        split[members] = SPLITS[part]
    return split
