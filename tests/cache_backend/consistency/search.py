"""Every reachable state of a transition system, breadth first."""

from __future__ import annotations

from dataclasses import dataclass

from rules import Action, Rules, State, Violation, digits


@dataclass(frozen=True)
class Result:
    """``schedule`` leads to ``violation``; both None where every state is as it should be. It is a shortest one."""

    states: int
    transitions: int
    violation: str | None = None
    schedule: list[Action] | None = None


def explore(rules: Rules) -> Result:
    """Visits every reachable state. States are told apart by 64 bits of their hash."""
    first = rules.initial()
    came_from: dict[int, tuple[int, Action] | None] = {hash(first): None}
    level = [first]
    transitions = 0
    while level:
        following = []
        for state in level:
            ended = True
            for action in rules.actions(state):
                ended = False
                transitions += 1
                try:
                    after = rules.apply(state, action)
                except Violation as violation:
                    schedule = [*path(came_from, hash(state)), action]
                    return Result(len(came_from), transitions, str(violation), schedule)
                if (name := hash(after)) not in came_from:
                    came_from[name] = hash(state), action
                    following.append(after)
            if ended and (problem := at_the_end(state)):
                return Result(len(came_from), transitions, problem, path(came_from, hash(state)))
        level = following
    return Result(len(came_from), transitions)


def path(came_from: dict[int, tuple[int, Action] | None], name: int) -> list[Action]:
    actions = []
    while (step := came_from[name]) is not None:
        name = step[0]
        actions.append(step[1])
    return actions[::-1]


def at_the_end(state: State) -> str | None:
    """All ranks have flushed and nothing more may happen: the server has every update once."""
    for k, (_, value) in enumerate(state.server):
        made = [rank.made[k] for rank in state.ranks]
        found = digits(value) + [0] * (len(made) - len(digits(value)))
        if found != made:
            return f"at the end the server has updates {found} of key {k}, and {made} were made"
    if any(rank.ahead or rank.begun for rank in state.ranks):
        return "a rank cannot go on"
    return None


def as_text(schedule: list[Action]) -> str:
    return "\n".join(" ".join(str(part) for part in action) for action in schedule)
