"""Batches of a graph: every seed once whatever the ranks and workers, positions, contents, Lightning."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint

from datamodules.errors import DataError
from datamodules.graph import GraphDataModule
from datamodules.graph_loader import GraphLoader
from datamodules.graph_reader import GraphReader, seed_plan
from datamodules.graph_synthetic import SyntheticGraphDataModule
from hetrec.data import GraphBatch

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a graph of 400 nodes is kept."""
    return tmp_path_factory.mktemp("graph")


def module(path: Path, **options: Any) -> SyntheticGraphDataModule:
    settings = {"nodes": 400, "degree": 8.0, "fanouts": [3, 2], "batch_size": 16, "val_fraction": 0.1, **options}
    return SyntheticGraphDataModule(str(path), **settings)


def loader(
    path: Path, rank: int = 0, world_size: int = 1, workers: int = 0, seeds: int = 400, **options: Any
) -> GraphLoader:
    settings = {"batch_size": 16, "shuffle": True, "seed": 0, **options}
    plan = seed_plan(seeds, rank=rank, world_size=world_size, **settings)
    return GraphLoader(GraphReader(module(path).graph, np.arange(seeds), plan, (3, 2), True), workers)


def ids(batch: GraphBatch) -> list[int]:
    nodes: list[int] = batch.sparse_features["node"].values().tolist()
    return nodes


def seeds(batches: Sequence[GraphBatch]) -> list[list[int]]:
    return [ids(b)[: b.batch_size] for b in batches]


def content(batch: GraphBatch) -> tuple[Any, ...]:
    features = batch.sparse_features
    return (
        *(features.values().tolist(), features.lengths().tolist(), batch.labels.tolist(), batch.edge_index.tolist()),
        *(batch.dense_features.tolist(), batch.nodes_per_hop, batch.edges_per_hop),
    )


def test_a_batch_is_what_the_contract_says(path: Path) -> None:
    data = module(path)
    graph, spec = data.graph, data.spec
    for batch in data.train_dataloader():
        nodes = ids(batch)
        n, s = len(nodes), batch.batch_size
        assert batch.sparse_features.keys() == spec.sparse_names == ["node"]
        assert batch.sparse_features.stride() == n == sum(batch.nodes_per_hop)
        assert batch.sparse_features.values().dtype == torch.int64
        assert batch.sparse_features.lengths().tolist() == [1] * n
        assert batch.sparse_features.lengths().dtype == torch.int32
        assert (batch.dense_features.shape, batch.dense_features.dtype) == ((n, 0), torch.float32)
        assert batch.labels.dtype == batch.edge_index.dtype == torch.int64
        assert batch.labels.tolist() == graph.labels[nodes[:s]].tolist()
        assert batch.nodes_per_hop[0] == s
        assert batch.edge_index.shape == (2, sum(batch.edges_per_hop))
        assert len(set(nodes)) == n
        for source, target in batch.edge_index.T.tolist():
            target_id = nodes[target]
            assert nodes[source] in graph.row[graph.colptr[target_id] : graph.colptr[target_id + 1]]
    data.teardown()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("count", [400, 37, 3])
def test_every_rank_takes_the_same_steps_and_every_seed_comes_once(path: Path, workers: int, count: int) -> None:
    world = 4 if workers == 0 else 2
    loaders = [loader(path, rank, world, workers, count) for rank in range(world)]
    epochs = []
    for _ in range(2):
        ranks = [seeds(list(one)) for one in loaders]
        assert Counter(s for rank in ranks for batch in rank for s in batch) == Counter(range(count))
        assert {len(rank) for rank in ranks} == {len(loaders[0])} == {ceil(ceil(count / world) / 16)}
        sizes = [sum(map(len, rank)) for rank in ranks]
        assert max(sizes) - min(sizes) <= 1
        epochs.append(ranks)
    assert count == 3 or epochs[0] != epochs[1]


def test_a_rank_without_seeds_has_an_empty_batch(path: Path) -> None:
    (batch,) = loader(path, 0, 4, seeds=3)  # 3 * 0 // 4 .. 3 * 1 // 4
    assert (batch.batch_size, batch.nodes_per_hop, batch.edges_per_hop) == (0, [0, 0, 0], [0, 0])
    assert batch.edge_index.shape == (2, 0)
    assert batch.sparse_features.values().numel() == batch.sparse_features.stride() == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_batches_do_not_depend_on_the_number_of_workers(path: Path, rank: int) -> None:
    wanted, *others = ([content(b) for one in (it, it) for b in one] for it in (
        loader(path, rank, 2, workers) for workers in (0, 1, 2)
    ))  # fmt: skip
    assert all(other == wanted for other in others)


def test_epochs_seeds_and_ranks_sample_anew(path: Path) -> None:
    one = loader(path, seeds=16, shuffle=False)
    first, second = next(iter(one)), next(iter(one))
    assert ids(first)[:16] == ids(second)[:16] == list(range(16))
    assert content(first) != content(second)
    other = next(iter(loader(path, seeds=16, shuffle=False, seed=1)))
    assert content(other) != content(first)
    assert content(next(iter(loader(path, seeds=16, shuffle=False)))) == content(first)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 9, 25])
def test_a_position_is_taken_up_again(path: Path, workers: int, stop: int) -> None:
    whole = loader(path)
    wanted = [content(b) for _ in range(2) for b in whole]
    first = loader(path, workers=workers)
    iterator = iter(first)
    read = [content(next(iterator)) for _ in range(stop)]
    second = loader(path, workers=workers)
    second.load_state_dict(first.state_dict())
    read += [content(b) for b in second]
    if stop == 25:  # the end of an epoch: the next one follows
        assert read == wanted
    else:
        assert read + [content(b) for b in second] == wanted


def test_a_position_in_other_data_is_refused(path: Path) -> None:
    one = loader(path)
    iterator = iter(one)
    for _ in range(3):
        next(iterator)
    with pytest.raises(DataError, match=r"middle of epoch 0 .* batch_size was 16, is 8"):
        loader(path, batch_size=8).load_state_dict(one.state_dict())


def test_coming_batches_are_known(path: Path) -> None:
    data = module(path, lookahead=2)
    batches = list(data.train_dataloader())
    data.teardown()
    for i, batch in enumerate(batches):
        assert isinstance(batch, GraphBatch)
        assert len(batch.upcoming) == len(batches[i + 1 : i + 3])
        assert all(a is b.sparse_features for a, b in zip(batch.upcoming, batches[i + 1 : i + 3], strict=True))


def test_evaluation_takes_all_neighbours_and_repeats(path: Path) -> None:
    data = module(path, val_fraction=0.5)
    validation = data.val_dataloader()
    first, second = list(validation), list(validation)
    assert [content(b) for b in first] == [content(b) for b in second]
    assert [s for batch in seeds(first) for s in batch] == data._split_seeds("val").tolist()
    degrees = np.diff(data.graph.colptr)
    assert [b.edges_per_hop[0] for b in first] == [int(degrees[s].sum()) for s in seeds(first)]
    data.teardown()
    sampled = module(path, val_fraction=0.5, eval_fanouts=[1, 1])
    batch, again = (next(iter(sampled.val_dataloader())) for _ in range(2))
    sampled.teardown()
    assert batch.edges_per_hop[0] == int((degrees[ids(batch)[: batch.batch_size]] > 0).sum())
    assert content(batch) == content(again)


def test_prediction_covers_every_node(tmp_path: Path) -> None:
    (tmp_path / "edges.csv").write_text("id_1,id_2\n0,1\n")
    (tmp_path / "target.csv").write_text("id,target\n1,0\n3,1\n")
    data = GraphDataModule(str(tmp_path), str(tmp_path / "cache"), batch_size=3)
    batches = list(data.predict_dataloader())
    data.teardown()
    assert seeds(batches) == [[0, 1, 2], [3]]
    assert [b.labels.tolist() for b in batches] == [[-1, 0, -1], [1]]


class Recorder(LightningModule):
    """Trains a number and remembers every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[Any] = []
        self.validated: list[Any] = []

    def training_step(self, batch: GraphBatch, batch_idx: int) -> torch.Tensor:
        self.seen.append(content(batch))
        return self.weight * batch.labels.sum()

    def validation_step(self, batch: GraphBatch, batch_idx: int) -> None:
        self.validated.append(content(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(
    path: Path, root: Path, ckpt: str | None = None, workers: int = 0, every: int = 10**6, **options: Any
) -> Recorder:
    checkpoint = ModelCheckpoint(root, filename="{step}", every_n_train_steps=every, save_top_k=-1)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        callbacks=[checkpoint],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=root,
        **options,
    )
    model = Recorder()
    trainer.fit(model, datamodule=module(path, num_workers=workers), ckpt_path=ckpt)
    return model


@pytest.mark.parametrize(("workers", "stop"), [(0, 7), (2, 7), (0, 18)])
def test_a_resumed_run_sees_what_an_unbroken_one_would(path: Path, tmp_path: Path, workers: int, stop: int) -> None:
    whole = fit(path, tmp_path / "whole", max_epochs=2)
    steps = len(whole.seen) // 2
    assert steps == 18
    assert whole.seen[:steps] != whole.seen[steps:]
    assert whole.validated[: len(whole.validated) // 2] == whole.validated[len(whole.validated) // 2 :]
    first = fit(path, tmp_path / "first", workers=workers, every=stop, max_epochs=2, max_steps=stop)
    assert first.seen == whole.seen[:stop]
    second = fit(path, tmp_path / "second", str(tmp_path / "first" / f"step={stop}.ckpt"), workers, max_epochs=2)
    assert second.seen == whole.seen[stop:]


def test_overfitting_takes_the_same_batches_in_every_epoch(path: Path, tmp_path: Path) -> None:
    seen = fit(path, tmp_path, max_epochs=3, overfit_batches=2).seen
    assert seen == seen[:2] * 3


RANKS = """
import sys
import torch
from torch import distributed
from datamodules.graph_synthetic import SyntheticGraphDataModule

if __name__ == "__main__":
    rank, world = int(sys.argv[1]), int(sys.argv[2])
    distributed.init_process_group("gloo", init_method=sys.argv[3], rank=rank, world_size=world)
    data = SyntheticGraphDataModule(sys.argv[4], nodes=61, degree=4.0, batch_size=4, val_fraction=0, test_fraction=0)
    data.prepare_data()  # both at once: one makes the graph, the other waits
    data.setup("fit")
    loader = data.train_dataloader()
    for epoch in range(2):
        for batch in loader:
            distributed.all_reduce(torch.tensor(batch.batch_size))  # ranks of other numbers of steps would hang
            print(epoch, *batch.sparse_features["node"].values()[: batch.batch_size].tolist())
    data.teardown()
    distributed.barrier()
"""


def test_ranks_of_their_own_processes(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), "2", f"file://{tmp_path}/rendezvous", str(tmp_path / "graph")],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    shown = [p.communicate(timeout=180) for p in processes]
    assert [p.returncode for p in processes] == [0, 0], shown
    lines = [[list(map(int, line.split())) for line in out.splitlines()] for out, _ in shown]
    for epoch in range(2):
        ranks = [[line[1:] for line in rank if line[0] == epoch] for rank in lines]
        assert [len(rank) for rank in ranks] == [8, 8]
        assert Counter(s for rank in ranks for line in rank for s in line) == Counter(range(61))
