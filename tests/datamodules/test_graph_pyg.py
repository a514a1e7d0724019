"""Graphs that PyG saved."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data, InMemoryDataset

from datamodules.errors import DataError
from datamodules.graph import GraphDataModule

EDGES = torch.tensor([[0, 1, 2, 3, 3, 0], [1, 0, 2, 0, 0, 3]])  # a loop, and an edge twice
Y = torch.tensor([1, 0, -1, 2])


def saved(path: Path, content: Any) -> GraphDataModule:
    torch.save(content, path / "graph.pt")
    return GraphDataModule(str(path / "graph.pt"), undirected=False)


def masks(**parts: list[int]) -> dict[str, Tensor]:
    return {f"{name}_mask": torch.isin(torch.arange(4), torch.tensor(nodes)) for name, nodes in parts.items()}


class OneGraph(InMemoryDataset):
    """What a PyG data set leaves in processed/data.pt."""

    def __init__(self, root: Path, graphs: list[Data]) -> None:
        self._graphs = graphs
        super().__init__(str(root))

    @property
    def processed_file_names(self) -> str:
        return "data.pt"

    def process(self) -> None:
        self.save(self._graphs, self.processed_paths[0])


@pytest.mark.parametrize(
    "form",
    [lambda data: data, Data.to_dict, lambda data: (data, None), lambda data: InMemoryDataset.collate([data])],
    ids=["Data", "dict", "tuple", "collated"],
)
def test_a_graph_in_every_form(tmp_path: Path, form: Callable[[Data], Any]) -> None:
    x = torch.arange(8, dtype=torch.float64).view(4, 2)
    data = saved(tmp_path, form(Data(x=x, edge_index=EDGES, y=Y, **masks(train=[0], val=[1], test=[2, 3]))))
    graph = data.graph
    assert [graph.row[a:b].tolist() for a, b in pairwise(graph.colptr)] == [[1, 3], [0], [], [0]]
    assert graph.labels.tolist() == [1, 0, -1, 2]
    assert data.spec.dense == ("x0", "x1")
    assert data.spec.num_classes == 3
    data.setup("fit")
    assert [data._split_seeds(s).tolist() for s in ("train", "val", "test")] == [[0], [1], [3]]  # 2 has no label
    (batch,) = data.test_dataloader()
    data.teardown()
    ids = batch.sparse_features["node"].values()
    assert batch.dense_features.dtype == torch.float32
    assert batch.dense_features.tolist() == x[ids].tolist()
    assert batch.labels.tolist() == [2]


def test_a_processed_data_set(tmp_path: Path) -> None:
    OneGraph(tmp_path, [Data(edge_index=EDGES, y=Y[:, None])])
    data = GraphDataModule(str(tmp_path / "processed" / "data.pt"))
    assert data.graph.labels.tolist() == [1, 0, -1, 2]
    assert data.spec.dense == ()
    assert not data.graph.has_split
    OneGraph(tmp_path / "two", [Data(edge_index=EDGES, y=Y)] * 2)
    with pytest.raises(DataError, match="holds several graphs; expected one"):
        _ = GraphDataModule(str(tmp_path / "two" / "processed" / "data.pt")).graph


def test_masks_may_be_left_alone_and_may_be_few(tmp_path: Path) -> None:
    content = Data(edge_index=EDGES, y=torch.tensor([1, 0, 0, 2]), **masks(train=[0, 1, 2, 3]))
    data = saved(tmp_path, content)
    data.setup("fit")
    assert (data.has_val, data.has_test) == (False, False)
    assert data._split_seeds("train").tolist() == [0, 1, 2, 3]
    hashed = GraphDataModule(data.path, undirected=False, split="hash", val_fraction=0.5, test_fraction=0)
    assert hashed.has_val
    assert sorted([*hashed._split_seeds("train"), *hashed._split_seeds("val")]) == [0, 1, 2, 3]


def test_the_first_of_several_splits_is_taken(tmp_path: Path) -> None:
    mask = torch.tensor([[True, False], [False, True], [False, True], [True, True]])
    data = saved(tmp_path, Data(edge_index=EDGES, y=Y, train_mask=mask))
    assert data._split_seeds("train").tolist() == [0, 3]


def test_masks_may_be_numbers_of_nodes_and_integers(tmp_path: Path) -> None:
    parts = {"train_mask": torch.tensor([3, 0]), "val_mask": torch.tensor([0, 1, 0, 0], dtype=torch.uint8)}
    data = saved(tmp_path, Data(edge_index=EDGES, y=torch.tensor([1, 0, 0, 2]), **parts))
    assert [data._split_seeds(s).tolist() for s in ("train", "val", "test")] == [[0, 3], [1], []]


def test_other_types_and_no_edges(tmp_path: Path) -> None:
    x = torch.tensor([[torch.nan, 1.0], [2.0, 3.0], [4.0, torch.nan], [5.0, 6.0]])
    y = torch.tensor([[1.0], [0.0], [torch.nan], [2.0]])
    graph = saved(tmp_path, Data(x=x, edge_index=EDGES.int(), y=y)).graph
    assert [graph.row[a:b].tolist() for a, b in pairwise(graph.colptr)] == [[1, 3], [0], [], [0]]
    assert graph.labels.tolist() == [1, 0, -1, 2]
    assert graph.dense.tolist() == [[0, 1], [2, 3], [4, 0], [5, 6]]  # missing is 0, as in rows
    (tmp_path / "none").mkdir()
    none = saved(tmp_path / "none", Data(edge_index=torch.zeros(2, 0, dtype=torch.long), y=Y)).graph
    assert (none.edges, none.nodes, none.colptr.tolist()) == (0, 4, [0] * 5)


class Harmful:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple:
        return os.system, ("touch harmed",)


def test_no_foreign_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = saved(tmp_path, {"edge_index": EDGES, "y": Y, "x": Harmful()})
    with pytest.raises(DataError, match=r"cannot be read as a PyG file: it holds a posix.system. Only tensors"):
        _ = data.graph
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"edge_index": EDGES}, "has edge_index; expected edge_index and y"),
        ([EDGES, Y], "holds a list; expected a torch_geometric.data.Data"),
        ({"edge_index": EDGES.T, "y": Y}, r"edge_index has the shape \(6, 2\); expected \(2, E\)"),
        ({"edge_index": EDGES, "y": torch.zeros(4, 3)}, r"y has the shape \(4, 3\); expected one class a node"),
        ({"edge_index": EDGES, "y": Y, "x": torch.zeros(3, 2)}, r"x has the shape \(3, 2\); expected \(4, D\)"),
        ({"edge_index": EDGES, "y": Y, "x": "no"}, "x is a str; expected a tensor"),
        ({"edge_index": EDGES, "y": Y[:3]}, r"graph\.pt: edges name 3; expected 0 .. 2"),
        ({"edge_index": -EDGES, "y": Y}, r"graph\.pt: edges name -1; expected 0 .. 3"),
        ({"edge_index": EDGES + 0.5, "y": Y}, r"edge_index holds 0\.5; nodes are numbered from 0"),
        ({"edge_index": EDGES, "y": Y + 0.5}, r"y holds 1\.5; classes are integers from 0"),
        ({"edge_index": EDGES, "y": Y * 10_000_000}, "class 20000000 among 4 nodes; classes are numbered from 0"),
        ({"edge_index": EDGES, "y": Y, "x": torch.full((4, 2), torch.inf)}, "node 0 has an infinite dense value"),
        ({"edge_index": EDGES, "y": Y, "val_mask": torch.tensor([1, 4])}, "val_mask names node 4; expected 0 .. 3"),
        ({"edge_index": EDGES, "y": Y, **masks(train=[1], test=[1, 2])}, "node 1 is in test_mask and in another mask"),
        (
            {"edge_index": EDGES, "y": Y, "val_mask": torch.ones(3)},
            r"val_mask has the shape \(3,\).*; expected \(4,\) booleans",
        ),
    ],
)
def test_what_is_no_graph_is_named(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        _ = saved(tmp_path, content).graph


def test_a_file_that_is_no_pickle(tmp_path: Path) -> None:
    (tmp_path / "graph.pt").write_bytes(b"hello")
    with pytest.raises(DataError, match="cannot be read as a PyG file"):
        _ = GraphDataModule(str(tmp_path / "graph.pt")).graph
