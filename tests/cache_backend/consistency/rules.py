"""HET's rules as a small transition system, apart from the code that ships: what ranks and server do, step by step.

A rank works through a few batches of keys. Its actions are those of ``Cache`` and of the collection above it:

* ``plan``: the batch's rows are looked up and pinned; pushes, checks and fetches leave in one request (the cut);
* ``answer``: the server applies the pushes and answers checks and fetches, in one instant. ``lose``: the same, but the
  reply is lost, and the request will be repeated;
* ``begin``: the reply is committed, late rows are refreshed, the batch is read;
* ``update``: one update of every row read since the last one; ``discard``: none after all; ``flush``.

Which row leaves a full cache, and whether a newcomer gets a slot at all, is left open: what holds here holds for every
policy. Values are counted, not computed: digit r of a value says how many updates of rank r it contains.

States are plain tuples. ``Rules`` has one method for each rule, so that a test can break one and leave the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

WAY, SPILL = 0, 1  # where a row lies: in a slot, or beside the slots for as long as it is used
FREE = "free"  # where a newcomer goes: an empty slot, beside the slots, or (a key) the slot of the row that leaves
BESIDE = "beside"
DIGIT = 6  # bits
NEVER = 1 << 40  # the anchor of a row whose first answer is still to come

Key = int
Keys = tuple[Key, ...]
Action = tuple  # (name, rank, ...)
TWO_KEYS: tuple[Keys, ...] = ((0,), (1,), (0, 1))  # every batch of two keys, in one order


class Violation(AssertionError):
    """A state that must not be reachable."""


@dataclass(frozen=True)
class Scope:
    """How much is explored: so many ranks, keys, batches a rank; ``depth`` batches are planned ahead.

    ``choices``: what a batch may hold. ``window``: batches that may be read before one update (gradient accumulation).
    ``flushes``, ``discards``, ``losses``: how often a rank may do that. ``admission``: a newcomer may get no slot.
    """

    ranks: int = 2
    keys: int = 1
    capacity: int = 1
    staleness: int = 1
    depth: int = 1
    batches: int = 3
    choices: tuple[Keys, ...] = ((0,),)
    clock: Literal["lamport", "sum"] = "lamport"
    window: int = 1
    flushes: int = 0
    discards: int = 0
    losses: int = 0
    admission: bool = False

    def __str__(self) -> str:
        """What differs from the defaults."""
        return ", ".join(f"{f.name}={v}" for f in fields(self) if (v := getattr(self, f.name)) != f.default)


class Row(NamedTuple):
    """A cached row. ``anchor``: the server's clock at the answer that the row rests on; no rule looks at it."""

    place: int
    start: int
    pending: int
    pins: int
    due: int
    value: int
    delta: int
    anchor: int

    @property
    def clock(self) -> int:
        return self.start + self.pending


class Push(NamedTuple):
    key: Key
    start: int
    clock: int
    delta: int


class Plan(NamedTuple):
    """A batch between its plan and its begin. ``reply``: (key, clock, value) of every row that came back; None before,
    empty once it is committed. ``applied``: the server has applied the pushes, but the reply was lost. ``heard``: keys
    about which the server has spoken since the plan; no rule looks at it."""

    keys: Keys
    push: tuple[Push, ...]
    checks: tuple[tuple[Key, int], ...]
    fetch: Keys
    late: Keys
    applied: bool
    reply: tuple[tuple[Key, int, int], ...] | None
    due: Keys  # of checks and fetch, whose answers the commit brings
    heard: frozenset[Key]


class Rank(NamedTuple):
    """``made``: updates so far, by key; no rule looks at it."""

    rows: tuple[Row | None, ...]
    ahead: tuple[Plan, ...]
    begun: tuple[Keys, ...]
    planned: int
    made: tuple[int, ...]
    flushes: int
    discards: int
    losses: int


class State(NamedTuple):
    server: tuple[tuple[int, int], ...]  # (clock, value) of every key
    ranks: tuple[Rank, ...]


class Rules:
    """The transition system of a scope. ``actions`` lists what may happen next, ``apply`` does it and checks."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.s = scope.staleness

    def initial(self) -> State:
        s = self.scope
        rank = Rank((None,) * s.keys, (), (), 0, (0,) * s.keys, s.flushes, s.discards, s.losses)
        return State(((0, 0),) * s.keys, (rank,) * s.ranks)

    # The rules, one each.

    def write_is_fresh(self, row: Row) -> bool:
        """First half of Valid(k). A pin is an update to come."""
        return row.pending + row.pins <= self.s

    def refresh_is_enough(self, row: Row) -> bool:
        """A refresh now takes away what is pending; the updates to come must fit by themselves."""
        return row.pins <= self.s

    def may_ask(self, row: Row) -> bool:
        """Two requests under way must not ask about the same row."""
        return row.due == 0

    def read_is_fresh(self, server_clock: int, clock: int) -> bool:
        """Second half of Valid(k)."""
        return server_clock <= clock + self.s

    def merge(self, server_clock: int, push: Push) -> int:
        if self.scope.clock == "sum":
            return server_clock + push.clock - push.start
        return max(server_clock, push.clock)

    def cut(self, row: Row) -> Row:
        """What a push carries is no longer pending."""
        return row._replace(start=row.clock, pending=0, delta=0)

    def rebase(self, row: Row, clock: int, value: int, pushed: int) -> Row:
        """What is still pending stays on top of the row that came back. ``pushed``: the delta the request carried."""
        return row._replace(start=clock, value=value + row.delta, anchor=clock)

    def may_leave(self, row: Row) -> bool:
        return row.place == WAY and row.pins == 0

    def is_applied_again(self, plan: Plan) -> bool:
        """Whether the server applies the pushes of a repeated request."""
        return False

    def late_rows_to_fetch(self, rows: list[Row | None], late: Keys) -> Keys:
        return late

    def next_to_answer(self, rank: Rank) -> int | None:
        """Requests are answered in the order in which they were cut."""
        return next((i for i, plan in enumerate(rank.ahead) if plan.reply is None), None)

    # What may happen.

    def actions(self, state: State) -> Iterator[Action]:
        for r, rank in enumerate(state.ranks):
            yield from self._actions_of(r, rank)

    def _actions_of(self, r: int, rank: Rank) -> Iterator[Action]:
        scope = self.scope
        has_room = len(rank.begun) < scope.window
        if rank.planned < scope.batches and len(rank.ahead) < (max(scope.depth, 1) if has_room else scope.depth):
            for keys in scope.choices:
                for places in self._places(rank, keys):
                    yield ("plan", r, keys, places)
        if self.next_to_answer(rank) is not None:
            yield ("answer", r)
            if rank.losses:
                yield ("lose", r)
        if rank.ahead and rank.ahead[0].reply is not None and has_room:
            yield ("begin", r)
        if rank.begun:
            yield ("update", r)
            if rank.discards:
                yield ("discard", r)
        if all(plan.reply is not None for plan in rank.ahead) and any(row and row.pending for row in rank.rows):
            at_the_end = rank.planned == scope.batches and not rank.ahead and not rank.begun
            if at_the_end or rank.flushes:
                yield ("flush", r)

    def _places(self, rank: Rank, keys: Keys) -> list[tuple[Key | str, ...]]:
        """Every way to place the batch's newcomers, in the order of its keys."""
        rows = {
            k: row for k, row in enumerate(rank.rows) if row is not None and not (row.place == SPILL and not row.pins)
        }
        found: list[tuple[Key | str, ...]] = [()]
        for _ in [k for k in keys if k not in rows]:
            longer: list[tuple[Key | str, ...]] = []
            for places in found:
                used = sum(row.place == WAY for row in rows.values()) + places.count(FREE)
                if used < self.scope.capacity:
                    longer.append((*places, FREE))
                    continue
                leaving = [k for k, row in rows.items() if self.may_leave(row) and k not in keys and k not in places]
                longer += [(*places, k) for k in leaving]
                if not leaving or self.scope.admission:
                    longer.append((*places, BESIDE))
            found = longer
        return found

    # What happens.

    def apply(self, state: State, action: Action) -> State:
        """The state after ``action``.

        Raises:
            Violation: something that must hold in every state does not hold in this one.
        """
        name, r = action[0], action[1]
        rank, server = state.ranks[r], list(state.server)
        if name == "plan":
            rank = self._plan(rank, action[2], action[3])
        elif name in ("answer", "lose"):
            rank = self._answer(state, r, server, lost=name == "lose")
        elif name == "begin":
            rank = self._begin(state, r, server)
        elif name == "update":
            rank = self._update(r, rank)
        elif name == "discard":
            rank = self._unpin(rank)._replace(discards=rank.discards - 1)
        else:
            rank = self._flush(state, r, server)
        after = State(tuple(server), (*state.ranks[:r], rank, *state.ranks[r + 1 :]))
        self._check_values(after, r)
        return after

    def _plan(self, rank: Rank, keys: Keys, places: tuple[Key | str, ...]) -> Rank:
        rows = list(rank.rows)
        push: list[Push] = []

        def cut(k: Key) -> None:
            row = rows[k]
            assert row is not None
            if row.pending:
                push.append(Push(k, row.start, row.clock, row.delta))
                rows[k] = self.cut(row)

        for k, row in enumerate(rows):
            if row is not None and row.place == SPILL and not row.pins:
                cut(k)
                rows[k] = None
        refresh: list[Key] = []
        late: list[Key] = []
        checks: list[tuple[Key, int]] = []
        missing: list[Key] = []
        for k in keys:
            row = rows[k]
            if row is None:
                missing.append(k)
                continue
            asked = True
            if not self.write_is_fresh(row):
                (refresh if self.refresh_is_enough(row) and self.may_ask(row) else late).append(k)
            elif self.may_ask(row):
                checks.append((k, row.clock))
            else:
                asked = False
            rows[k] = row._replace(pins=row.pins + 1, due=row.due + asked)
        for place in places:
            if isinstance(place, int):
                cut(place)
                rows[place] = None
        for k, place in zip(missing, places, strict=True):
            rows[k] = Row(SPILL if place == BESIDE else WAY, 0, 0, 1, 1, 0, 0, NEVER)
        for k in refresh:
            cut(k)
        fetch = (*missing, *refresh)
        due = (*fetch, *(k for k, _ in checks))
        # A row that nobody asks about for this batch shares the answer that is due, which may have been given already.
        shares = set(keys) - set(due) - set(late)
        heard = frozenset(k for p in rank.ahead if p.reply is not None for k in p.due if k in shares)
        plan = Plan(keys, tuple(push), tuple(checks), fetch, tuple(late), False, None, due, heard)
        return rank._replace(rows=tuple(rows), ahead=(*rank.ahead, plan), planned=rank.planned + 1)

    def _answer(self, state: State, r: int, server: list[tuple[int, int]], lost: bool) -> Rank:
        rank = state.ranks[r]
        which = self.next_to_answer(rank)
        assert which is not None
        plan = rank.ahead[which]
        if not plan.applied or self.is_applied_again(plan):
            self._apply_push(server, plan.push)
        if lost:
            plan = plan._replace(applied=True)
            ahead = (*rank.ahead[:which], plan, *rank.ahead[which + 1 :])
            return rank._replace(ahead=ahead, losses=rank.losses - 1)
        stale = [k for k, clock in plan.checks if not self.read_is_fresh(server[k][0], clock)]
        reply = tuple((k, *server[k]) for k in (*plan.fetch, *stale))
        answered = plan._replace(reply=reply)
        rank = rank._replace(ahead=(*rank.ahead[:which], answered, *rank.ahead[which + 1 :]))
        for k, _ in plan.checks:
            row = rank.rows[k]
            assert row is not None
            if k not in stale and server[k][0] > row.clock + self.s:
                raise Violation(
                    f"rank {r} holds on to key {k} at clock {row.clock}, and the server's is {server[k][0]}"
                )
        return self._heard(state, r, rank, server, plan.due)

    def _begin(self, state: State, r: int, server: list[tuple[int, int]]) -> Rank:
        rank = state.ranks[r]
        plan, *others = rank.ahead
        rows = list(rank.rows)
        self._commit(r, rows, plan)
        rank = rank._replace(rows=tuple(rows), ahead=(plan._replace(reply=()), *others))
        if plan.late:
            rank = self._refresh(state, r, rank, server, self.late_rows_to_fetch(rows, plan.late), settled=True)
            plan, *others = rank.ahead
            rows = list(rank.rows)
            for k in plan.late:
                row = rows[k]
                assert row is not None
                rows[k] = row._replace(due=row.due - 1)
        for k in plan.keys:
            row = rows[k]
            if row is None or row.anchor == NEVER:
                raise Violation(f"rank {r} reads key {k}, and the row is not there")
            if k not in plan.heard:
                raise Violation(f"rank {r} reads key {k} without a word of the server since its plan")
            if row.clock - row.anchor > self.s:
                raise Violation(f"rank {r} reads key {k} with {row.clock - row.anchor} updates held back")
        return rank._replace(rows=tuple(rows), ahead=tuple(others), begun=(*rank.begun, plan.keys))

    def _update(self, r: int, rank: Rank) -> Rank:
        rows, made = list(rank.rows), list(rank.made)
        for k in {k for keys in rank.begun for k in keys}:
            row = rows[k]
            if row is None:
                raise Violation(f"rank {r} updates key {k}, and the row is not there")
            unit = 1 << DIGIT * r
            rows[k] = row._replace(pending=row.pending + 1, value=row.value + unit, delta=row.delta + unit)
            made[k] += 1
        return self._unpin(rank._replace(rows=tuple(rows), made=tuple(made)))

    def _unpin(self, rank: Rank) -> Rank:
        rows = list(rank.rows)
        for k, pins in Counter(k for keys in rank.begun for k in keys).items():
            row = rows[k]
            if row is not None:
                rows[k] = row._replace(pins=row.pins - pins)
        return rank._replace(rows=tuple(rows), begun=())

    def _flush(self, state: State, r: int, server: list[tuple[int, int]]) -> Rank:
        rank = state.ranks[r]
        rows = list(rank.rows)
        for plan in rank.ahead:
            self._commit(r, rows, plan)
        done = tuple(plan._replace(reply=(), due=()) for plan in rank.ahead)
        rank = rank._replace(rows=tuple(rows), ahead=done, flushes=max(rank.flushes - 1, 0))
        return self._refresh(state, r, rank, server, tuple(k for k, row in enumerate(rows) if row and row.pending))

    def _commit(self, r: int, rows: list[Row | None], plan: Plan) -> None:
        assert plan.reply is not None
        pushed = {push.key: push.delta for push in plan.push}
        for k, clock, value in plan.reply:
            row = rows[k]
            if row is not None:
                rows[k] = self._rebased(r, row, clock, value, pushed.get(k, 0))
        for k in plan.due:
            row = rows[k]
            if row is not None:
                rows[k] = row._replace(due=row.due - 1)

    def _refresh(
        self, state: State, r: int, rank: Rank, server: list[tuple[int, int]], keys: Keys, settled: bool = False
    ) -> Rank:
        """Cut, answer and commit at once: nobody of this rank comes in between, and others see the answer only."""
        rows, push = list(rank.rows), []
        for k in keys:
            row = rows[k]
            assert row is not None
            if row.pending:
                push.append(Push(k, row.start, row.clock, row.delta))
                rows[k] = self.cut(row)
        self._apply_push(server, tuple(push))
        pushed = {p.key: p.delta for p in push}
        for k in keys:
            row = rows[k]
            assert row is not None
            rows[k] = self._rebased(r, row, *server[k], pushed.get(k, 0))
        return self._heard(state, r, rank._replace(rows=tuple(rows)), server, keys, settled)

    def _rebased(self, r: int, row: Row, clock: int, value: int, pushed: int) -> Row:
        after = self.rebase(row, clock, value, pushed)
        own = ((1 << DIGIT) - 1) << DIGIT * r  # its own updates may be pending as well: see _check_values
        if after.value & ~own != value & ~own:
            raise Violation(f"rank {r} sees updates {digits(after.value)} where the server answered {digits(value)}")
        return after

    def _apply_push(self, server: list[tuple[int, int]], pushes: tuple[Push, ...]) -> None:
        for push in pushes:
            clock, value = server[push.key]
            server[push.key] = self.merge(clock, push), value + push.delta

    # What must hold.

    def _check_values(self, state: State, r: int) -> None:
        """Every update is in exactly one place, and a rank reads its own."""
        n = range(len(state.ranks))
        for k in range(self.scope.keys):
            total = state.server[k][1]
            for rank in state.ranks:
                row = rank.rows[k]
                total += row.delta if row is not None else 0
                for plan in rank.ahead:
                    if plan.reply is None and not plan.applied:
                        total += sum(push.delta for push in plan.push if push.key == k)
            made = sum(state.ranks[i].made[k] << DIGIT * i for i in n)
            if total != made:
                raise Violation(f"key {k}: updates {digits(made)} were made, {digits(total)} exist")
            row = state.ranks[r].rows[k]
            if row is None or row.anchor == NEVER:
                continue
            for i in n:
                seen, updates = row.value >> DIGIT * i & (1 << DIGIT) - 1, state.ranks[i].made[k]
                if seen > updates or (i == r and seen < updates):
                    raise Violation(f"rank {r} sees {seen} of the {updates} updates of key {k} by rank {i}")
        if sum(row is not None and row.place == WAY for row in state.ranks[r].rows) > self.scope.capacity:
            raise Violation(f"rank {r} keeps more than {self.scope.capacity} rows")

    def _heard(
        self, state: State, r: int, rank: Rank, server: list[tuple[int, int]], keys: Keys, settled: bool = False
    ) -> Rank:
        """The server has just answered rank r about ``keys``: HET's Lemma 1 must hold at this instant."""
        # A late row waits for the answer that its own batch asks for when it begins.
        ahead = [
            plan._replace(heard=plan.heard | {k for k in keys if k in plan.keys and (k not in plan.late or settles)})
            for plan, settles in zip(rank.ahead, (settled, *(False for _ in rank.ahead)), strict=False)
        ]
        rank = rank._replace(ahead=tuple(ahead))
        for k in keys:
            replicas = []
            for i, other in enumerate(state.ranks):
                clocks = self._valid_clocks(rank if i == r else other, k, server[k][0], begins=i == r and settled)
                if clocks is not None:
                    replicas.append((i, *clocks))
            for i, _, most in replicas:
                for j, least, _ in replicas:
                    if i != j and most - least > 2 * self.s:
                        raise Violation(
                            f"key {k}: the clock of rank {i} may reach {most} before the server is asked again, that "
                            f"of rank {j} is {least}, further apart than 2 x {self.s}"
                        )
        return rank

    def _valid_clocks(self, rank: Rank, k: Key, server_clock: int, begins: bool) -> tuple[int, int] | None:
        """The clock of a valid replica, now and at the last read that rests on what the server has said so far.
        ``begins``: the first batch ahead is read now, whether or not those begun before it are updated.

        A replica is valid if the server's clock is within its bound, and its own is: by the protocol's word where a
        batch in flight uses the row, else by the definition.
        """
        row = rank.rows[k]
        if row is None:
            return None
        reply = [(c, v) for plan in rank.ahead for key, c, v in plan.reply or () if key == k]
        clock = reply[-1][0] + row.pending if reply else row.clock
        if (not reply and row.anchor == NEVER) or server_clock > clock + self.s:
            return None
        heard = [i for i, plan in enumerate(p for p in rank.ahead if k in p.keys) if k in plan.heard]
        in_use = any(k in keys for keys in rank.begun)
        if heard:
            return clock, clock + (in_use and not begins) + heard[-1]
        return (clock, clock) if in_use or clock <= row.anchor + self.s else None


def digits(value: int) -> list[int]:
    found = []
    while value:
        found.append(value & (1 << DIGIT) - 1)
        value >>= DIGIT
    return found
