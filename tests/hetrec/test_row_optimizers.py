"""The optimizers of rows against FBGEMM's, and their promises: laziness, and a learning rate of 0."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from bags import batch, opened, random_batch, stored_rows, table
from torchrec import KeyedJaggedTensor

from cache_backend import CacheConfig, EmbeddingOptimizer

logging.disable(logging.WARNING)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # fbgemm-gpu-cpu warns of every GPU optimizer that it does not have
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
        WeightDecayMode,
    )
logging.disable(logging.NOTSET)

ROWS, DIM = 60, 8
EVERY = [
    EmbeddingOptimizer("sgd", weight_decay=0.1),
    EmbeddingOptimizer("adagrad", weight_decay=0.1),
    EmbeddingOptimizer("rowwise_adagrad", weight_decay=0.1),
    EmbeddingOptimizer("adam", weight_decay=0.1),
]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (EmbeddingOptimizer("sgd"), {"optimizer": EmbOptimType.EXACT_SGD}),
        (EmbeddingOptimizer("adagrad", eps=1e-4), {"optimizer": EmbOptimType.EXACT_ADAGRAD, "eps": 1e-4}),
        (EmbeddingOptimizer(eps=1e-4), {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "eps": 1e-4}),
        (
            EmbeddingOptimizer(eps=1e-4, weight_decay=0.1),
            {
                "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
                "eps": 1e-4,
                "weight_decay": 0.1,
                "weight_decay_mode": WeightDecayMode.L2,
            },
        ),
    ],
    ids=["sgd", "adagrad", "rowwise_adagrad", "rowwise_adagrad with decay"],
)
def test_steps_are_those_of_fbgemm(ours: EmbeddingOptimizer, theirs: dict[str, Any]) -> None:
    """Its CPU kernels, which have no Adam, and weight decay for row-wise Adagrad alone."""
    collection = opened([table("t", ["x", "y"], rows=ROWS, dim=DIM)], ours, CacheConfig(rows=96, staleness=2))
    tbe = SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        feature_table_map=[0, 0],
        weights_precision=SparseType.FP32,
        learning_rate=0.1,
        pooling_mode=PoolingMode.SUM,
        **theirs,
    )
    (weight,) = tbe.split_embedding_weights()
    weight.copy_(stored_rows(collection, collection.embedding_bag_configs()[0]))
    generator = torch.Generator().manual_seed(7)
    for _ in range(20):
        features = random_batch(["x", "y"], 24, ROWS, generator)
        grad = 0.1 * torch.randn(24, 2 * DIM, generator=generator)
        collection(features).values().backward(grad)
        collection.step(lr=0.1)
        tbe(features.values(), features.offsets().long()).backward(grad)
    collection.flush()
    rows = stored_rows(collection, collection.embedding_bag_configs()[0])
    torch.testing.assert_close(rows, weight, rtol=0, atol=2e-6)


@pytest.mark.parametrize("optimizer", EVERY, ids=lambda o: o.name)
def test_a_row_that_no_batch_holds_stays(optimizer: EmbeddingOptimizer) -> None:
    """No momentum and no weight decay reaches it, and the next step on it finds the state the last one left."""
    both, other = batch(["x"], [[1], [2]]), batch(["x"], [[2]])
    runs = []
    for pauses in (0, 5):
        collection = opened([table("t", ["x"])], optimizer)
        config = collection.embedding_bag_configs()[0]
        rows = []
        for features in [both, both, *[other] * pauses, both]:
            collection(features).values().square().sum().backward()
            collection.step(lr=0.1)
            collection.flush()
            rows.append(stored_rows(collection, config)[1])
        assert all(torch.equal(row, rows[1]) for row in rows[2:-1])
        runs.append(rows[-1])
    assert torch.equal(*runs)


@pytest.mark.parametrize("optimizer", EVERY, ids=lambda o: o.name)
def test_a_learning_rate_of_0_leaves_the_rows(optimizer: EmbeddingOptimizer) -> None:
    collection = opened([table("t", ["x"])], optimizer)
    config = collection.embedding_bag_configs()[0]
    features = KeyedJaggedTensor(["x"], torch.arange(20), lengths=torch.ones(20, dtype=torch.int32))
    for lr in (0.0, 0.1, 0.0):  # a warm-up begins at 0; a schedule may end there
        before = stored_rows(collection, config)
        for _ in range(3):
            collection(features).values().square().sum().backward()
            collection.step(lr)
        collection.flush()
        assert torch.equal(stored_rows(collection, config), before) == (lr == 0.0)


def test_the_rows_gradient_is_clipped_after_it_was_summed_and_divided_by_the_ranks() -> None:
    """Three times [3, 0, -4, 0] / 2 ranks is [4.5, 0, -6, 0]: within 5 that is [4.5, 0, -5, 0], of norm 6.73."""
    grad = torch.tensor([[3.0, 0.0, -4.0, 0.0]]).repeat(3, 1)
    for options, expected in (
        ({"max_gradient": 5.0}, [4.5, 0.0, -5.0, 0.0]),
        ({"max_gradient_norm": 2.5}, [1.5, 0.0, -2.0, 0.0]),
        ({"max_gradient": 5.0, "max_gradient_norm": 1.0}, [4.5 / 45.25**0.5, 0.0, -5 / 45.25**0.5, 0.0]),
        ({"max_gradient": 6.0, "max_gradient_norm": 7.5}, [4.5, 0.0, -6.0, 0.0]),
    ):
        collection = opened([table("t", ["x"])], EmbeddingOptimizer("sgd", **options), world_size=2)
        config = collection.embedding_bag_configs()[0]
        before = stored_rows(collection, config)[3]
        collection(batch(["x"], [[3], [3], [3]])).values().backward(grad)
        collection.step(lr=1.0)
        collection.flush()
        moved = before - stored_rows(collection, config)[3]
        torch.testing.assert_close(moved, torch.tensor(expected), rtol=1e-6, atol=1e-6)
