"""The cache that ships against the rules: the same schedules, the same clocks, counters, requests and values."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, permutations

import pytest
from replay import NativeRank, compare, places_taken, put, schema, stored
from rules import TWO_KEYS, Rules, Scope
from search import as_text, at_the_end

from cache_backend import EmbeddingStore, LocalStore, RemoteStore
from cache_backend.config import POLICIES

LARGE_SCOPE = os.environ.get("HETREC_LARGE_SCOPE") == "1"  # minutes
WALKS, SERVED_WALKS = (2000, 100) if LARGE_SCOPE else (100, 12)
_walks = count()

SMALL = [
    *(Scope(staleness=s, depth=d, batches=3) for s, d in ((0, 1), (1, 1), (2, 2))),
    *(Scope(staleness=s, depth=d, batches=3, clock="sum") for s, d in ((0, 2), (1, 1), (2, 1))),
    Scope(keys=2, choices=TWO_KEYS, batches=2, ranks=1, depth=2, flushes=1, discards=1),
    Scope(keys=2, choices=TWO_KEYS, batches=1, depth=1, staleness=0),
    Scope(keys=2, choices=TWO_KEYS, batches=3, ranks=1, depth=1, staleness=0, window=2),
    Scope(staleness=0, batches=2, discards=1, flushes=1),
    Scope(batches=2, losses=1),
]
if LARGE_SCOPE:
    SMALL += [Scope(staleness=s, depth=2, batches=3, clock=c) for s in (0, 1, 2) for c in ("lamport", "sum")]
    SMALL += [Scope(keys=2, choices=TWO_KEYS, batches=2, staleness=s) for s in (0, 1)]


@pytest.mark.parametrize("scope", SMALL, ids=str)
def test_every_transition_of_a_small_scope(scope: Scope, monkeypatch: pytest.MonkeyPatch) -> None:
    """From every reachable state, every action, with the real cache brought to that state by a schedule that leads
    there."""
    monkeypatch.setattr("cache_backend.cache._INITIAL_SPILL", 4)
    rules = Rules(scope)

    def new_store() -> tuple[EmbeddingStore, int]:
        store = LocalStore(clock=scope.clock, exclusive=False)
        return store, store.open([schema(scope)])[0]

    store, table = new_store()
    first = rules.initial()
    ranks = tuple(NativeRank.new(r, scope, store, table, 0, "lru") for r in range(scope.ranks))
    level, seen, transitions = [(first, ranks)], {first}, 0
    while level:
        following = []
        for state, natives in level:
            for action in rules.actions(state):
                store, table = new_store()
                put(store, scope, table, state)
                moved = list(natives)
                moved[action[1]] = natives[action[1]].clone(store)
                moved[action[1]].act(action)
                after = rules.apply(state, action)
                compare(moved, scope, state, action, after, partial(stored, store, scope, table, 0))
                transitions += 1
                if after not in seen:
                    seen.add(after)
                    following.append((after, tuple(moved)))
        level = following
    print(f"{len(seen)} states, {transitions} transitions")


def walk(scope: Scope, policy: str, stores: Sequence[EmbeddingStore], table: int, first_key: int, seed: int) -> None:
    """A random schedule, to its end; where rows leave, the rules follow the cache, whose choice they must allow."""
    rules = Rules(scope)
    chance = random.Random(seed)
    natives = [NativeRank.new(r, scope, store, table, first_key, policy) for r, store in enumerate(stores)]
    state, done = rules.initial(), []
    while actions := list(rules.actions(state)):
        name = chance.choice(sorted({action[0] for action in actions}))
        action = chance.choice([action for action in actions if action[0] == name])
        native, rank = natives[action[1]], state.ranks[action[1]]
        before = native.slots(scope)
        native.act(action)
        if name == "plan":
            action = (*action[:3], places_taken(native, scope, before, rank, action[2]))
        done.append(action)
        assert action in actions, f"{scope}, {policy}: not allowed, but {actions}:\n{as_text(done)}"
        try:
            after = rules.apply(state, action)
            compare(natives, scope, state, action, after, partial(stored, stores[0], scope, table, first_key))
        except AssertionError as error:
            raise AssertionError(f"{scope}, {policy}:\n{as_text(done)}") from error
        state = after
    assert at_the_end(state) is None


def random_scope(chance: random.Random, clock: str) -> Scope:
    keys = chance.randint(1, 3)
    batches = [batch for n in range(1, keys + 1) for batch in permutations(range(keys), n)]
    return Scope(
        ranks=chance.randint(2, 3),
        keys=keys,
        capacity=chance.randint(1, 3),
        staleness=chance.randint(0, 3),
        depth=chance.randint(0, 3),
        batches=chance.randint(3, 12),
        choices=tuple(chance.sample(batches, chance.randint(1, len(batches)))),
        clock=clock,
        window=chance.randint(1, 2),
        flushes=2,
        discards=2,
        losses=2,
        admission=True,
    )


@pytest.mark.parametrize("clock", ["lamport", "sum"])
@pytest.mark.parametrize("policy", POLICIES)
def test_random_schedules(policy: str, clock: str) -> None:
    for seed in range(WALKS):
        scope = random_scope(random.Random(seed), clock)
        store = LocalStore(clock=clock, exclusive=False)
        table = store.open([schema(scope)])[0]
        walk(scope, policy, [store] * scope.ranks, table, 0, seed)


@pytest.mark.parametrize("clock", ["lamport", "sum"])
@pytest.mark.parametrize("shards", [1, 3])
def test_random_schedules_over_servers(shard_addresses: Callable, shards: int, clock: str) -> None:
    """Each rank is a client of its own; replies are lost, and the request is repeated."""
    for seed in range(SERVED_WALKS):
        scope = random_scope(random.Random(seed), clock)
        stores = [RemoteStore(list(shard_addresses(shards, clock))) for _ in range(scope.ranks)]
        name = f"{os.getpid()}-walk-{next(_walks)}"
        tables = {store.open([schema(scope, name)])[0] for store in stores}
        (table,) = tables
        walk(scope, "lru", stores, table, 0, seed)
        for store in stores:
            store.close()
