"""State dicts of a sharded model: what is loaded is what was saved, and training goes on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from sparse_nn import CPU, LR, TABLES, Inline, all_rows, batches, once, parallel
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torchrec import EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

import hetrec
from cache_backend import CacheConfig, EmbeddingOptimizer, LocalStore

PIPELINES: list[Callable[..., Any]] = [Inline, TrainPipelineBase, TrainPipelineSparseDist]
EBC = "sparse.ebc.embedding_bags"
# A row that leaves the cache and comes back is rounded once more: here none has to.
ROOMY = CacheConfig(rows=4096, staleness=100)


class Program:
    """A model in training. ``name``: of the optimizer that trains the rows."""

    def __init__(self, name: Any, pipeline: Callable[..., Any] = Inline, cache: CacheConfig = ROOMY) -> None:
        self.store = LocalStore()
        self.model: DistributedModelParallel = parallel(EmbeddingOptimizer(name, lr=LR), cache, self.store)
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=LR)
        self.pipeline = pipeline(self.model, self.optimizer, CPU)

    def train(self, data: Any, steps: int) -> list[torch.Tensor]:
        return [self.pipeline.progress(data).detach().clone() for _ in range(steps)]

    def save(self) -> Any:
        return deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def load(self, saved: Any) -> None:
        model, optimizer = deepcopy(saved)
        found = self.model.load_state_dict(model)
        assert not found.missing_keys
        assert not found.unexpected_keys
        self.optimizer.load_state_dict(optimizer)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("name", "consistency"),
    [("sgd", "het"), ("adagrad", "het"), ("rowwise_adagrad", "het"), ("adam", "het"), ("adagrad", "bsp")],
)
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_training_goes_on_from_what_was_loaded(name: Any, consistency: Any, pipeline: Callable[..., Any]) -> None:
    """Twice the same five steps after the same state, the second time with what was loaded; then once more in a new
    program. The pipeline holds a prefetched batch at every load."""
    cache = replace(ROOMY, consistency=consistency)
    program = Program(name, pipeline, cache)
    data = once([*batches(10), *batches(10)[5:], *batches(10)[5:]])
    program.train(data, 5)
    saved = program.save()
    first = program.train(data, 5)
    program.load(saved)
    assert equal(program.save()[0], saved[0])
    second = program.train(data, 5)
    other = Program(name, pipeline, cache)
    other.load(saved)
    third = other.train(once(batches(10)[5:]), 5)
    for again in (second, third):
        for expected, got in zip(first, again, strict=True):
            assert torch.equal(got, expected)
    assert equal(program.save()[0], other.save()[0])


def test_what_a_state_dict_holds() -> None:
    program = Program("adagrad")
    program.train(once(batches(4)), 4)
    rows = all_rows(program.model)
    state = program.model.state_dict()
    trained = {
        table.name: {int(key) for batch in batches(4) for name in table.feature_names
                     for key in batch.idlist_features[name].values()}
        for table in TABLES
    }  # fmt: skip
    for table in TABLES:
        keys = state[f"{EBC}.{table.name}.keys"]
        assert keys.tolist() == sorted(trained[table.name])
        assert torch.equal(state[f"{EBC}.{table.name}.weight"], rows[table.name][keys])
        squares = state[f"{EBC}.{table.name}.state"]
        assert squares.shape == (len(keys), table.embedding_dim)
        assert (squares >= 0).all()
        assert (squares > 0).any()
        clocks = state[f"{EBC}.{table.name}.clock"]
        assert clocks.dtype == torch.int64
        assert ((clocks > 0) & (clocks <= 4)).all()
    assert f"{EBC}.t0.state" not in Program("sgd").model.state_dict()


def test_rows_that_the_state_dict_lacks_are_fresh_again() -> None:
    program = Program("adagrad")
    untrained = all_rows(program.model)
    empty = program.save()
    data = once(batches(9))
    program.train(data, 1)
    saved, rows, held = program.save(), all_rows(program.model), program.store.stats().rows
    program.train(data, 5)
    program.load(saved)
    assert program.store.stats().rows == held
    for name, got in all_rows(program.model).items():
        assert torch.equal(got, rows[name])
    program.load(empty)
    assert program.store.stats().rows == 0
    for name, got in all_rows(program.model).items():
        assert torch.equal(got, untrained[name])


def test_loading_leaves_other_tables_of_the_store_alone() -> None:
    store = LocalStore()
    model = parallel(EmbeddingOptimizer("sgd", lr=LR), ROOMY, store)
    other = hetrec.HetEmbeddingCollection([EmbeddingConfig(name="mine", embedding_dim=8, num_embeddings=9,
                                                           feature_names=["x"])])  # fmt: skip
    other.open(store, ROOMY, EmbeddingOptimizer("sgd", lr=LR))
    features = KeyedJaggedTensor(["x"], torch.tensor([1, 2]), lengths=torch.tensor([2]))
    other(features)["x"].values().sum().backward()
    other.step(LR)
    other.flush()
    rows = other.eval()(features)["x"].values().clone()
    model.load_state_dict(model.state_dict())
    assert torch.equal(other(features)["x"].values(), rows)


@pytest.mark.parametrize("attached", [False, True])
def test_loading_with_a_detached_pipeline(attached: bool) -> None:
    """The pipeline keeps its prefetched batches; they are trained, once, on what was loaded."""
    program = Program("sgd", TrainPipelineSparseDist)
    data = batches(8)
    iterator = once(data)
    saved = program.save()
    program.train(iterator, 3)
    if not attached:
        program.pipeline.detach()
    program.load(saved)
    if not attached:
        program.pipeline.attach()
    got = program.train(iterator, 5)
    expected = Program("sgd").train(once(data[3:]), 5)
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine, theirs)
    with pytest.raises(StopIteration):
        program.pipeline.progress(iterator)


def test_a_batch_under_way_at_a_load_cannot_be_stepped() -> None:
    program = Program("sgd")
    ebc = program.model.module.sparse.ebc
    saved = ebc.state_dict()
    loss, _ = program.model(batches(1)[0])
    ebc.load_state_dict(saved)
    with pytest.raises(RuntimeError, match=r"a batch that was given up, because .* rows were loaded since its forward"):
        loss.backward()
    assert not ebc.state_dict()["embedding_bags.t0.keys"].numel()
    program.train(once(batches(2)), 2)


def edited(state: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A state dict with parts of the table t0 replaced, or, where None is given, left out."""
    for part, change in changes.items():
        name = f"{EBC}.t0.{part}"
        if change is None:
            del state[name]
        else:
            state[name] = change(state[name]) if callable(change) else change
    return state


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": None}, r'Missing key\(s\) in state_dict: "embedding_bags\.t0\.weight"'),
        ({"keys": None, "state": None}, r'"embedding_bags\.t0\.keys", "embedding_bags\.t0\.state"'),
        ({"momentum": torch.zeros(3)}, r'Unexpected key\(s\) in state_dict: "embedding_bags\.t0\.momentum"'),
        ({"weight": lambda w: w[:, :4]}, r"size mismatch for embedding_bags\.t0\.weight: .*\(\d+, 4\).*\(\d+, 8\)"),
        ({"state": lambda s: s[:, :1]}, r"size mismatch for embedding_bags\.t0\.state: .*\(\d+, 1\).*\(\d+, 8\)"),
        ({"clock": lambda c: c[:-1]}, r"size mismatch for embedding_bags\.t0\.clock"),
        ({"keys": lambda k: k[:-1]}, r"size mismatch for embedding_bags\.t0\.weight"),
        ({"keys": lambda k: k.float()}, r"embedding_bags\.t0\.keys has dtype torch\.float32"),
        ({"weight": lambda w: w.long()}, r"embedding_bags\.t0\.weight has dtype torch\.int64"),
        ({"weight": [1.0]}, r"embedding_bags\.t0\.weight: tensors are expected"),
        ({"keys": lambda k: k * 0 + 3}, r"embedding_bags\.t0\.keys has key 3 more than once"),
        ({"keys": lambda k: k + 60}, r"embedding_bags\.t0\.keys has key \d+, the table has 60 rows"),
        ({"keys": lambda k: k - 60}, r"embedding_bags\.t0\.keys has key -\d+, the table has 60 rows"),
        ({"clock": lambda c: c - 9}, r"embedding_bags\.t0\.clock reaches from -\d+"),
        ({"clock": lambda c: c + (1 << 48)}, r"embedding_bags\.t0\.clock reaches from"),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)  # fmt: skip
def test_what_does_not_fit_is_an_error_by_name(changes: dict[str, Any], message: str) -> None:
    program = Program("adagrad")
    data = once(batches(4))
    program.train(data, 2)
    rows = all_rows(program.model)
    state = edited(program.save()[0], changes)
    program.train(data, 1)
    now = all_rows(program.model)
    with pytest.raises(RuntimeError, match=message):
        program.model.load_state_dict(state)
    if "momentum" not in changes:
        assert torch.equal(all_rows(program.model)["t0"], now["t0"])
    assert torch.equal(all_rows(program.model)["t1"], rows["t1"])  # as torch does: what fits is loaded
    program.train(data, 1)


def test_without_strictness_an_absent_table_stays_as_it_is() -> None:
    program = Program("adagrad")
    data = once(batches(4))
    program.train(data, 2)
    rows = all_rows(program.model)
    state = {name: value for name, value in program.save()[0].items() if ".t0." not in name}
    twin = Program("adagrad")
    twin_data = once(batches(3))
    twin.train(twin_data, 2)
    twin.save()
    twin.train(twin_data, 1)
    now = all_rows(twin.model)
    program.train(data, 1)  # the cache holds this step's updates back
    found = program.model.load_state_dict(state | {f"{EBC}.t9.keys": torch.zeros(1)}, strict=False)
    assert sorted(name.rpartition(".")[2] for name in found.missing_keys) == ["clock", "keys", "state", "weight"]
    loaded = all_rows(program.model)
    assert torch.equal(loaded["t0"], now["t0"])
    assert torch.equal(loaded["t1"], rows["t1"])


def test_unpooled_rows() -> None:
    table = EmbeddingConfig(name="a.b", embedding_dim=4, num_embeddings=0, feature_names=["x"], weight_init_min=-1.0,
                            weight_init_max=1.0)  # fmt: skip

    def program() -> DistributedModelParallel:
        model = torch.nn.Sequential(hetrec.HetEmbeddingCollection([table], device=torch.device("meta")))
        sharders = [hetrec.HetEmbeddingCollectionSharder(LocalStore(), ROOMY, EmbeddingOptimizer("adam", lr=LR))]
        return DistributedModelParallel(model, device=CPU, sharders=sharders, plan=hetrec.plan(model, sharders))

    keys = torch.tensor([2**63 - 1, -(2**63), 0])
    features = KeyedJaggedTensor(["x"], keys, lengths=torch.tensor([1, 2]))
    one, other = program(), program()
    one(features)["x"].values().square().sum().backward()
    state = one.state_dict()
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        "0.embeddings.a.b.keys": (3,), "0.embeddings.a.b.weight": (3, 4), "0.embeddings.a.b.state": (3, 9),
        "0.embeddings.a.b.clock": (3,),
    }  # fmt: skip
    assert state["0.embeddings.a.b.keys"].tolist() == sorted(keys.tolist())
    other.load_state_dict(state)
    assert torch.equal(one.eval()(features)["x"].values(), other.eval()(features)["x"].values())


def test_the_optimizers_state_dicts() -> None:
    """TorchRec's usual combination of the rows' and the dense parameters' optimizers, learning rates included."""

    def combined(program: Program) -> CombinedOptimizer:
        dense = dict(in_backward_optimizer_filter(program.model.named_parameters()))
        wrapped = KeyedOptimizerWrapper(dense, lambda params: torch.optim.Adagrad(params, lr=LR))
        optimizer = CombinedOptimizer([program.model.fused_optimizer, wrapped])
        optimizer.init_state()
        return optimizer

    one, other = Program("adagrad"), Program("adagrad")
    optimizers = [combined(one), combined(other)]
    for optimizer in optimizers:
        optimizer.save_param_groups(True)
    rates = [0.5, 0.25, 0.125]  # two collections, and the dense part
    for group, rate in zip(optimizers[0].param_groups, rates, strict=True):
        group["lr"] = rate
    optimizers[1].load_state_dict(deepcopy(optimizers[0].state_dict()))
    assert [group["lr"] for group in optimizers[1].param_groups] == rates
    assert [group["lr"] for group in other.model.fused_optimizer.param_groups] == rates[:2]
    # Without the groups, which is TorchRec's default, it is the state of the dense part alone.
    for optimizer in optimizers:
        optimizer.save_param_groups(False)
    optimizers[1].load_state_dict(deepcopy(optimizers[0].state_dict()))
    outputs = []
    for program, optimizer in zip((one, other), optimizers, strict=True):
        for batch in batches(3):
            loss, predictions = program.model(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        outputs.append(predictions)
    assert torch.equal(*outputs)


def test_torchs_distributed_checkpoint_on_one_rank(tmp_path: Path) -> None:
    """It loads into tensors that exist, and rows of a new program do not: the way is a file of its own."""
    program, other = Program("adagrad"), Program("adagrad")
    program.train(once(batches(3)), 3)
    state = program.model.state_dict()
    dcp.save({"model": state}, checkpoint_id=tmp_path / "checkpoint")
    with pytest.raises(dcp.api.CheckpointException, match="Size mismatch between saved"):
        dcp.load({"model": other.model.state_dict()}, checkpoint_id=tmp_path / "checkpoint")
    dcp_to_torch_save(tmp_path / "checkpoint", tmp_path / "model.pt")
    other.model.load_state_dict(torch.load(tmp_path / "model.pt")["model"])
    assert equal(other.model.state_dict(), state)


def test_merging_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one state dict"):
        hetrec.merge_state_dicts([])
