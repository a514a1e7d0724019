"""Which rows the policies keep: against a slow model of the rules, and what that is worth on a skewed stream."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import torch
from policy_reference import Reference

from cache_backend import EmbeddingOptimizer, LocalStore, TableSchema, ops
from cache_backend.cache import WINDOW, Cache, CachePlan, UniqueRows
from cache_backend.config import POLICIES

_TABLE, _PINS = 5, 6  # int32 columns of `meta`


def unique(keys: list[int]) -> UniqueRows:
    values = torch.tensor(keys, dtype=torch.int64)
    return UniqueRows(*ops.unique_rows(values, torch.tensor([0, len(keys)]), torch.zeros(1, dtype=torch.int32)))


def new_cache(policy: str, rows: int) -> Cache:
    store = LocalStore()
    store.open([TableSchema("t", 1, "sgd", 0, 0.0, 0.0, 0.0)])
    return Cache(rows, 1, EmbeddingOptimizer("sgd"), store, 100, policy)


def zipf(batches: int, keys: int, rows: int, moved_from: int | None = None) -> list[list[int]]:
    """Keys of each batch; from batch ``moved_from`` on, other rows are the popular ones."""
    mass = np.cumsum(np.arange(1.0, rows + 1) ** -1.05)
    row_of_rank = np.random.default_rng(1).permutation(rows)
    stream = []
    for t in range(batches):
        draws = np.random.default_rng([3, t]).random(keys) * mass[-1]
        batch = row_of_rank[np.searchsorted(mass, draws)]
        stream.append(((batch + (rows // 2 if moved_from is not None and t >= moved_from else 0)) % rows).tolist())
    return stream


class Run:
    """Batches through a cache, ``in_flight`` of them planned and not yet released, ``sight`` more revealed."""

    def __init__(self, policy: str, rows: int, stream: list[list[int]], in_flight: int, sight: int) -> None:
        self.cache = new_cache(policy, rows)
        self.batches = [unique(keys) for keys in stream]
        self.in_flight, self.sight = in_flight, sight
        self.plans: deque[CachePlan] = deque()
        self.revealed = 0

    def step(self, t: int) -> CachePlan:
        if self.cache.looks_ahead:
            for rows in self.batches[max(t, self.revealed) : t + 1 + self.sight]:
                self.cache.reveal(rows)
            self.revealed = t + 1 + self.sight
        plan = self.cache.plan(self.batches[t])
        self.plans.append(plan)
        return plan

    def release(self) -> CachePlan | None:
        if len(self.plans) <= self.in_flight:
            return None
        plan = self.plans.popleft()
        self.cache.release(plan)
        return plan


def misses(policy: str, rows: int, stream: list[list[int]], sight: int = 0) -> np.ndarray:
    """Of each batch, the share of its distinct rows."""
    run, share = Run(policy, rows, stream, 1, sight), []
    for t, batch in enumerate(run.batches):
        share.append(run.step(t).inserted / batch.keys.numel())
        run.release()
    return np.array(share)


CASES = [(policy, 0) for policy in POLICIES] + [("lookahead", sight) for sight in (1, 5, 40)]


@pytest.mark.parametrize(("policy", "sight"), CASES)
@pytest.mark.parametrize("in_flight", [0, 1, 3])
@pytest.mark.parametrize(("rows", "keys", "of"), [(32, 20, 90), (64, 60, 300), (256, 150, 2000), (32, 60, 70)])
def test_every_decision_is_the_rule(policy: str, sight: int, in_flight: int, rows: int, keys: int, of: int) -> None:
    """Also where pins fill sets, and where a batch ages all sets several times."""
    stream = zipf(80, keys, of, moved_from=40)
    run, model = Run(policy, rows, stream, in_flight, sight), Reference(policy, rows, stream, sight)
    for t in range(len(stream)):
        plan = run.step(t)
        wanted = model.plan(t, plan.rows.keys.tolist())
        assert plan.rows.keys[plan.fetch].tolist() == wanted
        meta = run.cache.meta.view(torch.int32)
        held = meta[: run.cache.capacity, _TABLE] >= 0
        assert set(run.cache.meta[: run.cache.capacity][held, 0].tolist()) == model.cached()
        assert plan.slots.unique().numel() == plan.slots.numel()
        assert torch.equal(run.cache.meta[plan.slots, 0], plan.rows.keys)
        if (done := run.release()) is not None:
            model.release(done.rows.keys.tolist())
    stats = run.cache.stats
    assert (stats.evicted, stats.bypassed, stats.overflow) == (model.evicted, model.bypassed, model.overflow)
    run.in_flight = 0
    while run.release() is not None:
        pass
    assert (run.cache.meta.view(torch.int32)[:, _PINS] & ~(1 << 30) == 0).all()  # frequent rows keep their own


def test_the_policies_order_on_a_skewed_stream_and_after_it_moved() -> None:
    """A tenth of the rows, as the benchmark has it, at a hundredth of its size."""
    half = 120
    old = slice(half - 30, half)
    late = slice(2 * half - 20, 2 * half)
    share = {
        (policy, sight): misses(policy, 1024, zipf(2 * half, 600, 10_000, moved_from=half), sight)
        for policy, sight in [*CASES[:5], ("lookahead", 16), ("lookahead", WINDOW - 1)]
    }
    before = {name: miss[old].mean() for name, miss in share.items()}
    after = {name: miss[late].mean() for name, miss in share.items()}
    lru, lfu, light, tiny, blind, short, far = before.values()
    assert lru > lfu > tiny > short > far
    assert light < 1.03 * lfu
    assert blind == tiny  # nothing known to come: lookahead is tiny_lfu
    assert after["lfu", 0] > before["lfu", 0] + 0.03  # never forgets
    for name in share:
        if name[0] not in ("lru", "lfu"):
            assert after[name] < before[name] + 0.01


def test_lookahead_keeps_what_is_used_next_whatever_was_frequent() -> None:
    cache = new_cache("lookahead", 32)
    frequent, soon = list(range(32)), list(range(100, 131))
    for _ in range(4):
        cache.release(cache.plan(unique(frequent)))
    current, following = unique([*soon, 500]), unique(soon)
    cache.reveal(current)
    cache.reveal(following)
    cache.release(cache.plan(current))
    assert cache.stats.bypassed == 1  # 500 does not come again
    assert cache.plan(following).inserted == 0


def test_batches_that_do_not_come_are_forgotten() -> None:
    """Rows that a lost view promised to be used soon are rows like any other."""
    cache = new_cache("lookahead", 32)
    frequent, rare, new = list(range(16)), list(range(16, 32)), list(range(100, 116))
    for keys in (frequent, frequent, frequent + rare):
        cache.release(cache.plan(unique(keys)))
    cache.reveal(unique(new))
    cache.reveal(unique(rare))
    cache.unreveal()
    cache.release(cache.plan(unique(new)))
    assert cache.plan(unique(frequent + new)).inserted == 0


def test_only_the_batch_that_was_revealed_can_be_planned() -> None:
    cache = new_cache("lookahead", 32)
    cache.reveal(unique([1]))
    with pytest.raises(ValueError, match="another batch was revealed to come next"):
        cache.plan(unique([1]))
    cache.unreveal()
    cache.plan(unique([1]))
    for _ in range(WINDOW):
        cache.reveal(unique([2]))
    with pytest.raises(ValueError, match="at most 64 coming batches can be revealed"):
        cache.reveal(unique([2]))


def test_the_window_grows_with_what_is_in_view() -> None:
    """Small first batches, then large ones: at most one row in 64 of a batch finds no room in it."""
    stream = zipf(10, 4, 100) + zipf(70, 500, 100_000)
    coming = misses("lookahead", 1024, stream, 60)[30:].mean()
    model, wanted, before = Reference("lookahead", 1024, stream, 60), [], list[int]()
    for t, batch in enumerate(stream):
        keys = unique(batch).keys.tolist()
        wanted.append(len(model.plan(t, keys)) / len(keys))
        model.release(before)
        before = keys
    assert coming == pytest.approx(np.mean(wanted[30:]), abs=0.01)
