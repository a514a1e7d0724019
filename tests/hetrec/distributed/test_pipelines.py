"""Our collections under TorchRec's stock pipelines: training as in plain torch, with the exchange out of the way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sparse_nn import CPU, LR, TABLES, Inline, all_rows, batches, collections, het, once, parallel, sparse_nn, stock
from torch import nn
from torchrec.distributed.test_utils.test_model import ModelInput
from torchrec.distributed.train_pipeline import EvalPipelineSparseDist, TrainPipelineBase, TrainPipelineSparseDist

from cache_backend import CacheConfig, EmbeddingOptimizer, ExchangeReply, ExchangeRequest, LocalStore


def plain_twin(rows: dict[str, torch.Tensor]) -> nn.Module:
    model = sparse_nn(stock)
    for collection in (model.sparse.ebc, model.sparse.weighted_ebc):
        for name, bag in collection.embedding_bags.items():
            bag.weight.data.copy_(rows[name])
    return model


PIPELINES: list[Callable[..., Any]] = [Inline, TrainPipelineBase, TrainPipelineSparseDist]


@pytest.mark.parametrize("name", ["sgd", "adagrad"])
@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize(("staleness", "rows"), [(0, 64), (100, 1000)])
def test_training_is_that_of_the_unsharded_model(
    name: Any, pipeline: Callable[..., Any], staleness: int, rows: int
) -> None:
    model = parallel(EmbeddingOptimizer(name, lr=LR, eps=1e-10), CacheConfig(rows=rows, staleness=staleness))
    plain = plain_twin(all_rows(model))
    kind = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}[name]
    reference = Inline(plain, kind(plain.parameters(), lr=LR), CPU)
    trained = pipeline(model, kind(model.parameters(), lr=LR), CPU)
    data = batches(12)
    ours, theirs = once(data), once(data)
    for _ in data:
        out, expected = trained.progress(ours), reference.progress(theirs)
        torch.testing.assert_close(out, expected, rtol=0, atol=5e-6)
    with pytest.raises(StopIteration):
        trained.progress(ours)
    for table, got in all_rows(model).items():
        wanted = next(c.embedding_bags[table] for c in (plain.sparse.ebc, plain.sparse.weighted_ebc)
                      if table in c.embedding_bags).weight  # fmt: skip
        torch.testing.assert_close(got, wanted.detach(), rtol=0, atol=2e-5)
    for collection in collections(model):
        assert collection.stats().steps == len(data)


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_synchronous_steps(pipeline: Callable[..., Any]) -> None:
    """A batch's rows are those after the step before it, whenever a pipeline asks for them."""
    outputs = []
    for trainer, consistency in ((Inline, "het"), (pipeline, "bsp")):
        model = parallel(EmbeddingOptimizer("adagrad", lr=LR), CacheConfig(rows=64, consistency=consistency))
        trained = trainer(model, torch.optim.SGD(model.parameters(), lr=LR), CPU)
        data = once(batches(8))
        outputs.append(torch.cat([trained.progress(data).detach() for _ in range(8)]))
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-5)


class Witness(LocalStore):
    """Answers exchanges only as often as it is allowed to."""

    def __init__(self) -> None:
        super().__init__()
        self.allowed = threading.Semaphore(0)

    def exchange(self, request: ExchangeRequest) -> ExchangeReply:
        assert self.allowed.acquire(timeout=60), "nobody computed while this exchange was under way"
        return super().exchange(request)


def test_the_next_batchs_exchange_is_under_way_while_a_batch_computes() -> None:
    """The store answers about a batch only once the batch before has made its step: without overlap, never."""
    store = Witness()
    model = parallel(EmbeddingOptimizer("sgd", lr=LR), store=store, model=sparse_nn(het, weighted=stock))
    requests = len({table.embedding_dim for table in TABLES})
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    optimizer.register_step_post_hook(lambda *_: store.allowed.release(requests))
    store.allowed.release(requests)  # the first batch has none before it
    pipeline = TrainPipelineSparseDist(model, optimizer, CPU)
    data = batches(5)
    iterator = once(data)
    for _ in data:
        pipeline.progress(iterator)
    assert model.module.sparse.ebc.collection.stats().steps == len(data)


def test_evaluation_between_steps_changes_nothing_and_eats_no_batch() -> None:
    data, unseen = batches(8), batches(11)[8:]
    outputs = []
    for evaluates in (False, True):
        model = parallel(EmbeddingOptimizer("adagrad", lr=LR), CacheConfig(rows=64))
        pipeline = TrainPipelineSparseDist(model, torch.optim.SGD(model.parameters(), lr=LR), CPU)
        iterator = once(data)
        found = []
        for _ in data:
            found.append(pipeline.progress(iterator).sum().item())
            if evaluates:
                model.eval()
                stored = {name: rows.clone() for name, rows in all_rows(model).items()}
                with torch.no_grad():
                    predictions = [model(batch) for batch in unseen]
                for batch, predicted in zip(unseen, predictions, strict=True):
                    twin = plain_twin(stored).eval()
                    twin.dense.load_state_dict(model.module.dense.state_dict())
                    twin.over.load_state_dict(model.module.over.state_dict())
                    torch.testing.assert_close(predicted, twin(batch), rtol=0, atol=1e-6)
                model.train()
        outputs.append(found)
    assert outputs[0] == pytest.approx(outputs[1], abs=1e-6)


class WithLoss(nn.Module):
    """Gives (loss, predictions) in evaluation too, which the evaluation pipeline asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.model = sparse_nn(het)

    @property
    def sparse(self) -> nn.Module:
        return self.model.sparse

    def forward(self, batch: ModelInput) -> Any:
        out = self.model(batch)
        return out if self.training else (out.sum(), out)


def test_the_evaluation_pipeline() -> None:
    model = parallel(EmbeddingOptimizer("sgd", lr=LR), model=WithLoss())
    data = batches(6)
    pipeline = TrainPipelineSparseDist(model, torch.optim.SGD(model.parameters(), lr=LR), CPU)
    iterator = once(data)
    for _ in data:
        pipeline.progress(iterator)
    pipeline.detach()
    model.eval()
    expected = [model(batch)[1] for batch in data]
    steps = [collection.stats().steps for collection in collections(model)]
    evaluation = EvalPipelineSparseDist(model, torch.optim.SGD(model.parameters(), lr=LR), CPU)
    iterator = once(data)
    for wanted in expected:
        torch.testing.assert_close(evaluation.progress(iterator), wanted)
    assert [collection.stats().steps for collection in collections(model)] == steps


def test_a_pipeline_can_be_detached_and_attached() -> None:
    data = batches(9)
    outputs = []
    for detaches in (False, True):
        model = parallel(EmbeddingOptimizer("sgd", lr=LR), CacheConfig(rows=64, staleness=1))
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        pipeline, inline = TrainPipelineSparseDist(model, optimizer, CPU), Inline(model, optimizer, CPU)
        iterator = once(data)
        found = [pipeline.progress(iterator).sum().item() for _ in range(3)]
        if detaches:
            pipeline.detach()
            # The pipeline keeps the batch it has prefetched; meanwhile others are trained on.
            for _ in range(2):
                assert inline.progress(once(data[6:])).isfinite().all()
            pipeline.attach()
        found += [pipeline.progress(iterator).sum().item() for _ in range(6)]
        outputs.append(found)
    assert outputs[0][:3] == outputs[1][:3]
    assert len(outputs[1]) == 9


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_the_learning_rate_of_the_fused_optimizer_is_obeyed(pipeline: Callable[..., Any]) -> None:
    model = parallel(EmbeddingOptimizer("sgd", lr=LR))
    (group, *_) = model.fused_optimizer.param_groups
    assert group["lr"] == LR
    before = all_rows(model)
    trained = pipeline(model, torch.optim.SGD(model.parameters(), lr=LR), CPU)
    for group in model.fused_optimizer.param_groups:
        group["lr"] = 0.0
    data = once(batches(4))
    trained.progress(data)
    trained.progress(data)
    for name, rows in all_rows(model).items():
        assert torch.equal(rows, before[name])
    for group in model.fused_optimizer.param_groups:
        group["lr"] = LR
    trained.progress(data)
    assert any(not torch.equal(rows, before[name]) for name, rows in all_rows(model).items())


def test_a_batch_is_not_trained_twice_when_a_step_is_inline() -> None:
    """A training forward outside the pipeline takes its own batch, not the one that the pipeline prefetched."""
    model = parallel(EmbeddingOptimizer("sgd", lr=LR))
    pipeline = TrainPipelineSparseDist(model, torch.optim.SGD(model.parameters(), lr=LR), CPU)
    data: list[ModelInput] = batches(4)
    iterator = once(data)
    pipeline.progress(iterator)
    loss, _ = model(data[3])
    loss.backward()
    for _ in range(3):
        pipeline.progress(iterator)
    with pytest.raises(StopIteration):
        pipeline.progress(iterator)
