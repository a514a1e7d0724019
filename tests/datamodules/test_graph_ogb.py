"""Folders as the Open Graph Benchmark's archives unpack: file names, headers and order of columns are theirs."""

from __future__ import annotations

import gzip
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from datamodules.errors import DataError
from datamodules.graph import GraphDataModule
from hetrec.data import SparseFeature, TableSpec

PAPERS = 12


def put(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        file.writelines(f"{line}\n" for line in lines)


@pytest.fixture
def arxiv(tmp_path: Path) -> Path:
    """Papers 0 .. 11, each cites the one before; two features; three classes; a paper without one."""
    root = tmp_path / "ogbn_arxiv"
    raw, split = root / "raw", root / "split" / "time"
    put(raw / "edge.csv.gz", *(f"{v},{v - 1}" for v in range(1, PAPERS)))
    put(raw / "num-node-list.csv.gz", str(PAPERS))
    put(raw / "num-edge-list.csv.gz", str(PAPERS - 1))
    put(raw / "node-feat.csv.gz", *(f"{v / 8},-{v}" for v in range(PAPERS)))
    put(raw / "node-label.csv.gz", *("nan" if v == 5 else str(v % 3) for v in range(PAPERS)))
    put(raw / "node_year.csv.gz", *(["2010"] * PAPERS))
    put(split / "train.csv.gz", *map(str, (0, 1, 2, 3, 4, 5)))
    put(split / "valid.csv.gz", "7", "6")
    put(split / "test.csv.gz", "8", "9", "10", "11")
    return root


TOPICS = [(0, 4), (0, 1), (3, 0), (11, 4)]  # paper, field
WRITES = [(6, 0), (2, 0), (6, 1), (5, 11)]  # author, paper


@pytest.fixture
def mag(tmp_path: Path) -> Path:
    root = tmp_path / "ogbn_mag"
    raw, split = root / "raw", root / "split" / "time"
    put(raw / "num-node-dict.csv.gz", "author,field_of_study,institution,paper", f"7,5,3,{PAPERS}")
    put(raw / "triplet-type-list.csv.gz", "author,affiliated_with,institution", "author,writes,paper")
    relations = {
        "author___affiliated_with___institution": [(0, 0)],
        "author___writes___paper": WRITES,
        "paper___cites___paper": [(1, 0), (2, 0), (2, 1)],
        "paper___has_topic___field_of_study": TOPICS,
    }
    for name, pairs in relations.items():
        put(raw / "relations" / name / "edge.csv.gz", *(f"{a},{b}" for a, b in pairs))
        put(raw / "relations" / name / "num-edge-list.csv.gz", str(len(pairs)))
    put(raw / "node-feat" / "paper" / "node-feat.csv.gz", *(f"{v},0.5,1e-3" for v in range(PAPERS)))
    put(raw / "node-label" / "paper" / "node-label.csv.gz", *(str(v // 3) for v in range(PAPERS)))
    put(raw / "nodetype-has-label.csv.gz", "author,paper", "False,True")
    put(split / "nodetype-has-split.csv.gz", "author,paper", "False,True")
    for name, nodes in {"train": range(8), "valid": range(8, 10), "test": range(10, 12)}.items():
        put(split / "paper" / f"{name}.csv.gz", *map(str, nodes))
    return root


def test_arxiv(arxiv: Path) -> None:
    data = GraphDataModule(str(arxiv), undirected=False, fanouts=[-1])
    graph = data.graph
    assert [graph.row[a:b].tolist() for a, b in pairwise(graph.colptr)] == [[v + 1] for v in range(11)] + [[]]
    assert data.spec.num_classes == 3
    assert data.spec.dense == ("x0", "x1")
    assert (graph.dense == np.array([[v / 8, -v] for v in range(PAPERS)], dtype=np.float32)).all()
    data.setup("fit")
    assert [data._split_seeds(s).tolist() for s in ("train", "val", "test")] == [
        [0, 1, 2, 3, 4],
        [6, 7],
        [8, 9, 10, 11],
    ]
    assert graph.labels[5] == -1


def test_mag(mag: Path) -> None:
    data = GraphDataModule(str(mag), fanouts=[-1])
    graph = data.graph
    assert (graph.nodes, graph.edges) == (PAPERS, 6)
    assert data.spec.sparse == tuple(SparseFeature(n, n) for n in ("node", "field", "author"))
    assert data.spec.tables == (
        TableSpec("node", PAPERS),
        TableSpec("field", 5, pooling="mean"),
        TableSpec("author", 7, pooling="mean"),
    )
    assert data.spec.num_classes == 4
    assert len(data.spec.dense) == 3
    (batch,) = data.predict_dataloader()
    data.teardown()
    features = batch.sparse_features
    assert features.keys() == ["node", "field", "author"]
    assert features.stride() == PAPERS
    assert features["node"].values().tolist() == list(range(PAPERS))
    for name, pairs in (("field", TOPICS), ("author", [(p, a) for a, p in WRITES])):
        bags = [sorted(k for p, k in pairs if p == v) for v in range(PAPERS)]
        assert [bag.tolist() for bag in features[name].to_dense()] == bags
    assert batch.dense_features[:, 0].tolist() == list(range(PAPERS))
    assert batch.labels.tolist() == [v // 3 for v in range(PAPERS)]


@pytest.mark.parametrize(
    ("file", "lines", "message"),
    [
        ("raw/edge.csv.gz", None, "edge.csv.gz cannot be read"),
        ("raw/edge.csv.gz", ["0,1,2"], "edge.csv.gz has 3 columns; expected two"),
        ("raw/edge.csv.gz", ["0,1", "2,"], "edge.csv.gz has lines with missing values; every line needs 2 integers"),
        ("raw/edge.csv.gz", ["0,x"], "edge.csv.gz cannot be read: .*invalid value 'x'"),
        ("raw/edge.csv.gz", ["0,12"], "edges name 12; expected 0 .. 11"),
        ("raw/num-node-list.csv.gz", ["3", "9"], "counts the nodes of 2 graphs"),
        ("raw/node-label.csv.gz", ["1"], "has 1 lines for 12 nodes"),
        ("raw/node-feat.csv.gz", ["1,2"], "1 rows of dense values for 12 nodes"),
        ("split/time/test.csv.gz", ["12"], "test.csv.gz names node 12; expected 0 .. 11"),
        ("split/time/test.csv.gz", ["7"], "test.csv.gz names node 7, which is in another part"),
        ("split/time/valid.csv.gz", None, "valid.csv.gz cannot be read"),
        ("split/random/test.csv.gz", ["1"], "has the splits: random, time; expected one"),
    ],
)
def test_files_that_do_not_fit(arxiv: Path, file: str, lines: list[str] | None, message: str) -> None:
    if lines is None:
        (arxiv / file).unlink()
    else:
        put(arxiv / file, *lines)
    with pytest.raises(DataError, match=message):
        _ = GraphDataModule(str(arxiv)).graph


def test_features_and_edges_may_be_absent(arxiv: Path, mag: Path) -> None:
    (arxiv / "raw" / "node-feat.csv.gz").unlink()
    put(arxiv / "raw" / "edge.csv.gz")
    data = GraphDataModule(str(arxiv))
    assert (data.graph.edges, data.spec.dense) == (0, ())
    shutil.rmtree(mag / "raw" / "relations" / "author___writes___paper")
    with pytest.raises(DataError, match=r"author___writes___paper/edge.csv.gz cannot be read"):
        _ = GraphDataModule(str(mag)).graph
