"""What programs do with a collection beside training it: many forwards, two backwards, copies, two on one store."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import warnings
import weakref

import pytest
import torch
from bags import PlainBags, batch, opened, random_batch, stored_rows, table
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torchrec import KeyedJaggedTensor

from cache_backend import CacheConfig, EmbeddingOptimizer, ExchangeReply, ExchangeRequest, LocalStore
from hetrec import HetEmbeddingBagCollection
from hetrec.cached_batch import TRANSITIONS, CachedBatch, State

SGD = EmbeddingOptimizer("sgd", lr=0.1)


def pins(collection: HetEmbeddingBagCollection) -> int:
    return int(collection.stream.groups[0].cache.meta.view(torch.int32)[:, 6].sum())


@pytest.mark.parametrize(("grad", "times"), [(True, 10_000), (False, 1_000)], ids=["graph-dropped", "no-grad"])
def test_thousands_of_forwards_without_backward(grad: bool, times: int) -> None:
    """In training mode, each of another batch: none keeps pins, slots or memory; training then goes on."""
    collection = opened([table("t", ["x"], rows=1000)], SGD, CacheConfig(rows=32))
    plain = PlainBags(collection, SGD, torch.float64)
    with torch.set_grad_enabled(grad):
        for i in range(times):
            collection(batch(["x"], [[i % 1000], [(7 * i) % 1000]]))
    cache = collection.stream.groups[0].cache
    assert pins(collection) <= 2, "pins of batches whose graph is gone"
    assert cache.meta.size(0) - cache.capacity <= 256, "spill rows grew"
    kept = batch(["x"], [[1], [2], [2]])
    for bags in (collection, plain):
        out = bags(kept)
        (out if isinstance(out, Tensor) else out.values()).square().sum().backward()
    collection.step(0.1)
    plain.step(0.1)
    collection.flush()
    assert pins(collection) == 0
    rows = stored_rows(collection, collection.embedding_bag_configs()[0]).double()
    torch.testing.assert_close(rows, plain.weights["t"].detach(), rtol=0, atol=5e-6)


def test_a_forward_whose_graph_lives_keeps_its_rows() -> None:
    """Losses of several batches, added up before one backward."""
    collection = opened([table("t", ["x"])], SGD, CacheConfig(rows=32))
    plain = PlainBags(collection, SGD, torch.float64)
    batches = [batch(["x"], [[k] for k in range(start, start + 20)]) for start in (0, 10, 30)]
    sum(collection(features).values().square().sum() for features in batches).backward()  # type: ignore[union-attr]
    sum(plain(features).square().sum() for features in batches).backward()  # type: ignore[union-attr]
    collection.step(0.1)
    plain.step(0.1)
    collection.flush()
    rows = stored_rows(collection, collection.embedding_bag_configs()[0]).double()
    torch.testing.assert_close(rows, plain.weights["t"].detach(), rtol=0, atol=5e-6)


def test_two_backwards_add_up_and_one_after_the_step_is_an_error() -> None:
    collection = opened([table("t", ["x"])], SGD)
    plain = PlainBags(collection, SGD, torch.float64)
    features = batch(["x"], [[1, 2], [2], []])
    losses = [collection(features).values().square().sum(), plain(features).square().sum()]
    for _ in range(2):
        for loss in losses:
            loss.backward(retain_graph=True)
    collection.step(0.1)
    plain.step(0.1)
    with pytest.raises(RuntimeError, match=r"whose step was taken: .* Run backward before the step"):
        losses[0].backward()
    collection.flush()
    rows = stored_rows(collection, collection.embedding_bag_configs()[0]).double()
    torch.testing.assert_close(rows, plain.weights["t"].detach(), rtol=0, atol=5e-6)


def test_activation_checkpointing() -> None:
    """The lookup runs twice, the second time within backward."""
    collection = opened([table("t", ["x"])], SGD)
    plain = PlainBags(collection, SGD, torch.float64)
    for keys in ([1, 2], [2, 3]):
        features = batch(["x"], [[key] for key in keys])
        anchor = torch.ones(1, requires_grad=True)
        torch.utils.checkpoint.checkpoint(
            lambda a, f=features: (a * collection(f).values()).square().sum(), anchor, use_reentrant=False
        ).backward()
        plain(features).square().sum().backward()
        collection.step(0.1)
        plain.step(0.1)
    collection.flush()
    rows = stored_rows(collection, collection.embedding_bag_configs()[0]).double()
    torch.testing.assert_close(rows, plain.weights["t"].detach(), rtol=0, atol=5e-6)


@pytest.mark.parametrize("key_type", [torch.int32, torch.int64])
@pytest.mark.parametrize("length_type", [torch.int32, torch.int64])
def test_integer_types_of_keys_and_lengths(key_type: torch.dtype, length_type: torch.dtype) -> None:
    """One batch after the other in another type, features in another order."""
    collection = opened([table("t", ["x", "y"]), table("u", ["z"], dim=8)], SGD, CacheConfig(rows=64))
    plain = PlainBags(collection, SGD, torch.float64)
    generator = torch.Generator().manual_seed(0)
    for i in range(6):
        features = random_batch(["z", "x", "y"], 5, 60, generator)
        types = (key_type, length_type) if i % 2 else (torch.int64, torch.int32)
        cast = KeyedJaggedTensor(
            features.keys(), features.values().to(types[0]), lengths=features.lengths().to(types[1])
        )
        out, expected = collection(cast).values(), plain(features)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=5e-6)
        out.square().sum().backward()
        expected.square().sum().backward()
        collection.step(0.1)
        plain.step(0.1)


def train_together(collections: list[HetEmbeddingBagCollection], plain: PlainBags, flush: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    for i in range(12):
        collection, features = collections[i % 2], random_batch(["x"], 6, 60, generator)
        out, expected = collection(features).values(), plain(features)
        if flush:
            torch.testing.assert_close(out.double(), expected, rtol=0, atol=5e-6)
        # A gradient that does not depend on the rows: then sums do not depend on who read what when.
        out.sum().backward()
        expected.sum().backward()
        collection.step(0.1)
        plain.step(0.1)
        if flush:
            collection.flush()


@pytest.mark.parametrize("flush", [True, False], ids=["flushed", "pending"])
def test_two_collections_read_one_table_of_a_store_in_this_process(flush: bool) -> None:
    """They are two clients of it: what one has pushed the other sees (at s = 0, at its next use), and no update is
    lost."""
    store, cache = LocalStore(), CacheConfig(rows=64, staleness=0)
    collections = [opened([table("t", ["x"])], SGD, cache, store) for _ in range(2)]
    train_together(collections, plain := PlainBags(collections[0], SGD, torch.float64), flush)
    for collection in collections:
        collection.close()
    reader = opened([table("t", ["x"])], SGD, cache, store)
    rows = stored_rows(reader, reader.embedding_bag_configs()[0]).double()
    torch.testing.assert_close(rows, plain.weights["t"].detach(), rtol=0, atol=5e-6)


def test_two_collections_of_other_tables_do_not_ask_the_store() -> None:
    store = LocalStore()
    collections = [opened([table(name, ["x"])], SGD, store=store) for name in ("t", "u")]
    for collection in collections:
        for _ in range(2):
            collection(batch(["x"], [[1]])).values().sum().backward()
            collection.step(0.1)
        assert not collection.stats().lags


class Model(nn.Module):
    def __init__(self, rows: HetEmbeddingBagCollection) -> None:
        super().__init__()
        self.rows, self.head = rows, nn.Linear(4, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.head(self.rows(features).values())


def test_an_averaged_model_shares_the_rows_and_averages_the_rest() -> None:
    model = Model(opened([table("t", ["x"])], SGD))
    averaged = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    heads = []
    features = batch(["x"], [[1], [2]])
    for _ in range(3):
        optimizer.zero_grad()
        (model(features) - 1).square().sum().backward()
        optimizer.step()
        model.rows.step(0.1)
        averaged.update_parameters(model)
        heads.append(model.head.weight.detach().clone())
    torch.testing.assert_close(averaged.module.head.weight, torch.stack(heads).mean(0))
    averaged.eval()
    assert model.rows.training, "the copy's mode is its own"
    model.rows.flush()
    model.eval()
    assert torch.equal(averaged.module.rows(features).values(), model.rows(features).values())
    another = copy.deepcopy(averaged.module.rows)
    another.close()
    assert model.rows.is_open, "closing a copy closes the copy"
    model.rows.close()
    assert not averaged.module.rows.is_open


def test_a_closed_collection_is_copied_pickled_and_moved() -> None:
    collection = HetEmbeddingBagCollection([table("t", ["x"])])
    written = io.BytesIO()
    torch.save(collection, written)
    written.seek(0)
    copies = [
        copy.deepcopy(collection),
        pickle.loads(pickle.dumps(collection)),
        torch.load(written, weights_only=False),
        collection.to(torch.float64).half(),
    ]
    for copied in copies:
        assert [config.name for config in copied.embedding_bag_configs()] == ["t"]
        copied.open(LocalStore(), CacheConfig(rows=32), SGD)
        assert copied(batch(["x"], [[1]])).values().dtype == torch.float32
        copied.close()


def test_an_open_collection_cannot_be_pickled() -> None:
    with pytest.raises(TypeError, match=r"cannot be sent elsewhere; close\(\) it first"):
        pickle.dumps(opened([table("t", ["x"])]))


class Slow(LocalStore):
    """Answers when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.go_on = threading.Event(), threading.Event()

    def exchange(self, request: ExchangeRequest) -> ExchangeReply:
        self.entered.set()
        assert self.go_on.wait(60)
        return super().exchange(request)


def test_a_collection_that_is_freed_in_the_middle_of_an_exchange() -> None:
    """It goes, its exchange ends, and updates that were lost are told of."""
    store = Slow()
    store.go_on.set()
    collection = opened([table("t", ["x"])], SGD, store=store)
    first, second = batch(["x"], [[1], [2]]), batch(["x"], [[3]])
    collection(first).values().sum().backward()
    collection.step(0.1)
    store.go_on.clear()
    store.entered.clear()
    collection.prefetch(second)
    assert store.entered.wait(60)
    stream = weakref.ref(collection.stream)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        del collection
        gc.collect()
    assert stream() is None
    assert [w.category for w in said] == [ResourceWarning]
    assert "updates since the last flush that the cache had not pushed" in str(said[0].message)
    store.go_on.set()
    other = opened([table("t", ["x"])], SGD, store=store)  # the store serves on
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other(first)
        other.close()
        del other
        gc.collect()


def test_illegal_moves_of_a_batch_are_assertions() -> None:
    features = batch(["x"], [[1]])
    for state in State:
        for wanted in State:
            moved = CachedBatch(features, [], [], state=state)
            if wanted in TRANSITIONS[state]:
                moved.enter(wanted)
                assert moved.state is wanted
            else:
                with pytest.raises(AssertionError, match=f"is {state.value} cannot become {wanted.value}"):
                    moved.enter(wanted)
