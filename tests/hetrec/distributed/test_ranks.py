"""Two ranks and real servers: training, evaluation, and state dicts on another number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from ranks import on_ranks
from servers import servers
from sparse_nn import CPU, LR, TABLES, WEIGHTED, Inline, all_rows, batches, global_batches, once, parallel
from torchrec import KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.test_utils.test_model import ModelInput
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

import hetrec
from cache_backend import CacheConfig, EmbeddingOptimizer, RemoteStore

STEPS = 8
ROOMY = CacheConfig(rows=4096, staleness=100)
SMALL = CacheConfig(rows=64, staleness=2)


def apart(features: KeyedJaggedTensor, rank: int) -> KeyedJaggedTensor:
    """The batch with even keys on rank 0 and odd ones on rank 1."""
    values = features.values() // 2 * 2 + rank
    return KeyedJaggedTensor(features.keys(), values, weights=features.weights_or_none(), lengths=features.lengths())


def joined(parts: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """One batch of the samples of all parts, in order."""
    lengths, values, weights = [], [], []
    for name in parts[0].keys():  # noqa: SIM118 - not a dictionary
        of_feature = [part[name] for part in parts]
        lengths += [jagged.lengths() for jagged in of_feature]
        values += [jagged.values() for jagged in of_feature]
        weights += [jagged.weights_or_none() for jagged in of_feature]
    return KeyedJaggedTensor(
        parts[0].keys(),
        torch.cat(values),
        weights=None if weights[0] is None else torch.cat(weights),
        lengths=torch.cat(lengths),
    )


def shares_and_wholes(ranks: int, shared: bool) -> tuple[list[list[ModelInput]], list[ModelInput]]:
    """Batches of each rank, whose keys another rank may have only if they are ``shared``, and the same put together."""
    if shared:
        given = global_batches(STEPS, ranks)
        return [[parts[rank] for _, parts in given] for rank in range(ranks)], [whole for whole, _ in given]
    shares = [
        [
            ModelInput(
                part.float_features, apart(part.idlist_features, rank), apart(part.idscore_features, rank), part.label
            )
            for rank, part in enumerate(parts)
        ]
        for _, parts in global_batches(STEPS, ranks)
    ]
    wholes = [
        ModelInput(
            torch.cat([part.float_features for part in parts]),
            joined([part.idlist_features for part in parts]),
            joined([part.idscore_features for part in parts]),
            torch.cat([part.label for part in parts]),
        )
        for parts in shares
    ]
    return [[parts[rank] for parts in shares] for rank in range(ranks)], wholes


def predictions(model: DistributedModelParallel) -> torch.Tensor:
    """On batches that are the same for all; collective."""
    model.eval()
    with torch.no_grad():
        found = torch.cat([model(batch) for batch in batches(3)])
    model.train()
    return found


@dataclass
class Run:
    """One training of the ranks; ``optimizer``: of the rows."""

    addresses: Sequence[str]
    pipeline: Callable[..., Any]
    cache: CacheConfig
    optimizer: Any = "sgd"
    shared: bool = False


def train_on_rank(rank: int, ranks: int, run: Run) -> Any:
    model = parallel(EmbeddingOptimizer(run.optimizer, lr=LR), run.cache, RemoteStore(list(run.addresses)))
    trained = run.pipeline(model, torch.optim.SGD(model.parameters(), lr=LR), CPU)
    shares, _ = shares_and_wholes(ranks, run.shared)
    data = once(shares[rank])
    outputs = [trained.progress(data).detach() for _ in range(STEPS)]
    return torch.cat(outputs), predictions(model), all_rows(model), model.module.over.state_dict()


def runs_of_rank(rank: int, ranks: int, runs: Sequence[Run]) -> list[Any]:
    return [train_on_rank(rank, ranks, run) for run in runs]


def test_two_ranks_train_as_one_process(tmp_path: Path) -> None:
    """Where no rank has another's keys, it does not matter how stale they would be to each other. With the pipeline it
    is the same as without, and with a cache that has to give rows back. Synchronous steps may share keys."""
    synchronous = replace(SMALL, consistency="bsp")
    with servers(2) as first, servers(1) as second, servers(2) as third, servers(1) as fourth:
        runs = [
            Run(first, TrainPipelineSparseDist, ROOMY),
            Run(second, Inline, ROOMY),
            Run(third, TrainPipelineSparseDist, SMALL),
            Run(fourth, TrainPipelineSparseDist, synchronous, "adagrad", shared=True),
        ]
        found = on_ranks(runs_of_rank, tmp_path / "ranks", runs)
    for i, run in enumerate(runs):
        compare_with_one_process(run, [rank[i] for rank in found])
    for pipelined, inline in ((rank[0], rank[1]) for rank in found):
        assert torch.equal(pipelined[0], inline[0])
        assert torch.equal(pipelined[1], inline[1])


def compare_with_one_process(run: Run, found: Sequence[Any]) -> None:
    model = parallel(EmbeddingOptimizer(run.optimizer, lr=LR), ROOMY)
    trained = Inline(model, torch.optim.SGD(model.parameters(), lr=LR), CPU)
    _, wholes = shares_and_wholes(len(found), run.shared)
    untrained = all_rows(model)
    data = once(wholes)
    expected = [trained.progress(data).detach() for _ in wholes]
    evaluated, rows = predictions(model), all_rows(model)
    outputs = [output.split(len(output) // STEPS) for output, *_ in found]
    for step, parts in enumerate(zip(*outputs, strict=True)):
        torch.testing.assert_close(torch.cat(parts), expected[step], rtol=0, atol=1e-5)
    for _, seen, rows_seen, dense in found:
        assert torch.equal(seen, found[0][1])
        torch.testing.assert_close(seen, evaluated, rtol=0, atol=1e-5)
        for name, wanted in rows.items():
            torch.testing.assert_close(rows_seen[name], wanted, rtol=0, atol=1e-5)
            assert torch.equal(rows_seen[name], found[0][2][name])
            assert not torch.equal(wanted, untrained[name])
        for name, wanted in model.module.over.state_dict().items():
            torch.testing.assert_close(dense[name], wanted, rtol=0, atol=1e-5)


def row_names(state: dict[str, Any], part: str) -> list[str]:
    return sorted(name for name in state if "embedding_bags" in name and name.endswith(f".{part}"))


def save_on_rank(rank: int, ranks: int, addresses: Sequence[str], files: Sequence[Path]) -> dict[str, Any]:
    """Trains, saves, trains on, and loads again, with a batch prefetched each time."""
    model = parallel(EmbeddingOptimizer("adagrad", lr=LR), ROOMY, RemoteStore(list(addresses)))
    pipeline = TrainPipelineSparseDist(model, torch.optim.SGD(model.parameters(), lr=LR), CPU)
    data = once([parts[rank] for _, parts in global_batches(10, ranks)])
    for _ in range(4):
        pipeline.progress(data)
    state = deepcopy(model.state_dict())
    torch.save(state, files[rank])
    then = predictions(model)
    for _ in range(2):
        pipeline.progress(data)
    moved = predictions(model)

    damaged = deepcopy(state)
    if rank == 1:
        name = "sparse.ebc.embedding_bags.t1.weight"
        damaged[name] = damaged[name][:, :4]
        del damaged["sparse.ebc.embedding_bags.t2.clock"]
    before = all_rows(model)
    error = ""
    try:
        model.load_state_dict(damaged)
    except RuntimeError as refused:
        error = str(refused)
    after = all_rows(model)

    model.load_state_dict(deepcopy(state))
    loaded = predictions(model)
    again = deepcopy(model.state_dict())
    for _ in range(2):
        assert pipeline.progress(data).isfinite().all()
    return {
        "then": then, "moved": moved, "loaded": loaded, "error": error, "state": state,
        "same": all(torch.equal(state[name], again[name]) for name in state) and again.keys() == state.keys(),
        "kept": [name for name in before if torch.equal(before[name], after[name])],
    }  # fmt: skip


def load_on_rank(rank: int, ranks: int, addresses: Sequence[str], files: Sequence[Path]) -> dict[str, Any]:
    model = parallel(EmbeddingOptimizer("adagrad", lr=LR), SMALL, RemoteStore(list(addresses)))
    model.load_state_dict(hetrec.merge_state_dicts([torch.load(f) for f in files[rank % len(files) :: ranks]]))
    return {"state": model.state_dict(), "predictions": predictions(model)}


def test_state_dicts_on_two_ranks_and_on_another_number(tmp_path: Path) -> None:
    files = [tmp_path / "rank0.pt", tmp_path / "rank1.pt"]
    with servers(2) as addresses:
        found = on_ranks(save_on_rank, tmp_path / "saving", addresses, files)
    first, second = found
    for rank in found:
        assert rank["same"]
        assert torch.equal(rank["loaded"], rank["then"])
        assert not torch.equal(rank["moved"], rank["then"])
    assert torch.equal(first["then"], second["then"])
    # Every row is in one of the shares.
    for name in row_names(first["state"], "keys"):
        keys = [rank["state"][name].tolist() for rank in found]
        assert all(keys)
        assert keys == [sorted(share) for share in keys]
        assert not set(keys[0]) & set(keys[1])
    # What does not fit on one rank is loaded on none, and each says so.
    assert "size mismatch for embedding_bags.t1.weight" in second["error"]
    assert 'Missing key(s) in state_dict: "embedding_bags.t2.clock"' in second["error"]
    for table, what in (("t1", "wrong"), ("t2", "absent")):
        for rank in found:
            assert (
                f"embedding_bags.{table} is not loaded, because of the state dicts of ranks 1 ({what})" in rank["error"]
            )
            assert table in rank["kept"]
            assert "t0" not in rank["kept"]

    # One rank, the tables in its own process.
    alone = parallel(EmbeddingOptimizer("adagrad", lr=LR), ROOMY)
    alone.load_state_dict(hetrec.merge_state_dicts([torch.load(file) for file in files]))
    torch.testing.assert_close(predictions(alone), first["then"], rtol=0, atol=0)
    whole = alone.state_dict()
    for name in row_names(whole, "keys"):
        assert whole[name].tolist() == sorted(key for rank in found for key in rank["state"][name].tolist())
    assert len(row_names(whole, "keys")) == len(TABLES) + len(WEIGHTED)

    # Two ranks again, from one file.
    torch.save(whole, tmp_path / "whole.pt")
    with servers(3) as addresses:
        back = on_ranks(load_on_rank, tmp_path / "loading", addresses, [tmp_path / "whole.pt"])
    merged = hetrec.merge_state_dicts([rank["state"] for rank in back])
    for part in ("keys", "weight", "state", "clock"):
        for name in row_names(whole, part):
            order = merged[f"{name.rpartition('.')[0]}.keys"].argsort()
            assert torch.equal(merged[name][order], whole[name])
    for rank in back:
        assert torch.equal(rank["predictions"], first["then"])
