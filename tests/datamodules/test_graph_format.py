"""Graphs on disk against sets of pairs: order, loops, repetitions, both directions, many partitions."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from datamodules import graph_format
from datamodules.atomic import write_json
from datamodules.errors import DataError
from datamodules.graph_format import Graph, GraphSource, Relation, write_graph

Pairs = list[tuple[int, int]]


def chunks(pairs: Pairs, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for begin in range(0, len(pairs), size):
        part = np.array(pairs[begin : begin + size], dtype=np.int64)
        yield part[:, 0].copy(), part[:, 1].copy()


def written(folder: Path, source: GraphSource, both_ways: bool = False) -> tuple[Graph, dict]:
    folder.mkdir()
    manifest = write_graph(source, folder, both_ways)
    write_json(folder / "_manifest.json", manifest)
    return Graph.open(folder), manifest


def neighbours(colptr: np.ndarray, row: np.ndarray) -> list[list[int]]:
    return [row[a:b].tolist() for a, b in pairwise(colptr)]


def random_pairs(nodes: int, count: int) -> Pairs:
    random = np.random.default_rng(0)
    return list(map(tuple, np.stack([random.integers(0, nodes, count), random.integers(0, nodes, count)], 1).tolist()))


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize("partition_nodes", [1, 7, 1 << 16])
def test_the_arrays_hold_the_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, both_ways: bool, partition_nodes: int
) -> None:
    """Whatever the number of ranges that the edges are sorted in: 256, 43 or 1."""
    monkeypatch.setattr(graph_format, "_PARTITION_NODES", partition_nodes)
    pairs = random_pairs(300, 4000)
    source = GraphSource(300, Relation(chunks(pairs, 333), 300), [np.zeros(300, np.int64)], 1)
    graph, manifest = written(tmp_path / "g", source, both_ways)
    edges = [(s, t) for s, t in pairs if s != t]
    directed = edges + [(t, s) for s, t in edges] if both_ways else edges
    expected: list[list[int]] = [[] for _ in range(300)]
    for s, t in sorted(set(directed)):
        expected[t].append(s)
    assert neighbours(graph.colptr, graph.row) == expected
    assert manifest["self_loops"] == len(pairs) - len(edges) > 0
    assert manifest["duplicates"] == len(directed) - len(set(directed)) > 0
    assert manifest["edges"] == graph.edges == len(set(directed))
    assert sorted(p.name for p in graph.folder.iterdir()) == [
        "_manifest.json", "colptr.npy", "labels.npy", "row.npy"
    ]  # fmt: skip


def test_labels_split_dense_and_columns(tmp_path: Path) -> None:
    tags: Pairs = [(9, 2), (0, 2), (9, 0), (0, 2), (2, 2)]
    source = GraphSource(
        nodes=4,
        edges=Relation([], 4),
        labels=iter([np.array([2, -1]), np.array([0, 1])]),
        classes=3,
        split=np.array([1, 0, 2, 3], dtype=np.uint8),
        width=2,
        dense=iter([np.arange(6, dtype=np.float32).reshape(3, 2), np.ones((1, 2), dtype=np.float32)]),
        columns={"tag": Relation(chunks(tags, 2), 10)},
    )
    graph, _ = written(tmp_path / "g", source)
    graph = pickle.loads(pickle.dumps(graph))
    assert (graph.nodes, graph.edges, graph.classes, graph.width) == (4, 0, 3, 2)
    assert graph.columns == {"tag": 10}
    assert graph.labels.tolist() == [2, -1, 0, 1]
    assert graph.split.tolist() == [1, 0, 2, 3]
    assert graph.dense.tolist() == [[0, 1], [2, 3], [4, 5], [1, 1]]
    assert neighbours(*graph.bags["tag"]) == [[9], [], [0, 2, 9], []]  # a key may equal the node's number
    assert graph.colptr.tolist() == [0] * 5
    assert graph.row.tolist() == []
    assert torch.from_numpy(graph.colptr).dtype == torch.int64


def test_pickled_graphs_carry_no_arrays(tmp_path: Path) -> None:
    pairs = random_pairs(1000, 20_000)
    graph, _ = written(
        tmp_path / "g", GraphSource(1000, Relation(chunks(pairs, 5000), 1000), [np.zeros(1000, np.int64)], 1)
    )
    assert len(graph.row) > 10_000
    assert len(pickle.dumps(graph)) < 1000


@pytest.mark.parametrize(("pairs", "wrong"), [([(0, 3)], 3), ([(-1, 0)], -1), ([(1, 2), (4, 0)], 4)])
def test_a_node_out_of_range_is_named(tmp_path: Path, pairs: Pairs, wrong: int) -> None:
    with pytest.raises(DataError, match=rf"edges name {wrong}; expected 0 .. 2"):
        written(tmp_path / "g", GraphSource(3, Relation(chunks(pairs, 9), 3), [np.zeros(3, np.int64)], 1))


def test_dense_rows_must_be_as_many_as_nodes(tmp_path: Path) -> None:
    source = GraphSource(
        3, Relation([], 3), [np.zeros(3, np.int64)], 1, width=1, dense=[np.zeros((2, 1), dtype=np.float32)]
    )
    with pytest.raises(DataError, match="2 rows of dense values for 3 nodes"):
        written(tmp_path / "g", source)
