"""Synthetic graphs: degrees, communities, determinism, memory, and what is kept on disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from datamodules.errors import DataError
from datamodules.graph_synthetic import SyntheticGraphDataModule
from datamodules.graph_synthetic_edges import CHUNK_EDGES, SyntheticGraph
from datamodules.scatter import rank_of, scatter

REPOSITORY = Path(__file__).resolve().parents[2]


def made(path: Path, **options: Any) -> SyntheticGraphDataModule:
    data = SyntheticGraphDataModule(str(path), **{"nodes": 20_000, "degree": 16.0, **options})
    data.prepare_data()
    return data


@pytest.mark.parametrize("n", [1, 2, 7, 1000, 2_999_999_999])
def test_scattering_is_a_permutation(n: int) -> None:
    ids = np.unique(np.linspace(0, n - 1, 1000).astype(np.int64))
    there = scatter(ids, n)
    assert len(np.unique(there)) == len(ids)
    assert 0 <= there.min() <= there.max() < n
    assert (rank_of(there, n) == ids).all()


def test_degrees_follow_the_power_law(tmp_path: Path) -> None:
    data = made(tmp_path, exponent=2.5)
    graph = data.graph
    degrees = np.diff(graph.colptr)
    # Chung-Lu weights: the node of rank r expects a share of (r + 1) ** (-1 / (2.5 - 1)) of all ends of edges.
    rank = rank_of(np.arange(20_000, dtype=np.int64), 20_000)
    weight = (rank + 1.0) ** (-1 / 1.5)
    share = weight / weight.sum()
    groups = np.digitize(rank, [30, 100, 300, 1000, 3000, 10_000])
    for group in range(1, 7):  # the very first ranks meet each other again and again, which merges their edges
        of_group = groups == group
        assert degrees[of_group].sum() / degrees.sum() == pytest.approx(share[of_group].sum(), rel=0.15)
    assert degrees.max() > 30 * degrees.mean()


def test_edges_stay_in_their_community_as_often_as_said(tmp_path: Path) -> None:
    for homophily in (0.0, 0.6, 1.0):
        graph = made(tmp_path, communities=4, homophily=homophily).graph
        targets = np.repeat(np.arange(graph.nodes), np.diff(graph.colptr))
        inside = np.mean(graph.labels[targets] == graph.labels[graph.row])
        assert inside == pytest.approx(homophily + (1 - homophily) / 4, abs=0.03)
        assert np.bincount(graph.labels).tolist() == [5000] * 4


def test_edges_go_both_ways_without_loops(tmp_path: Path) -> None:
    graph = made(tmp_path, nodes=500).graph
    targets = np.repeat(np.arange(500), np.diff(graph.colptr))
    edges = set(zip(graph.row.tolist(), targets.tolist(), strict=True))
    assert len(edges) == graph.edges
    assert edges == {(t, s) for s, t in edges}
    assert all(s != t for s, t in edges)
    ends = SyntheticGraph(500, 16.0, 10, 0.7, 2.5, 0).chunk(0)
    drawn = set(zip(*(end.tolist() for end in ends), strict=True))
    assert edges == {e for s, t in drawn if s != t for e in ((s, t), (t, s))}


def test_a_graph_is_a_function_of_its_parameters(tmp_path: Path) -> None:
    first = made(tmp_path / "a").graph
    assert (first.row == made(tmp_path / "b").graph.row).all()
    assert (first.labels == made(tmp_path / "b").graph.labels).all()
    other = made(tmp_path / "a", graph_seed=1).graph
    assert other.folder != first.folder
    assert len(other.row) != len(first.row) or (other.row != first.row).any()


def test_it_is_made_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = made(tmp_path)
    assert "160000/160000 pairs" in capfd.readouterr().err
    made_at = {p: p.stat().st_mtime_ns for p in first.folder.iterdir()}
    made(tmp_path, batch_size=7, seed=3)
    shown = capfd.readouterr().err
    assert "pairs" not in shown
    assert "20,000 nodes" in " ".join(shown.split())
    assert {p: p.stat().st_mtime_ns for p in first.folder.iterdir()} == made_at


def test_the_spec_costs_nothing(tmp_path: Path) -> None:
    data = SyntheticGraphDataModule(str(tmp_path / "none"), nodes=10**9, communities=50)
    assert data.spec.tables[0].num_embeddings == 10**9
    assert data.spec.num_classes == 50
    assert data.has_test
    assert not (tmp_path / "none").exists()
    small = made(tmp_path, nodes=100)
    assert SyntheticGraphDataModule(str(tmp_path), nodes=100, degree=16.0).spec == super(type(small), small).spec


def test_chunks_are_drawn_apart(tmp_path: Path) -> None:
    graph = SyntheticGraph(nodes=1_000_000, degree=4.4, communities=3, homophily=0.5, exponent=3.0, seed=0)
    assert graph.edges == 2_200_000
    chunks = [graph.chunk(c) for c in range(3)]
    assert [len(a) for a, _ in chunks] == [CHUNK_EDGES, CHUNK_EDGES, 2_200_000 - 2 * CHUNK_EDGES]
    assert (chunks[0][0] != chunks[1][0]).any()
    assert all(0 <= end.min() <= end.max() < 1_000_000 for chunk in chunks for end in chunk)


MEMORY = """
import resource, sys
from pathlib import Path
from datamodules.graph_synthetic_edges import SyntheticGraph, write_synthetic_graph
write_synthetic_graph(SyntheticGraph(100_000, 10.0, 5, 0.5, 2.5, 0), Path(sys.argv[1]) / "small")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
manifest = write_synthetic_graph(SyntheticGraph(600_000, 30.0, 5, 0.5, 2.5, 0), Path(sys.argv[1]) / "large")
print(manifest["edges"], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_grow_with_the_edges(tmp_path: Path) -> None:
    """18 million directed pairs, 288 MB if they were together as two arrays of int64."""
    out = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=250,
    ).stdout.split()
    assert int(out[0]) > 16_000_000
    assert int(out[1]) < 100_000, f"{out[1]} kB more than for a small graph"


def test_a_neighbourhood_tells_the_community(tmp_path: Path) -> None:
    """The majority of the sampled neighbours' classes, plain torch: the signal is there for a model to find."""
    data = made(tmp_path, homophily=0.7, fanouts=[20])
    right = total = 0
    for batch in data.train_dataloader():
        ids = batch.sparse_features["node"].values()
        votes = torch.zeros(batch.batch_size, 10)
        source, target = batch.edge_index
        classes = torch.from_numpy(data.graph.labels[ids[source]])
        votes.index_put_((target, classes), torch.ones(len(source)), accumulate=True)
        right += int((votes.argmax(1) == batch.labels).sum())
        total += batch.batch_size
    data.teardown()
    assert total == pytest.approx(12_000, rel=0.03)
    assert right / total > 0.85


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 0}, "data.nodes=0 and data.communities=10"),
        ({"communities": 0}, "expected 1 community or more"),
        ({"nodes": 3 * 10**9}, "less than 3,000,000,000"),
        ({"degree": -1.0}, r"data.degree=-1.0; expected 0 or more"),
        ({"homophily": 1.5}, r"data.homophily=1.5; expected a share"),
        ({"exponent": 2.0}, r"data.exponent=2.0; expected more than 2"),
        ({"graph_seed": -1}, "data.graph_seed=-1"),
    ],
)
def test_wrong_parameters_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        SyntheticGraphDataModule(**options)


def test_a_graph_without_edges(tmp_path: Path) -> None:
    data = made(tmp_path, nodes=30, degree=0.0)
    batch = next(iter(data.train_dataloader()))
    data.teardown()
    assert data.graph.edges == 0
    assert batch.edges_per_hop == [0, 0]
