"""Neighbour sampling against a slow sampler with dictionaries, and against what any sampler must do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric.nn import SAGEConv
from torch_geometric.utils import k_hop_subgraph, trim_to_layer

from cache_backend import ops

REPOSITORY = Path(__file__).resolve().parents[2]
Graph = list[list[int]]  # the in-neighbours of every node
Sample = tuple[list[int], list[tuple[int, int]], list[int], list[int]]

WORD, LONG = (1 << 32) - 1, (1 << 64) - 1
RING = [[(v - 1) % 7, (v + 1) % 7] for v in range(7)]


def csc(graph: Graph) -> tuple[Tensor, Tensor]:
    colptr = np.cumsum([0, *map(len, graph)])
    return torch.from_numpy(colptr), torch.tensor([v for neighbors in graph for v in neighbors], dtype=torch.int64)


def sample(graph: Graph, seeds: list[int], fanouts: list[int], seed: int = 0, epoch: int = 0, batch: int = 0) -> Sample:
    """Nodes, (source, target) positions of the edges, nodes per hop, edges per hop."""
    seed_nodes = torch.tensor(seeds, dtype=torch.int64)
    nodes, edge_index, *hops = ops.sample_neighbors(*csc(graph), seed_nodes, fanouts, seed, epoch, batch)
    assert {t.dtype for t in (nodes, edge_index, *hops)} == {torch.int64}
    return nodes.tolist(), [(s, t) for s, t in edge_index.T.tolist()], hops[0].tolist(), hops[1].tolist()


def mix(x: int) -> int:
    """MurmurHash3's 64-bit finalizer."""
    x = (x ^ x >> 33) * 0xFF51AFD7ED558CCD & LONG
    x = (x ^ x >> 33) * 0xC4CEB9FE1A85EC53 & LONG
    return x ^ x >> 33


def philox(counter: tuple[int, int, int, int], key: int) -> tuple[int, int, int, int]:
    """Philox4x32-10 from its paper (Salmon et al., SC 2011); tests/cache_backend/test_init.py has its vectors."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & WORD, key >> 32
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & WORD, (p0 >> 32) ^ c3 ^ k1, p0 & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


def reference_draw(key: int, node: int, n: int, k: int) -> list[int]:
    """Floyd's subset of size k of range(n)."""
    taken: list[int] = []
    for i in range(k):
        block, half, lane = i // 16, i % 16 // 8, i % 8
        counter = block * 8 + lane
        words = philox((node & WORD, node >> 32, counter & WORD, counter >> 32), key)
        random = words[2 * half + 1] << 32 | words[2 * half]
        last = n - k + i
        pick = random * (last + 1) >> 64
        taken.append(last if pick in taken else pick)
    return taken


def reference(graph: Graph, seeds: list[int], fanouts: list[int], seed: int, epoch: int, batch: int) -> Sample:
    golden = 0x9E3779B97F4A7C15
    key = mix((seed & LONG) + golden & LONG)
    for number in (epoch, batch):
        key = mix((key ^ number) + golden & LONG)
    positions = {node: i for i, node in enumerate(seeds)}
    frontier, edges, nodes_per_hop, edges_per_hop = list(seeds), [], [len(seeds)], []
    for fanout in fanouts:
        known, first = len(positions), len(edges)
        for node in frontier:
            neighbors = graph[node]
            drawn = range(len(neighbors))
            if 0 <= fanout < len(neighbors):
                drawn = reference_draw(key, node, len(neighbors), fanout)
            for i in drawn:
                edges.append((positions.setdefault(neighbors[i], len(positions)), positions[node]))
        frontier = list(positions)[known:]
        nodes_per_hop.append(len(frontier))
        edges_per_hop.append(len(edges) - first)
    return list(positions), edges, nodes_per_hop, edges_per_hop


def random_graph(nodes: int, edges: int, seed: int = 0) -> Graph:
    """In-neighbours without repetition, of very different numbers."""
    random = np.random.default_rng(seed)
    targets = (nodes * random.random(edges) ** 3).astype(int)
    graph: list[set[int]] = [set() for _ in range(nodes)]
    for source, target in zip(random.integers(0, nodes, edges).tolist(), targets.tolist(), strict=True):
        graph[target].add(source)
    return [sorted(neighbors) for neighbors in graph]


@pytest.mark.parametrize("fanouts", [[1], [3, 2], [10, 10], [-1, 4], [40, -1, 1], [-1, -1]])
@pytest.mark.parametrize("numbers", [(0, 0, 0), (7, 3, 12), (2**63 - 1, 0, 5), (-1, 2, 2**40)])
def test_samples_are_those_of_the_slow_sampler(fanouts: list[int], numbers: tuple[int, int, int]) -> None:
    graph = random_graph(300, 4000)
    seeds = np.random.default_rng(1).permutation(300)[:40].tolist()
    assert sample(graph, seeds, fanouts, *numbers) == reference(graph, seeds, fanouts, *numbers)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Graph, list[int], list[int]]:
    nodes = draw(st.integers(1, 12))
    graph = [sorted(draw(st.sets(st.integers(0, nodes - 1)))) for _ in range(nodes)]
    seeds = draw(st.lists(st.integers(0, nodes - 1), unique=True))
    return graph, seeds, draw(st.lists(st.sampled_from([-1, 1, 2, 3]), max_size=4))


@given(cases(), st.integers(0, 5))
@settings(deadline=None, max_examples=200)
def test_what_any_sampler_must_do(case: tuple[Graph, list[int], list[int]], batch: int) -> None:
    graph, seeds, fanouts = case
    nodes, edges, nodes_per_hop, edges_per_hop = sample(graph, seeds, fanouts, batch=batch)
    assert nodes[: len(seeds)] == seeds
    assert len(set(nodes)) == len(nodes) == sum(nodes_per_hop)
    assert nodes_per_hop[0] == len(seeds)
    assert len(edges) == sum(edges_per_hop)
    assert len(nodes_per_hop) == len(fanouts) + 1
    reached, expanded, at = len(seeds), 0, 0
    for hop, fanout in enumerate(fanouts):
        of_hop = edges[at : at + edges_per_hop[hop]]
        for position in range(expanded, reached):
            neighbors = graph[nodes[position]]
            drawn = [nodes[s] for s, t in of_hop if t == position]
            assert len(drawn) == (len(neighbors) if fanout == -1 else min(fanout, len(neighbors)))
            assert len(set(drawn)) == len(drawn)
            assert set(drawn) <= set(neighbors)
        assert all(expanded <= t < reached and s < reached + nodes_per_hop[hop + 1] for s, t in of_hop)
        found = {s for s, _ in of_hop}
        expanded, reached, at = reached, reached + nodes_per_hop[hop + 1], at + edges_per_hop[hop]
        assert set(range(expanded, reached)) <= found  # nobody enters the list without an edge


def test_a_ring_of_seven() -> None:
    """Positions are not ids: seeds 1, 3, 5 are nodes 0, 1, 2 of the sample."""
    nodes, edges, nodes_per_hop, edges_per_hop = sample(RING, [1, 3, 5], [-1])
    assert nodes == [1, 3, 5, 0, 2, 4, 6]
    assert edges == [(3, 0), (4, 0), (4, 1), (5, 1), (5, 2), (6, 2)]
    assert (nodes_per_hop, edges_per_hop) == ([3, 4], [6])


def test_all_neighbours_are_the_graph_s_own_k_hop_neighbourhood() -> None:
    graph = random_graph(200, 500, seed=3)
    edge_index = torch.tensor([[s, t] for t, sources in enumerate(graph) for s in sources]).T
    for hops in (1, 2, 3):
        nodes, edges, *_ = sample(graph, [150, 20, 99], [-1] * hops)
        wanted, _, _, mask = k_hop_subgraph([150, 20, 99], hops, edge_index, num_nodes=200, directed=True)
        assert set(nodes) == set(wanted.tolist())
        # PyG keeps every edge between the nodes; here the nodes of the last hop have no neighbours of their own.
        assert {(nodes[s], nodes[t]) for s, t in edges} <= set(map(tuple, edge_index[:, mask].T.tolist()))


def test_a_trimmed_convolution_gives_the_seeds_what_the_whole_sample_does() -> None:
    graph = random_graph(300, 3000, seed=2)
    seeds = torch.arange(20, 60)
    nodes, edge_index, *hops = ops.sample_neighbors(*csc(graph), seeds, [4, 3], 0, 0, 0)
    nodes_per_hop, edges_per_hop = (h.tolist() for h in hops)
    torch.manual_seed(0)
    convolutions = [SAGEConv(8, 8), SAGEConv(8, 8)]
    x = whole = torch.randn(300, 8)[nodes]
    with torch.no_grad():
        for layer, convolution in enumerate(convolutions):
            x, edges, _ = trim_to_layer(layer, nodes_per_hop, edges_per_hop, x, edge_index)
            x = convolution(x, edges)
            whole = convolution(whole, edge_index)
    torch.testing.assert_close(x[:40], whole[:40])
    assert len(x) < len(whole)


@pytest.mark.parametrize("fanouts", [[], [2], [-1, 3]])
def test_isolated_nodes_and_a_graph_without_edges(fanouts: list[int]) -> None:
    empty: Graph = [[], [], []]
    hops = len(fanouts)
    assert sample(empty, [2, 0], fanouts) == ([2, 0], [], [2] + [0] * hops, [0] * hops)
    assert sample(empty, [], fanouts) == ([], [], [0] * (hops + 1), [0] * hops)
    half: Graph = [[], [2], [1], []]
    nodes, edges, *_ = sample(half, [3, 1, 0], fanouts)
    assert nodes == ([3, 1, 0, 2] if hops else [3, 1, 0])
    assert edges[:1] == ([(3, 1)] if hops else [])


def test_directed_edges_are_followed_against_their_direction() -> None:
    graph = [[], [0], [1]]  # 0 -> 1 -> 2
    assert sample(graph, [2], [-1, -1]) == ([2, 1, 0], [(1, 0), (2, 1)], [1, 1, 1], [1, 1])
    assert sample(graph, [0], [-1, -1]) == ([0], [], [1, 0, 0], [0, 0])


@pytest.mark.parametrize(("n", "k"), [(5, 2), (6, 3), (4, 3)])
def test_every_subset_of_neighbours_is_as_likely(n: int, k: int) -> None:
    graph: Graph = [list(range(1, n + 1)), *([[]] * n)]
    rounds = 6000
    drawn = Counter(frozenset(sample(graph, [0], [k], batch=b)[0][1:]) for b in range(rounds))
    subsets = list(map(frozenset, combinations(range(1, n + 1), k)))
    assert set(drawn) <= set(subsets)
    mean = rounds / len(subsets)
    assert all(abs(drawn[s] - mean) < 5 * mean**0.5 for s in subsets)


def test_neighbours_of_a_hub_are_drawn_evenly() -> None:
    graph: Graph = [list(range(100_000)), *([[]] * 99_999)]
    drawn = np.array([sample(graph, [0], [5000], epoch=e)[0][1:] for e in range(4)])
    assert all(len(set(d)) >= 4999 for d in drawn.tolist())  # node 0 may be its own neighbour
    counts, _ = np.histogram(drawn, bins=20, range=(0, 100_000))
    assert np.abs(counts / counts.mean() - 1).max() < 0.15  # 1,000 a bin: 4.7 standard deviations


def test_seed_epoch_batch_and_node_decide_alone() -> None:
    graph = random_graph(300, 6000)
    everyone = list(range(300))

    def of_node_0(seeds: list[int], **numbers: int) -> list[int]:
        nodes, edges, *_ = sample(graph, seeds, [3], **numbers)
        return [nodes[s] for s, t in edges if nodes[t] == 0]

    first = of_node_0([0])
    assert first == of_node_0(everyone) == of_node_0(everyone[::-1])
    others = [sample(graph, everyone, [3], **{name: 1}) for name in ("seed", "epoch", "batch")]
    assert len({str(s) for s in [sample(graph, everyone, [3]), *others]}) == 4
    assert sample(graph, everyone, [3], epoch=1, batch=2) != sample(graph, everyone, [3], epoch=2, batch=1)


PROCESS = """
import torch
from cache_backend import ops
colptr = torch.arange(0, 20 * 301, 20)
row = torch.arange(6000) * 37 % 300
nodes, edge_index, *_ = ops.sample_neighbors(colptr, row, torch.arange(50), [5, 5], 1, 2, 3)
print(nodes.sum().item(), hash(tuple(nodes.tolist())), hash(tuple(edge_index.flatten().tolist())))
"""


def test_every_process_draws_the_same() -> None:
    run = [
        subprocess.run(
            [sys.executable, "-c", PROCESS], cwd=REPOSITORY, env=os.environ, capture_output=True, text=True, timeout=120
        )
        for _ in range(2)
    ]
    assert run[0].returncode == 0, run[0].stderr
    assert run[0].stdout == run[1].stdout != ""


def test_ids_and_edges_beyond_32_bits(tmp_path: Path) -> None:
    """A graph of 2^32 nodes and edges, in files that are nearly all holes."""
    big = 2**32
    colptr, row = (
        np.memmap(tmp_path / name, dtype=np.int64, mode="w+", shape=(size,))
        for name, size in (("colptr", big + 1), ("row", big))
    )
    colptr[big - 1 :] = big - 3, big  # the last node has the last three edges
    row[big - 3 :] = big - 2, 7, big - 1
    seeds = torch.tensor([big - 1])
    nodes, edge_index, *_ = ops.sample_neighbors(*map(torch.from_numpy, (colptr, row)), seeds, [-1], 0, 0, 0)
    assert nodes.tolist() == [big - 1, big - 2, 7]
    assert edge_index.tolist() == [[1, 2, 0], [0, 0, 0]]
    nodes, *_ = ops.sample_neighbors(*map(torch.from_numpy, (colptr, row)), seeds, [2], 0, 0, 0)
    assert set(nodes.tolist()) <= {big - 1, big - 2, 7}


def test_what_cannot_be_sampled_is_named() -> None:
    colptr, row = csc(RING)
    ok = torch.tensor([1, 3])

    def refused(match: str, colptr: Tensor = colptr, row: Tensor = row, seeds: Tensor = ok, fanout: int = 2) -> None:
        with pytest.raises(RuntimeError, match=match):
            ops.sample_neighbors(colptr, row, seeds, [fanout], 0, 0, 0)

    refused(r"seeds\[0\] and seeds\[2\] are both node 5", seeds=torch.tensor([5, 1, 5]))
    refused(r"seeds\[1\] is node 7; the graph has nodes 0 .. 6", seeds=torch.tensor([0, 7]))
    refused(r"seeds\[0\] is node -1", seeds=torch.tensor([-1]))
    refused("seeds must be int64", seeds=ok.int())
    refused("a fan-out is 0; expected 1 or more, or -1", fanout=0)
    refused("a fan-out is -2", fanout=-2)
    refused("colptr is empty", colptr=colptr[:0])
    refused(r"colptr gives node 1 the edges 2 .. 99 of 14", colptr=torch.tensor([0, 2, 99, 6, 8, 10, 12, 14]))
    refused(r"colptr gives node 3 the edges 9 .. 8", colptr=torch.tensor([0, 2, 4, 9, 8, 10, 12, 14]))
    refused(r"row\[2\] is node 7; the graph has nodes 0 .. 6", row=torch.where(row == 0, 7, row))
