"""The rules, each broken in one place: what a checker that can fail must find.

``MUTANTS`` names each with the scope in which it shows and what the violation says.
"""

from __future__ import annotations

from rules import TWO_KEYS, WAY, Keys, Plan, Push, Rank, Row, Rules, Scope


class CountsAPushTwice(Rules):
    """What the published implementation does with a key that one call both pushes and pulls: the row that comes back
    contains the delta already, and the delta is added again."""

    def rebase(self, row: Row, clock: int, value: int, pushed: int) -> Row:
        return row._replace(start=clock, value=value + row.delta + pushed, anchor=clock)


class PushesTwice(Rules):
    """A push leaves the delta in place, and the next one carries it again."""

    def cut(self, row: Row) -> Row:
        return row._replace(start=row.clock, pending=0)


class AppliesARepeatedRequest(Rules):
    def is_applied_again(self, plan: Plan) -> bool:
        return True


class ForgetsUpdatesToCome(Rules):
    """Looking ahead as if the batches in flight were to change nothing."""

    def write_is_fresh(self, row: Row) -> bool:
        return row.pending <= self.s


class RefreshesThoughMoreIsToCome(Rules):
    def refresh_is_enough(self, row: Row) -> bool:
        return True


class RebaseDropsPending(Rules):
    def rebase(self, row: Row, clock: int, value: int, pushed: int) -> Row:
        return row._replace(start=clock, value=value, delta=0, pending=0, anchor=clock)


class RebaseShowsTheServersRow(Rules):
    """Pending deltas are kept for the next push, but the replica does not show them."""

    def rebase(self, row: Row, clock: int, value: int, pushed: int) -> Row:
        return row._replace(start=clock, value=value, anchor=clock)


class RebaseKeepsTheOldValue(Rules):
    """The answer brings the clock, and others' updates are never seen."""

    def rebase(self, row: Row, clock: int, value: int, pushed: int) -> Row:
        return row._replace(start=clock, value=row.value, anchor=clock)


class EvictsRowsInUse(Rules):
    def may_leave(self, row: Row) -> bool:
        return row.place == WAY


class OverwritesTheClock(Rules):
    """The last push wins, so a slow rank takes the server's clock back."""

    def merge(self, server_clock: int, push: Push) -> int:
        return push.clock


class NeverAsksTheServer(Rules):
    def read_is_fresh(self, server_clock: int, clock: int) -> bool:
        return True


class AsksAgainBeforeTheAnswer(Rules):
    """Two requests under way ask about one row. The second may push what the first answer lacks."""

    def may_ask(self, row: Row) -> bool:
        return True


class RefreshesLateRowsOnlyIfUpdated(Rules):
    """A batch whose step was skipped leaves nothing to push, and the row is then read unchecked."""

    def late_rows_to_fetch(self, rows: list[Row | None], late: Keys) -> Keys:
        return tuple(k for k in late if (row := rows[k]) is not None and row.pending)


class AnswersOutOfOrder(Rules):
    """The newest request overtakes the one before it."""

    def next_to_answer(self, rank: Rank) -> int | None:
        waiting = [i for i, plan in enumerate(rank.ahead) if plan.reply is None]
        return waiting[-1] if waiting else None


MUTANTS: list[tuple[type[Rules], Scope, str]] = [
    (CountsAPushTwice, Scope(), "sees 3 of the 2 updates"),
    (PushesTwice, Scope(ranks=1), "[1] were made, [2] exist"),
    (AppliesARepeatedRequest, Scope(losses=1), "[1] were made, [2] exist"),
    (ForgetsUpdatesToCome, Scope(), "updates held back"),
    (RefreshesThoughMoreIsToCome, Scope(staleness=0), "updates held back"),
    (RebaseDropsPending, Scope(), "were made"),
    (RebaseShowsTheServersRow, Scope(), "sees 1 of the 2 updates"),
    (RebaseKeepsTheOldValue, Scope(), "where the server answered"),
    (EvictsRowsInUse, Scope(keys=2, choices=TWO_KEYS, batches=2), "the row is not there"),
    (OverwritesTheClock, Scope(batches=4), "further apart than 2 x 1"),
    (NeverAsksTheServer, Scope(batches=4), "holds on to key 0"),
    (AsksAgainBeforeTheAnswer, Scope(depth=2, batches=4), "sees 0 of the 2 updates"),
    (RefreshesLateRowsOnlyIfUpdated, Scope(staleness=0, discards=1), "without a word of the server"),
    (AnswersOutOfOrder, Scope(keys=2, choices=((0,), (1,)), depth=2, ranks=1), "sees 0 of the 1 updates"),
]
