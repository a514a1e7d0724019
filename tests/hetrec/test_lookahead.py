"""The lookahead loader against plain lists of batches."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hetrec.data import Batch
from hetrec.lookahead import LookaheadLoader


def batches(count: int) -> list[Batch]:
    """Batch i holds the key i."""

    def one(i: int) -> Batch:
        features = KeyedJaggedTensor(["x"], torch.tensor([i]), lengths=torch.tensor([1], dtype=torch.int32))
        return Batch(torch.zeros(1, 0), features, torch.zeros(1))

    return [one(i) for i in range(count)]


def keys(loader: Any) -> list[int]:
    return [int(b.sparse_features.values()) for b in loader]


class Stateful:
    """A loader with a position, as the data modules' own: an epoch is 10 numbers from 10 * epoch on."""

    def __init__(self) -> None:
        self.epoch = self.position = 0
        self.iterations = 0

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[Batch]:
        self.iterations += 1
        made = batches(10 * self.epoch + 10)[10 * self.epoch :]
        for batch in made[self.position :]:
            self.position += 1
            yield batch
        self.epoch, self.position = self.epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "batches": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["batches"]


def threads() -> int:
    return sum(t.name == "hetrec-lookahead" for t in threading.enumerate())


@pytest.mark.parametrize("depth", [0, 1, 3, 20])
@pytest.mark.parametrize("count", [0, 1, 2, 10])
def test_upcoming_are_the_very_objects_of_the_next_batches(depth: int, count: int) -> None:
    loader = LookaheadLoader(batches(count), depth)
    assert len(loader) == count
    for _ in range(2):
        read = list(loader)
        assert keys(read) == list(range(count))
        for i, batch in enumerate(read):
            coming = [b.sparse_features for b in read[i + 1 : i + 1 + depth]]
            assert len(batch.upcoming) == len(coming)
            assert all(a is b for a, b in zip(batch.upcoming, coming, strict=True))


def test_the_wrapped_loader_s_own_batches_are_left_alone() -> None:
    own = batches(3)
    list(LookaheadLoader(own, 1))
    assert [b.upcoming for b in own] == [(), (), ()]


def test_reading_ahead_is_bounded() -> None:
    read = []

    def source() -> Iterator[Batch]:
        for batch in batches(50):
            read.append(batch)
            yield batch

    iterator = iter(LookaheadLoader(source(), depth=2))
    next(iterator)
    time.sleep(0.3)
    assert len(read) <= 1 + 2 + 2 + 1  # handed out, its upcoming ones, the queue, the one that waits to enter it


def test_reading_goes_on_while_the_consumer_works() -> None:
    begun = threading.Event()

    def source() -> Iterator[Batch]:
        first, second, third = batches(3)
        yield first
        yield second
        begun.set()
        yield third

    iterator = iter(LookaheadLoader(source(), depth=1))
    next(iterator)
    assert begun.wait(5)


def test_an_error_surfaces_in_next_behind_the_batches_before_it() -> None:
    def source() -> Iterator[Batch]:
        yield from batches(3)
        raise OSError("disk on fire")

    iterator = iter(LookaheadLoader(source(), depth=2))
    assert [int(next(iterator).sparse_features.values()) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="disk on fire"):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)


def test_an_error_in_making_the_iterator_surfaces_too() -> None:
    class Broken:
        def __iter__(self) -> Iterator[Batch]:
            raise OSError("no such device")

    with pytest.raises(OSError, match="no such device"):
        next(iter(LookaheadLoader(Broken(), 1)))


@pytest.mark.parametrize("taken", [0, 1, 4, 9, 10])
def test_the_position_counts_batches_handed_out_not_read(taken: int) -> None:
    loader = LookaheadLoader(Stateful(), depth=3)
    iterator = iter(loader)
    assert [int(next(iterator).sparse_features.values()) for _ in range(taken)] == list(range(taken))
    state = loader.state_dict()
    assert state == {"epoch": 0, "batches": taken}

    resumed = LookaheadLoader(Stateful(), depth=3)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    resumed.set_epoch(0)
    assert keys(resumed) == list(range(taken, 10))
    resumed.set_epoch(1)
    assert keys(resumed) == list(range(10, 20))


def test_a_loader_without_a_position_is_read_up_to_it() -> None:
    loader = LookaheadLoader(batches(10), depth=1)
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = loader.state_dict()
    assert state == {"batches": 2}
    iterator.close()
    resumed = LookaheadLoader(batches(10), depth=1)
    resumed.load_state_dict(state)
    assert keys(resumed) == list(range(2, 10))
    assert keys(resumed) == list(range(10))


def test_epochs_iterate_the_same_loader_again() -> None:
    source = Stateful()
    loader = LookaheadLoader(source, depth=1)
    for epoch in range(3):
        loader.set_epoch(epoch)
        assert keys(loader) == list(range(10 * epoch, 10 * epoch + 10))
    assert source.iterations == 3
    assert threads() == 0


def test_an_iterator_that_was_made_before_its_epoch_was_set_reads_that_epoch() -> None:
    loader = LookaheadLoader(Stateful(), depth=1)
    iterator = iter(loader)
    loader.sampler.set_epoch(2)
    assert keys(iterator) == list(range(20, 30))


def test_an_old_iterator_is_refused() -> None:
    loader = LookaheadLoader(batches(10), depth=1)
    old = iter(loader)
    next(old)
    new = iter(loader)
    assert int(next(new).sparse_features.values()) == 0
    with pytest.raises(RuntimeError, match="out of date"):
        next(old)
    assert keys(new) == list(range(1, 10))


def test_leaving_early_ends_the_thread() -> None:
    loader = LookaheadLoader(batches(100), depth=2)
    for batch in loader:
        if int(batch.sparse_features.values()) == 3:
            break
    gc.collect()
    assert threads() == 0
    iterator = iter(loader)
    next(iterator)
    assert threads() == 1
    loader.close()
    loader.close()
    assert threads() == 0
    with pytest.raises(RuntimeError, match="out of date"):
        next(iterator)
    assert keys(loader) == list(range(100))


def test_closing_does_not_wait_for_ever_for_a_loader_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetrec.lookahead._CLOSE_S", 0.2)
    release = threading.Event()

    def source() -> Iterator[Batch]:
        yield from batches(2)
        release.wait(60)

    loader = LookaheadLoader(source(), depth=1)
    iterator = iter(loader)
    next(iterator)
    began = time.monotonic()
    loader.close()
    assert time.monotonic() - began < 10
    release.set()


def test_a_negative_depth_is_refused() -> None:
    with pytest.raises(ValueError, match="depth is -1"):
        LookaheadLoader([], -1)
