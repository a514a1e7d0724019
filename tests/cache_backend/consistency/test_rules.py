"""HET's bound, and that every update counts once, in every state that small systems can reach."""

from __future__ import annotations

import os

import pytest
from mutants import MUTANTS
from rules import TWO_KEYS, Rules, Scope
from search import as_text, explore

# What may go wrong between two ranks and one key, in depth; then all at once; then rows that leave; then three ranks.
SCOPES = [
    *(
        Scope(staleness=s, depth=d, clock=clock, batches=3 + (d < 2) + (s > 0))
        for clock in ("lamport", "sum")
        for s in (0, 1, 2)
        for d in (0, 1, 2)
    ),
    Scope(staleness=0, flushes=1, discards=1, losses=1, batches=2),
    Scope(staleness=1, flushes=1, discards=1, losses=1, batches=3),
    Scope(staleness=1, flushes=1, discards=1, losses=1, batches=2, depth=2),
    Scope(staleness=0, window=2, batches=4),
    Scope(staleness=1, window=2, batches=3, depth=2),
    *(Scope(keys=2, choices=TWO_KEYS, staleness=s, batches=2, admission=True) for s in (0, 1)),
    Scope(keys=2, choices=TWO_KEYS, staleness=1, batches=2, admission=True, depth=2, clock="sum"),
    Scope(keys=2, choices=TWO_KEYS, staleness=0, batches=2, capacity=2, discards=1),
    Scope(keys=2, choices=TWO_KEYS, staleness=1, batches=4, ranks=1, flushes=1, discards=1, depth=2),
    *(Scope(ranks=3, staleness=s, depth=1, batches=2) for s in (0, 1)),
    Scope(ranks=3, staleness=1, depth=2, batches=2, clock="sum"),
]
# About ten minutes and 2 GB: HETREC_LARGE_SCOPE=1
LARGE = [
    *(Scope(keys=2, choices=TWO_KEYS, staleness=s, depth=d, batches=3) for s in (0, 1) for d in (1, 2)),
    *(Scope(staleness=s, flushes=1, discards=1, losses=1, batches=3, depth=2) for s in (1, 2)),
    *(Scope(ranks=3, staleness=s, depth=1, batches=3) for s in (0, 1)),
    *(Scope(staleness=s, depth=2, batches=5) for s in (1, 2)),
]
if os.environ.get("HETREC_LARGE_SCOPE") == "1":
    SCOPES += LARGE


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scope", SCOPES, ids=str)
def test_the_rules_hold_in_every_reachable_state(scope: Scope) -> None:
    result = explore(Rules(scope))
    print(f"{result.states} states, {result.transitions} transitions")
    assert result.violation is None, f"{result.violation} after\n{as_text(result.schedule or [])}"
    assert result.states > 500  # nothing is proven about a system that does not move


@pytest.mark.parametrize(("broken", "scope", "message"), MUTANTS, ids=lambda v: getattr(v, "__name__", ""))
def test_a_broken_rule_is_found(broken: type[Rules], scope: Scope, message: str) -> None:
    """What finds nothing wrong anywhere proves nothing. The schedule that shows the fault is printed (pytest -s)."""
    assert explore(Rules(scope)).violation is None
    result = explore(broken(scope))
    assert result.violation is not None, f"{broken.__name__} goes unnoticed in {scope}"
    print(f"\n{broken.__name__}: {result.violation} after\n{as_text(result.schedule or [])}")
    assert message in result.violation
