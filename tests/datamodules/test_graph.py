"""Graphs from tables: what is read, splits, conversion, errors."""

from __future__ import annotations

import gzip
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jsonargparse import ArgumentParser
from pytorch_lightning import LightningDataModule

from datamodules.errors import DataError
from datamodules.graph import GraphDataModule
from hetrec.data import SparseFeature, TableSpec

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "data"
EDGES = "id_1,id_2\n0,1\n1,2\n2,2\n1,0\n0,1\n5,1\n"
TARGET = "id,target\n0,1\n1,0\n2,2\n4,1\n"


def folder(path: Path, edges: str = EDGES, target: str = TARGET) -> Path:
    path.mkdir()
    (path / "edges.csv").write_text(edges)
    (path / "target.csv").write_text(target)
    return path


def neighbours(data: GraphDataModule) -> list[list[int]]:
    graph = data.graph
    return [graph.row[a:b].tolist() for a, b in pairwise(graph.colptr)]


def test_loops_are_dropped_and_repetitions_merged(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = GraphDataModule(str(folder(tmp_path / "g")))
    assert neighbours(data) == [[1], [0, 2, 5], [1], [], [], [1]]
    assert data.graph.labels.tolist() == [1, 0, 2, -1, 1, -1]
    spec = data.spec
    assert (spec.num_classes, spec.dense) == (3, ())
    assert spec.sparse == (SparseFeature("node", "node"),)
    assert spec.tables == (TableSpec("node", num_embeddings=6),)
    shown = " ".join(capfd.readouterr().err.split())
    assert "6 nodes, 6 edges, counted in both directions (1 self loops and 4 repetitions left out), 3 classes" in shown


def test_directed_graphs_keep_the_direction(tmp_path: Path) -> None:
    data = GraphDataModule(str(folder(tmp_path / "g")), undirected=False)
    assert neighbours(data) == [[1], [0, 5], [1], [], [], []]
    both = GraphDataModule(data.path)
    assert both.graph.folder != data.graph.folder
    assert neighbours(both)[5] == [1]


def test_other_files_and_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"to": pa.array([1, 2], pa.int32()), "from": [0, 1]}), tmp_path / "links.parquet")
    with gzip.open(tmp_path / "kinds.csv.gz", "wt") as file:
        file.write("name,page,kind\nx,2,tv\ny,0,politician\nz,1,\n")
    data = GraphDataModule(
        str(tmp_path), str(tmp_path / "cache"), False, "links", "kinds.csv.gz", "from", "to", "page", "kind"
    )
    assert neighbours(data) == [[], [0], [1]]
    assert data.graph.labels.tolist() == [0, -1, 1]  # strings are numbered in their order
    assert data.spec.num_classes == 2


@pytest.mark.parametrize(
    ("target", "labels"),
    [
        ("id,target\n0,1\n1,-1\n2,0\n", [1, -1, 0]),
        ("id,target\n0,1.0\n1,\n2,0.0\n", [1, -1, 0]),
        ("id,target\n0,1\n1,\n2,0\n", [1, -1, 0]),
        ("id,target\n2,0\n", [-1, -1, 0]),
    ],
)
def test_nodes_without_a_class(tmp_path: Path, target: str, labels: list[int]) -> None:
    data = GraphDataModule(str(folder(tmp_path / "g", "id_1,id_2\n0,1\n", target)))
    assert data.graph.labels.tolist() == labels


@pytest.mark.parametrize(
    ("edges", "target"),
    [
        ("\ufeff" + EDGES, "\ufeff" + TARGET),
        (EDGES.replace("\n", "\r\n"), TARGET.replace("\n", "\r\n")),
        (EDGES.removesuffix("\n"), TARGET.removesuffix("\n")),
        (EDGES + "\n", TARGET + "\n\n"),
        ("id_1,id_2\n0.0,1\n1.0,2\n5.0,1\n", "id,target\n0.0,1.0\n1.0,0.0\n2.0,2.0\n4.0,1.0\n"),
        ('"id_1","id_2"\n"0","1"\n"1","2"\n"5","1"\n', TARGET),
    ],
    ids=["byte order mark", "crlf", "no line end", "blank lines", "floats", "quotes"],
)
def test_tables_as_other_programs_write_them(tmp_path: Path, edges: str, target: str) -> None:
    data = GraphDataModule(str(folder(tmp_path / "g", edges, target)))
    assert neighbours(data) == [[1], [0, 2, 5], [1], [], [], [1]]
    assert data.graph.labels.tolist() == [1, 0, 2, -1, 1, -1]


def test_gaps_in_node_ids_and_classes_stay(tmp_path: Path) -> None:
    data = GraphDataModule(str(folder(tmp_path / "g", "id_1,id_2\n0,30\n", "id,target\n0,7\n30,0\n10,0\n")))
    assert (data.graph.nodes, data.spec.num_classes) == (31, 8)
    assert neighbours(data)[0] == [30]
    assert np.flatnonzero(data.graph.labels >= 0).tolist() == [0, 10, 30]


@pytest.mark.parametrize("target", ["id,target\n0,0\n", "id,target\n0,\n"])
def test_a_graph_of_fewer_than_two_classes(tmp_path: Path, target: str) -> None:
    data = GraphDataModule(str(folder(tmp_path / "g", "id_1,id_2\n", target)))
    with pytest.raises(DataError, match=r"g' has [01] classes; to tell nodes apart takes two at least"):
        _ = data.spec


def test_a_graph_without_edges(tmp_path: Path) -> None:
    data = GraphDataModule(str(folder(tmp_path / "g", "id_1,id_2\n", "id,target\n0,1\n1,0\n")), val_fraction=0)
    assert neighbours(data) == [[], []]
    batches = list(data.predict_dataloader())
    data.teardown()
    assert [b.labels.tolist() for b in batches] == [[1, 0]]
    assert batches[0].edge_index.shape == (2, 0)
    assert batches[0].nodes_per_hop == [2, 0, 0]


def test_splits_are_a_partition_of_the_labelled_nodes(tmp_path: Path) -> None:
    lines = "".join(f"{v},{v % 3 - 1}\n" for v in range(3000))
    path = str(folder(tmp_path / "g", "id_1,id_2\n0,2999\n", f"id,target\n{lines}"))

    def splits(**options: Any) -> list[np.ndarray]:
        data = GraphDataModule(path, **options)
        data.setup("fit")
        return [data._split_seeds(s) for s in ("train", "val", "test")]

    parts = splits()
    assert sorted(np.concatenate(parts).tolist()) == [v for v in range(3000) if v % 3]
    assert [len(p) / 2000 for p in parts] == pytest.approx([0.6, 0.2, 0.2], abs=0.03)
    assert all((a == b).all() for a, b in zip(parts, splits(), strict=True))
    assert len(set(parts[0]) & set(splits(seed=1)[1])) > 100
    assert (splits(val_fraction=0.1)[2] == parts[2]).all()
    none = GraphDataModule(path, val_fraction=0, test_fraction=0)
    assert (none.has_val, none.has_test, none.val_dataloader(), none.test_dataloader()) == (False, False, [], [])


def test_the_copy_is_made_once_and_anew_when_the_source_changes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = folder(tmp_path / "g")
    first = GraphDataModule(str(path)).graph
    row = first.row
    assert "converting" in capfd.readouterr().err
    made = {p: p.stat().st_mtime_ns for p in first.folder.iterdir()}
    GraphDataModule(str(path)).prepare_data()
    assert "converting" not in capfd.readouterr().err
    assert {p: p.stat().st_mtime_ns for p in first.folder.iterdir()} == made
    (path / "edges.csv").write_text("id_1,id_2\n0,2\n")
    assert neighbours(GraphDataModule(str(path))) == [[2], [], [0], [], []]
    assert row.tolist() == [1, 0, 2, 5, 1, 1]  # whoever has the old copy open keeps it


def test_a_folder_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    path = folder(tmp_path / "g")
    (tmp_path / "g.graph").mkdir()
    (tmp_path / "g.graph" / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match=r"holds files that were not made here; set data.cache_dir"):
        _ = GraphDataModule(str(path)).graph
    assert (tmp_path / "g.graph" / "notes.txt").read_text() == "mine"


def test_what_is_missing_is_said_with_what_it_should_look_like(tmp_path: Path) -> None:
    data = GraphDataModule(str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"does not exist; expected a folder with edges.csv \(columns id_1, id_2\)"):
        data.prepare_data()
    (tmp_path / "edges.csv").write_text(EDGES)
    with pytest.raises(DataError, match=r"lacks target.csv, and has no raw/ and split/; .* data=graph_synthetic"):
        _ = GraphDataModule(str(tmp_path)).spec
    with pytest.raises(DataError, match=r"is no .pt file"):
        _ = GraphDataModule(str(tmp_path / "edges.csv")).spec


@pytest.mark.parametrize(
    ("edges", "target", "message"),
    [
        ("a,b\n0,1\n", TARGET, "edges.csv has no column id_1, id_2; it has: 'a', 'b'"),
        (EDGES, "id,label\n0,1\n", "target.csv has no column target; it has: 'id', 'label'"),
        ("id_1,id_2\n0,x\n", TARGET, "column 'id_2' holds no integers"),
        ("id_1,id_2\n0,\n2,1\n", TARGET, "column 'id_2' has 1 missing values"),
        ("id_1,id_2\n0,-4\n", TARGET, "edges.csv names node -4; nodes are numbered from 0"),
        ("id_1,id_2\n0,123456789012\n", TARGET, "name node 123456789012 in 5 lines; nodes must be numbered"),
        (EDGES, "id,target\n0,1\n3,1\n0,2\n", "target.csv names node 0 more than once"),
        (EDGES, "id,target\n0,1.5\n", "column 'target' holds no classes"),
        (EDGES, "id,target\n-1,1\n", "target.csv names node -1"),
        ("id_1,id_2\nalice,bob\n", TARGET, "'id_1' holds no integers: 'alice'; nodes are numbered from 0: give every"),
        ("id_1,id_2\n1.5,2\n", TARGET, "column 'id_1' holds no integers"),
        ("", TARGET, "edges.csv is empty; expected a line with the columns id_1, id_2, and lines below"),
        ("id_1, id_2\n0,1\n", TARGET, "edges.csv has no column id_2; it has: 'id_1', ' id_2'"),
        (EDGES, "id,target\n0,0\n1,20000000\n", "class 20000000 among 6 nodes; classes are numbered from 0 without"),
        (EDGES, "", r"target.csv is empty; expected a line with the columns id, target"),
    ],
)
def test_files_that_cannot_be_a_graph(tmp_path: Path, edges: str, target: str, message: str) -> None:
    data = GraphDataModule(str(folder(tmp_path / "g", edges, target)))
    with pytest.raises(DataError, match=message):
        data.prepare_data()
    assert not (tmp_path / "g.graph").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "data.batch_size=0; expected 1 or more"),
        ({"fanouts": []}, r"data.fanouts=\[\]; expected a number a hop"),
        ({"fanouts": [5, 0]}, r"data.fanouts=\[5, 0\]"),
        ({"eval_fanouts": [5, -2]}, r"data.eval_fanouts=\[5, -2\]"),
        ({"eval_fanouts": [5]}, "data.eval_fanouts has 1 hops and data.fanouts 2"),
        ({"val_fraction": 0.5, "test_fraction": 0.5}, "whose sum is below 1"),
        ({"split": "order"}, "data.split='order'; expected auto or hash"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        GraphDataModule("x", **options)


def test_a_split_without_nodes_is_an_error(tmp_path: Path) -> None:
    data = GraphDataModule(str(folder(tmp_path / "g", target="id,target\n0,\n1,-1\n")))
    with pytest.raises(DataError, match=r"the train split is empty: .* has 6 nodes, 0 of them labelled"):
        data.setup("fit")


def test_the_facebook_pages(shared_data: Path, tmp_path: Path) -> None:
    data = GraphDataModule(str(shared_data / "graph" / "facebook"), str(tmp_path))
    assert (data.graph.nodes, data.graph.edges, data.spec.num_classes) == (22470, 2 * (171002 - 179), 4)
    table = np.loadtxt(shared_data / "graph" / "facebook" / "target.csv", delimiter=",", skiprows=1, dtype=int)
    assert (data.graph.labels[table[:, 0]] == table[:, 1]).all()
    edges = np.loadtxt(shared_data / "graph" / "facebook" / "edges.csv", delimiter=",", skiprows=1, dtype=int)
    wanted: set[tuple[int, int]] = {(int(a), int(b)) for a, b in np.concatenate([edges, edges[:, ::-1]]) if a != b}
    targets = np.repeat(np.arange(22470), np.diff(data.graph.colptr))
    assert set(zip(data.graph.row.tolist(), targets.tolist(), strict=True)) == wanted


@pytest.mark.parametrize("name", ["graph", "graph_synthetic"])
def test_the_command_line_makes_the_module(name: str) -> None:
    parser = ArgumentParser()
    parser.add_subclass_arguments(LightningDataModule, "data")
    words = [f"--data={CONFIGS / name}.yaml", "--data.fanouts=[25, -1]", "--data.eval_fanouts=[50, 50]"]
    made = parser.instantiate_classes(parser.parse_args(words)).data
    assert made.path == f"data/{name}"
    assert (made.fanouts, made.eval_fanouts) == ((25, -1), (50, 50))
