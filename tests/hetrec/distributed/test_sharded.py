"""Sharding of our collections: plans of mixed models, unpooled rows, features of different batch sizes, tracing."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from sparse_nn import WEIGHTED, batches, het, rows_of, sparse_nn, stock
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ModuleSharder, ShardingEnv
from torchrec.fx import symbolic_trace
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.streamable import Pipelineable

import hetrec
from cache_backend import CacheConfig, EmbeddingOptimizer, LocalStore, RemoteStore

CPU = torch.device("cpu")
SGD = EmbeddingOptimizer("sgd", lr=0.1)


def sharded(model: nn.Module, *sharders: ModuleSharder[Any], **planning: Any) -> DistributedModelParallel:
    plan = hetrec.plan(model, sharders, **planning)
    return DistributedModelParallel(model, device=CPU, sharders=list(sharders), plan=plan)


# TorchRec's sharder splits by rows on GPUs only.
@pytest.mark.parametrize("kind", ["table_wise", "column_wise", "data_parallel"])
def test_small_tables_can_stay_in_torchrecs_hands(kind: str) -> None:
    """The weighted collection is TorchRec's own, sharded by its own sharder; both train as in plain torch."""
    model = sparse_nn(het, weighted=stock)
    kernel = EmbeddingComputeKernel.DENSE if kind == "data_parallel" else EmbeddingComputeKernel.FUSED
    fused = EmbeddingBagCollectionSharder({"learning_rate": 0.1})
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, compute_device="cpu"),
        constraints={WEIGHTED[0].name: ParameterConstraints(sharding_types=[kind], compute_kernels=[kernel.value])},
    )
    ours = hetrec.HetEmbeddingBagCollectionSharder(LocalStore(), optimizer=SGD)
    plan = hetrec.plan(model, [fused, ours], planner=planner)
    assert set(plan.plan) == {"sparse.ebc", "sparse.weighted_ebc"}
    assert plan.plan["sparse.weighted_ebc"]["w0"].sharding_type == kind
    parallel = DistributedModelParallel(model, device=CPU, sharders=[fused, ours], plan=plan)
    plain = sparse_nn(stock)
    for name, rows in rows_of(parallel.module.sparse.ebc.collection).items():
        plain.sparse.ebc.embedding_bags[name].weight.data.copy_(rows)
    (weighted,) = (v for k, v in parallel.state_dict().items() if "weighted_ebc" in k)
    shards = weighted.local_shards()[0].tensor if hasattr(weighted, "local_shards") else weighted
    plain.sparse.weighted_ebc.embedding_bags["w0"].weight.data.copy_(shards)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (parallel, plain)]
    for batch in batches(6):
        outputs = []
        for trained, optimizer in zip((parallel, plain), optimizers, strict=True):
            loss, predictions = trained(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            outputs.append(predictions)
        torch.testing.assert_close(*outputs, rtol=0, atol=5e-6)


def test_a_collection_that_no_sharder_is_for_is_an_error() -> None:
    model = sparse_nn(het)
    with pytest.raises(
        ValueError, match=r"sparse\.ebc is a HetEmbeddingBagCollection.*HetEmbeddingBagCollectionSharder"
    ):
        hetrec.plan(model, [hetrec.HetEmbeddingCollectionSharder(LocalStore())])
    # Left out of the plan it stays unsharded, and says so at its first use.
    sharder = hetrec.HetEmbeddingBagCollectionSharder(LocalStore())
    model = sparse_nn(het, weighted=stock)
    parallel = DistributedModelParallel(model, device=CPU, sharders=[sharder, EmbeddingBagCollectionSharder()])
    with pytest.raises(RuntimeError, match=r"give it plan=hetrec\.plan"):
        parallel(batches(1)[0])


def test_a_sharder_can_be_pickled() -> None:
    store = RemoteStore(["grpc://127.0.0.1:1"])
    sharder = hetrec.HetEmbeddingBagCollectionSharder(store, optimizer=SGD, seed=3)
    copy = pickle.loads(pickle.dumps(sharder))
    assert (copy._optimizer, copy._seed, copy.module_type) == (SGD, 3, hetrec.HetEmbeddingBagCollection)


def test_ranks_cannot_share_a_store_in_one_process() -> None:
    sharder = hetrec.HetEmbeddingBagCollectionSharder(LocalStore())
    collection = hetrec.HetEmbeddingBagCollection(WEIGHTED)
    with pytest.raises(ValueError, match="2 ranks cannot share a LocalStore"):
        sharder.shard(collection, {}, ShardingEnv(2, 0, None), CPU, "ebc")  # type: ignore[arg-type]


@dataclass
class Features(Pipelineable):
    sparse: KeyedJaggedTensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Features:
        return Features(self.sparse.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: torch.Stream) -> None:
        self.sparse.record_stream(stream)


class Scorer(nn.Module):
    def __init__(self, rows: nn.Module) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, batch: Features) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = self.rows(batch.sparse).to_dict()
        out = torch.cat([pooled["x"], pooled["y"]], 1)
        return (out - 0.3).square().sum(), out.detach()


class Sequences(nn.Module):
    def __init__(self, rows: nn.Module) -> None:
        super().__init__()
        self.rows = rows
        self.head = nn.Linear(4, 1)
        with torch.no_grad():
            self.head.weight.fill_(0.5)
            self.head.bias.fill_(0.1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        jagged = self.rows(features)
        return torch.cat([self.head(jagged[name].values()).tanh() for name in ("x", "y@a", "y@b")])


def test_unpooled_rows_under_distributed_model_parallel() -> None:
    tables = [
        EmbeddingConfig(name="a", embedding_dim=4, num_embeddings=30, feature_names=["x", "y"]),
        EmbeddingConfig(name="b", embedding_dim=4, num_embeddings=30, feature_names=["y"]),
    ]
    ours = Sequences(hetrec.HetEmbeddingCollection(tables, device=torch.device("meta")))
    parallel = sharded(ours, hetrec.HetEmbeddingCollectionSharder(LocalStore(), optimizer=SGD))
    plain = Sequences(EmbeddingCollection(tables=tables))
    parallel.eval()
    lengths = torch.tensor([1] * 30 + [0] * 30 + [0] * 30 + [1] * 30, dtype=torch.int32)
    every = KeyedJaggedTensor(["x", "y"], torch.arange(30).repeat(2), lengths=lengths)
    found = parallel.module.rows(every).wait()
    plain.rows.embeddings["a"].weight.data.copy_(found["x"].values())
    plain.rows.embeddings["b"].weight.data.copy_(found["y@b"].values())
    parallel.train()
    generator = torch.Generator().manual_seed(0)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (parallel, plain)]
    for _ in range(8):
        lengths = torch.randint(0, 4, (20,), generator=generator, dtype=torch.int32)
        keys = torch.randint(0, 30, (int(lengths.sum()),), generator=generator)
        features = KeyedJaggedTensor(["x", "y"], keys, lengths=lengths)
        outputs = []
        for model, optimizer in zip((parallel, plain), optimizers, strict=True):
            out = model(features)
            optimizer.zero_grad()
            (out - 0.7).square().sum().backward()
            optimizer.step()
            outputs.append(out)
        torch.testing.assert_close(*outputs, rtol=0, atol=5e-6)


def vbe_batch(generator: torch.Generator, weighted: bool) -> KeyedJaggedTensor:
    """8 samples; feature x has 3 different bags, feature y 5."""
    strides = [3, 5]
    lengths = torch.randint(0, 4, (sum(strides),), generator=generator, dtype=torch.int32)
    n = int(lengths.sum())
    inverse = torch.stack([torch.randint(0, stride, (8,), generator=generator) for stride in strides])
    return KeyedJaggedTensor(
        ["x", "y"],
        torch.randint(0, 30, (n,), generator=generator),
        weights=torch.rand(n, generator=generator) if weighted else None,
        lengths=lengths,
        stride_per_key_per_rank=[[stride] for stride in strides],
        inverse_indices=(["x", "y"], inverse),
    )


@pytest.mark.parametrize("weighted", [False, True])
def test_features_of_different_batch_sizes(weighted: bool) -> None:
    tables = [
        EmbeddingBagConfig(name="a", embedding_dim=4, num_embeddings=30, feature_names=["y"]),
        EmbeddingBagConfig(
            name="b", embedding_dim=8, num_embeddings=30, feature_names=["x"],
            pooling=PoolingType.SUM if weighted else PoolingType.MEAN,
        ),
    ]  # fmt: skip
    ours = hetrec.HetEmbeddingBagCollection(tables, is_weighted=weighted)
    ours.open(LocalStore(), CacheConfig(rows=64), SGD)
    plain = EmbeddingBagCollection(tables=tables, is_weighted=weighted)
    for name, rows in rows_of(ours).items():
        plain.embedding_bags[name].weight.data.copy_(rows)
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(6):
        features = vbe_batch(generator, weighted)
        weights = features.weights().requires_grad_() if weighted else torch.zeros(0, requires_grad=True)
        found, expected = ours(features).values(), plain(features).values()
        torch.testing.assert_close(found, expected, rtol=0, atol=5e-6)
        optimizer.zero_grad()
        gradients = []
        for out in (found, expected):
            out.square().sum().backward()
            gradients.append(weights.grad)
            weights.grad = None
        if weighted:  # weights may be learned, also of bags that stand for several samples
            torch.testing.assert_close(*gradients, rtol=0, atol=2e-5)
        ours.step(0.1)
        optimizer.step()
    bare = KeyedJaggedTensor(["x", "y"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1, 0]),
                             stride_per_key_per_rank=[[1], [2]], weights=torch.ones(2))  # fmt: skip
    with pytest.raises(ValueError, match=r"\[1, 2\].*inverse_indices"):
        ours(bare)


def test_a_model_can_be_traced_with_our_collection_as_a_leaf() -> None:
    model = sparse_nn(het).eval()
    for collection in (model.sparse.ebc, model.sparse.weighted_ebc):
        collection.open(LocalStore(), CacheConfig(rows=64), SGD)
    traced = symbolic_trace(model, leaf_modules=["HetEmbeddingBagCollection"])
    for batch in batches(2):
        torch.testing.assert_close(traced(batch), model(batch))


@pytest.mark.parametrize("pipeline", [None, TrainPipelineSparseDist], ids=["inline", "pipelined"])
def test_position_weights_are_trained_under_distributed_model_parallel(pipeline: Any) -> None:
    """TorchRec's feature processor in front of our collection: its weights and our rows as in plain TorchRec."""
    tables = [EmbeddingBagConfig(name="a", embedding_dim=4, num_embeddings=30, feature_names=["x", "y"])]

    def scorer(rows: nn.Module) -> nn.Module:
        processor = PositionWeightedModuleCollection({"x": 4, "y": 4})
        return Scorer(FeatureProcessedEmbeddingBagCollection(rows, processor))

    ours = hetrec.HetEmbeddingBagCollection(tables, is_weighted=True, device=torch.device("meta"))
    model = scorer(ours)
    parallel = sharded(model, hetrec.HetEmbeddingBagCollectionSharder(LocalStore(), CacheConfig(rows=32), SGD))
    stock = EmbeddingBagCollection(tables=tables, is_weighted=True)
    stock.embedding_bags["a"].weight.data.copy_(rows_of(ours)["a"])
    plain = scorer(stock)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (parallel, plain)]
    trained = None if pipeline is None else pipeline(parallel, optimizers[0], torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    data = []
    for _ in range(6):
        lengths = torch.randint(0, 4, (20,), generator=generator, dtype=torch.int32)
        keys = torch.randint(0, 30, (int(lengths.sum()),), generator=generator)
        data.append(KeyedJaggedTensor(["x", "y"], keys, lengths=lengths))
    batches = iter([Features(features) for features in data])
    for features in data:
        if trained is not None:
            out = trained.progress(batches)
        else:
            loss, out = parallel(Features(features))
            optimizers[0].zero_grad()
            loss.backward()
            optimizers[0].step()
        loss, expected = plain(Features(features))
        torch.testing.assert_close(out, expected, rtol=0, atol=5e-6)
        optimizers[1].zero_grad()
        loss.backward()
        optimizers[1].step()
    positions = [[p for n, p in m.named_parameters() if "position" in n] for m in (model, plain)]
    for mine, other in zip(*positions, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)
        assert not torch.equal(mine, torch.ones_like(mine))
    parallel.eval()  # pushes
    torch.testing.assert_close(rows_of(ours)["a"], stock.embedding_bags["a"].weight.detach(), rtol=0, atol=1e-5)
