"""Graph batches through what happens to a batch: devices, pinning, looking ahead; and their spec."""

from __future__ import annotations

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hetrec.data import NODE, GraphBatch, GraphSpec, SparseFeature, TableSpec
from hetrec.lookahead import LookaheadLoader


def batch(first: int = 0) -> GraphBatch:
    """A seed and two neighbours."""
    nodes = torch.tensor([first, first + 1, first + 2])
    features = KeyedJaggedTensor([NODE], nodes, lengths=torch.ones(3, dtype=torch.int32))
    return GraphBatch(
        torch.zeros(3, 2),
        features,
        torch.tensor([1]),
        edge_index=torch.tensor([[1, 2], [0, 0]]),
        nodes_per_hop=[1, 2],
        edges_per_hop=[2],
    )


def tensors(one: GraphBatch) -> list[torch.Tensor]:
    upcoming = [t for k in one.upcoming for t in (k.values(), k.lengths())]
    features = one.sparse_features
    return [one.dense_features, features.values(), features.lengths(), one.labels, one.edge_index, *upcoming]


def test_looking_ahead_keeps_a_graph_batch_whole() -> None:
    own = [batch(0), batch(5)]
    first, second = LookaheadLoader(own, 1)
    assert isinstance(first, GraphBatch)
    assert first.upcoming == (own[1].sparse_features,)
    assert second.upcoming == ()
    assert first.edge_index is own[0].edge_index
    assert (first.nodes_per_hop, first.edges_per_hop, first.batch_size) == ([1, 2], [2], 1)


def test_all_tensors_move_together(device: torch.device) -> None:
    (first, _) = LookaheadLoader([batch(0), batch(5)], 1)
    moved = first.to(device)
    assert isinstance(moved, GraphBatch)
    assert {t.device.type for t in tensors(moved)} == {device.type}
    assert len(tensors(moved)) == 7
    for ours, theirs in zip(tensors(moved), tensors(first), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)
    assert (moved.nodes_per_hop, moved.edges_per_hop) == ([1, 2], [2])
    if device.type == "cuda":
        moved.record_stream(torch.cuda.current_stream(device))
        assert all(t.is_pinned() for t in tensors(first.pin_memory()))


def test_the_spec_is_a_feature_spec_with_classes() -> None:
    tables = (TableSpec(NODE, 9), TableSpec("topic", 4, pooling="mean"))
    sparse = (SparseFeature(NODE, NODE), SparseFeature("topic", "topic"))
    spec = GraphSpec(dense=("x0",), sparse=sparse, tables=tables, label="label", num_classes=3)
    assert spec.sparse_names == [NODE, "topic"]
    assert not spec.is_weighted
    with pytest.raises(ValueError, match="table 'topic', which is not declared"):
        GraphSpec(dense=(), sparse=sparse, tables=tables[:1], label="label", num_classes=3)
