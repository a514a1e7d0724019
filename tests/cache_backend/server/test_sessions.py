"""The window of applied requests, against a set that remembers everything."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_backend.server.sessions import WINDOW, Sessions

KEY = 7, 8


@given(st.lists(st.integers(1, 200), max_size=150))
def test_agrees_with_a_set(sequences: list[int]) -> None:
    sessions, applied = Sessions(), set()
    for sequence in sequences:
        if applied and sequence < max(applied) - WINDOW:
            with pytest.raises(ValueError, match="older than the 64"):
                sessions.is_applied(KEY, sequence)
            continue
        assert sessions.is_applied(KEY, sequence) == (sequence in applied)
        sessions.mark(KEY, sequence, 0.0)
        applied.add(sequence)


@given(st.lists(st.integers(1, 200), max_size=50), st.lists(st.integers(1, 200), max_size=20))
def test_survives_being_written_down(before: list[int], after: list[int]) -> None:
    sessions, restored = Sessions(), Sessions()
    for sequence in before:
        sessions.mark(KEY, sequence, 0.0)
    restored.load(sessions.dump(), 5.0)
    for sequence in after:
        answers = []
        for which in (sessions, restored):
            try:
                answers.append(which.is_applied(KEY, sequence))
            except ValueError:
                answers.append(None)
        assert answers[0] == answers[1]


def test_sessions_do_not_know_each_other() -> None:
    sessions = Sessions()
    sessions.mark((1, 1), 5, 0.0)
    assert sessions.is_applied((1, 1), 5)
    assert not sessions.is_applied((1, 2), 5)
    assert not sessions.is_applied((2, 1), 5)


def test_the_most_silent_are_forgotten() -> None:
    sessions = Sessions(most=2)
    for worker in (1, 2, 1, 3):
        sessions.mark((worker, 0), 9, 0.0)
    assert [sessions.is_applied((worker, 0), 9) for worker in (1, 2, 3)] == [True, False, True]


def test_who_is_silent_for_long_is_forgotten() -> None:
    sessions = Sessions(silent_s=10.0)
    sessions.mark((1, 0), 9, 0.0)
    sessions.mark((2, 0), 9, 9.0)
    assert len(sessions) == 2
    sessions.mark((3, 0), 9, 11.0)
    assert [sessions.is_applied((worker, 0), 9) for worker in (1, 2, 3)] == [False, True, True]
