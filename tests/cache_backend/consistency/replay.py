"""Schedules of the rules, carried out by the real cache, store and ops: every integer and every float must agree.

Rows begin at zero, the optimizer is SGD at learning rate 1, and rank r's gradient is -1 in column r: column r of a
value counts the updates of rank r, exactly. A cache has at least 32 slots, so fillers, pinned for good, leave as many
as the scope's capacity.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from rules import BESIDE, DIGIT, FREE, NEVER, SPILL, WAY, Action, Keys, Plan, Rank, Scope, State

from cache_backend import EmbeddingOptimizer, EmbeddingStore, RemoteStore, TableSchema, ops
from cache_backend.cache import WAYS, Cache, CachePlan, UniqueRows
from cache_backend.stats import CacheStats
from cache_backend.store import Check, ExchangeReply, ExchangeRequest, Fetch, Push

PENDING, TABLE, PINS, DUE = 4, 5, 6, 7  # int32 columns of a cache's `meta`
BATCHES = (1 << 30) - 1  # of `pins`; the bit above them is light_lfu's
COUNTED = ("steps", "lookups", "unique", "hits", "misses", "stale", "fetched", "pushed", "evicted")
FILLERS = 1 << 40  # keys of fillers begin here


def schema(scope: Scope, name: str = "t") -> TableSchema:
    return TableSchema(name, scope.ranks, "sgd", 0, 0.0, 0.0, 0.0)


def unique(table: int, keys: Sequence[int]) -> UniqueRows:
    tables = torch.full((len(keys),), table, dtype=torch.int32)
    return UniqueRows(*ops.unique_rows(torch.tensor(keys, dtype=torch.int64), torch.arange(len(keys) + 1), tables))


@dataclass
class Ahead:
    """A planned batch. ``answered``: its reply came, or was committed by a flush already (reply None)."""

    plan: CachePlan
    reply: ExchangeReply | None = None
    answered: bool = False


@dataclass
class NativeRank:
    """A rank's cache and batches; does what the schedule says and counts what its stats should say."""

    number: int
    cache: Cache
    store: EmbeddingStore
    table: int
    first_key: int  # key k of the rules is first_key + k here
    ahead: list[Ahead] = field(default_factory=list)
    begun: list[CachePlan] = field(default_factory=list)
    expected: CacheStats = field(default_factory=CacheStats)

    @staticmethod
    def new(number: int, scope: Scope, store: EmbeddingStore, table: int, first_key: int, policy: str) -> NativeRank:
        cache = Cache(WAYS, scope.ranks, EmbeddingOptimizer("sgd"), store, scope.staleness, policy)
        if scope.capacity < WAYS:
            fillers = unique(table, range(FILLERS, FILLERS + WAYS - scope.capacity))
            plan = cache.plan(fillers)
            cache.commit(plan, store.exchange(plan.request))
        cache.stats = CacheStats()
        return NativeRank(number, cache, store, table, first_key)

    def clone(self, store: EmbeddingStore) -> NativeRank:
        """A copy that shares nothing mutable, over another store."""
        cache = copy.copy(self.cache)
        for name in ("tags", "priority", "meta", "rows", "sketch"):
            setattr(cache, name, getattr(cache, name).clone())
        cache.stats = replace(cache.stats)
        cache._store = store
        # A store notes in a request what it has done about it.
        ahead = [Ahead(replace(a.plan, request=replace(a.plan.request)), a.reply, a.answered) for a in self.ahead]
        return replace(
            self, cache=cache, store=store, ahead=ahead, begun=list(self.begun), expected=replace(self.expected)
        )

    # Actions.

    def plan(self, keys: Keys) -> CachePlan:
        plan = self.cache.plan(unique(self.table, [self.first_key + k for k in keys]))
        self.ahead.append(Ahead(plan))
        return plan

    def answer(self) -> None:
        waiting = next(a for a in self.ahead if not a.answered)
        waiting.reply, waiting.answered = self.store.exchange(waiting.plan.request), True

    def lose(self) -> None:
        """The server answers, and nobody hears it: the request will be sent again under its number."""
        request = next(a for a in self.ahead if not a.answered).plan.request
        self.store.exchange(request)
        if isinstance(self.store, RemoteStore):
            request.prepared._reply = None
            for piece in (piece for pieces in request.prepared.of_shard for piece in pieces):
                piece.answered = False

    def begin(self) -> None:
        first = self.ahead.pop(0)
        if first.reply is not None:
            self.cache.commit(first.plan, first.reply)
        self.cache.settle(first.plan)
        self.begun.append(first.plan)

    def update(self) -> None:
        slots = torch.unique(torch.cat([plan.slots for plan in self.begun]))
        grads = torch.zeros(slots.numel(), self.cache.dim)
        grads[:, self.number] = -1.0
        self.cache.update_rows(slots, grads, lr=1.0)
        self.discard()

    def discard(self) -> None:
        for plan in self.begun:
            self.cache.release(plan)
        self.begun = []

    def flush(self) -> None:
        for a in self.ahead:
            if a.reply is not None:
                self.cache.commit(a.plan, a.reply)
                a.reply = None
        self.cache.flush()

    def act(self, action: Action) -> None:
        if action[0] == "plan":
            self.plan(action[2])
        else:
            getattr(self, action[0])()

    # What there is.

    def slots(self, scope: Scope) -> dict[int, int]:
        """Where the scope's keys lie."""
        keys, tables = self.cache.meta[:, 0].numpy(), self.cache.meta.view(torch.int32)[:, TABLE].numpy()
        near = (tables >= 0) & (keys >= self.first_key) & (keys < self.first_key + scope.keys)
        found = {int(keys[slot]) - self.first_key: int(slot) for slot in np.flatnonzero(near)}
        assert len(found) == np.count_nonzero(near), "a row lies in two slots"
        return found

    def check(self, scope: Scope, rank: Rank) -> None:
        slots = self.slots(scope)
        assert set(slots) == {k for k, row in enumerate(rank.rows) if row is not None}
        meta, counts = self.cache.meta, self.cache.meta.view(torch.int32)
        for k, slot in slots.items():
            row = rank.rows[k]
            assert row is not None
            found = (
                WAY if slot < self.cache.capacity else SPILL,
                int(meta[slot, 1]) if row.anchor != NEVER else 0,
                int(counts[slot, PENDING]),
                int(counts[slot, PINS]) & BATCHES,
                int(counts[slot, DUE]),
            )
            assert found == (row.place, row.start, row.pending, row.pins, row.due), (k, row)
            values, deltas = self.cache.rows[slot].tolist()
            assert deltas == columns(row.delta, scope)
            assert row.anchor == NEVER or values == columns(row.value, scope)
        for name in COUNTED:
            assert getattr(self.cache.stats, name) == getattr(self.expected, name), name
        # Which of the rows beside the slots were refused one is the policy's affair.
        assert self.cache.stats.overflow + self.cache.stats.bypassed == self.expected.overflow
        assert self.cache.stats.bypassed == 0 or self.cache.admits

    def check_plan(self, scope: Scope, places: tuple, plan: Plan) -> None:
        """The request that was cut, and the counters."""
        native = self.ahead[-1].plan
        request, keys = native.request, native.rows.keys - self.first_key
        missing = len(places)
        assert keys[native.fetch].tolist() == list(plan.fetch)
        assert native.inserted == missing
        assert keys[native.late].tolist() == list(plan.late)
        check, push = request.check, request.push
        asked = zip(
            (check.keys - self.first_key).tolist(), check.clocks.tolist(), check.staleness.tolist(), strict=True
        )
        assert list(asked) == [(k, clock, scope.staleness) for k, clock in plan.checks]
        pushed = zip(
            (push.keys - self.first_key).tolist(),
            push.starts.tolist(),
            push.clocks.tolist(),
            push.deltas.tolist(),
            strict=True,
        )
        # Spilled rows leave in the order of their places.
        assert sorted(pushed) == sorted((p.key, p.start, p.clock, columns(p.delta, scope)) for p in plan.push)
        e, n = self.expected, len(plan.keys)
        e.steps += 1
        e.lookups += n
        e.unique += n
        e.misses += missing
        e.stale += len(plan.fetch) - missing + len(plan.late)
        e.hits += n - len(plan.fetch) - len(plan.late)
        e.fetched += len(plan.fetch)
        e.pushed += len(plan.push)
        e.evicted += sum(isinstance(place, int) for place in places)
        e.overflow += places.count(BESIDE)

    def expect(self, name: str, before: Rank) -> None:
        """Count what an action other than a plan adds."""
        e = self.expected
        committed = {"begin": before.ahead[:1], "flush": before.ahead}.get(name, ())
        rows = list(before.rows)
        for plan in committed:
            stale = len(plan.reply or ()) - len(plan.fetch) if plan.reply else 0
            e.stale += stale
            e.hits -= stale
        refreshed = {"begin": before.ahead[0].late if before.ahead else (), "flush": None}.get(name, ())
        if refreshed is None:
            refreshed = tuple(k for k, row in enumerate(rows) if row is not None and row.pending)
        e.fetched += len(refreshed)
        e.pushed += sum(1 for k in refreshed if (row := rows[k]) is not None and row.pending)


def columns(value: int, scope: Scope) -> list[float]:
    return [float(value >> DIGIT * r & (1 << DIGIT) - 1) for r in range(scope.ranks)]


def stored(store: EmbeddingStore, scope: Scope, table: int, first_key: int) -> list[tuple[int, list[float]]]:
    """Clock and value of every key, as the store would send them."""
    keys = np.arange(first_key, first_key + scope.keys)
    fetch = Fetch(np.full(scope.keys, table, np.int32), keys)
    reply = store.exchange(ExchangeRequest(scope.ranks, 0, Push.nothing(scope.ranks), Check(), fetch))
    return [
        (0, [0.0] * scope.ranks) if fresh else (clock, row)
        for clock, row, fresh in zip(reply.clocks.tolist(), reply.rows.tolist(), reply.fresh.tolist(), strict=True)
    ]


def put(store: EmbeddingStore, scope: Scope, table: int, state: State) -> None:
    """Bring an empty store to the server's state."""
    written = [(k, clock, value) for k, (clock, value) in enumerate(state.server) if clock]
    if not written:
        return
    keys, clocks, values = zip(*written, strict=True)
    push = Push(
        np.full(len(keys), table, np.int32),
        np.array(keys),
        np.zeros(len(keys), np.int64),
        np.array(clocks),
        np.array([columns(value, scope) for value in values], np.float32),
    )
    nothing = Fetch(np.empty(0, np.int32), np.empty(0, np.int64))
    store.exchange(ExchangeRequest(scope.ranks, 0, push, Check(), nothing))


def places_taken(native: NativeRank, scope: Scope, before: dict[int, int], rank: Rank, keys: Keys) -> tuple:
    """Where the real cache put the newcomers, in the words of the rules."""
    after = native.slots(scope)
    owner = {
        slot: k
        for k, slot in before.items()
        if (row := rank.rows[k]) is not None and not (row.place == SPILL and row.pins == 0)
    }
    places: list[int | str] = []
    for k in keys:
        if k in owner.values():
            continue
        slot = after[k]
        places.append(BESIDE if slot >= native.cache.capacity else owner.get(slot, FREE))
    return tuple(places)


def compare(
    natives: Sequence[NativeRank],
    scope: Scope,
    state: State,
    action: Action,
    after: State,
    look: Callable[[], list[tuple[int, list[float]]]],
) -> None:
    """Both sides have carried out ``action``: they agree in everything that it may have changed."""
    name, r = action[0], action[1]
    native, before, rank = natives[r], state.ranks[r], after.ranks[r]
    if name == "plan":
        native.check_plan(scope, action[3], rank.ahead[-1])
    else:
        native.expect(name, before)
    native.check(scope, rank)
    if name in ("answer", "lose", "begin", "flush"):
        assert look() == [(clock, columns(value, scope)) for clock, value in after.server]
