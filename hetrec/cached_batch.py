"""The life of a batch in the caches of a collection: its states, and what belongs to it in each.

    in view -> planned -> sent -> committed -> looked up -> stepped
                                     |             |
                                     +-> released <+

Whoever moves a batch on says so with ``CachedBatch.enter``; a move that ``TRANSITIONS`` does not have is an assertion.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cache_backend.cache import Bags, CachePlan, UniqueRows
from cache_backend.store import ExchangeReply
from hetrec.exchanges import Replies

__all__ = ["TRANSITIONS", "CachedBatch", "Gradient", "Graph", "State"]


class State(Enum):
    """Where a batch is. In the states from PLANNED to LOOKED_UP its rows are pinned."""

    IN_VIEW = "in view"  #: its keys are known, and revealed to the policies
    PLANNED = "planned"  #: its rows have slots, and what must be pushed was cut into its requests
    SENT = "sent"  #: its requests are on their way to the store
    COMMITTED = "committed"  #: the store's answer is in the slots
    LOOKED_UP = "looked up"  #: its rows went into a forward pass
    STEPPED = "stepped"  #: its gradients were applied
    RELEASED = "released"  #: given up


#: From each state, the states that may follow. SENT follows SENT where an exchange failed and is sent again.
TRANSITIONS = {
    State.IN_VIEW: {State.PLANNED},
    State.PLANNED: {State.SENT},
    State.SENT: {State.SENT, State.COMMITTED},
    State.COMMITTED: {State.LOOKED_UP, State.STEPPED, State.RELEASED},
    State.LOOKED_UP: {State.LOOKED_UP, State.STEPPED, State.RELEASED},
    State.STEPPED: set(),
    State.RELEASED: set(),
}


class Graph:
    """Lives as long as the autograd graph of a lookup: as long as a gradient may come from it."""


@dataclass
class Gradient:
    """Of one lookup of one group: pooled, float32 (B, F * dim), for these bags."""

    pooled: Tensor
    bags: Bags


@dataclass(eq=False)
class CachedBatch:
    """A batch on its way through the caches of a collection, of which each has a share of it: its *group*.

    Attributes:
        features: the batch as it came. Its identity ties what was planned ahead to it.
        rows, bags: of each group.
        plans: of each group, from PLANNED on.
        replies: run in the background while SENT.
        answered: the replies that have come, of the first groups; where an exchange failed, a repetition goes on there.
        failed: the exchange ended in an error, which was raised.
        gradients: of each group, one a lookup that backward has reached.
        stepped: the groups that backward has stepped.
    """

    features: KeyedJaggedTensor
    rows: list[UniqueRows]
    bags: list[Bags]
    state: State = State.IN_VIEW
    plans: list[CachePlan] = field(default_factory=list)
    replies: Replies | None = None
    answered: list[ExchangeReply] = field(default_factory=list)
    failed: bool = False
    gradients: list[list[Gradient]] = field(default_factory=list)
    stepped: set[int] = field(default_factory=set)
    _graphs: list[weakref.ref[Graph]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gradients = [[] for _ in self.rows]

    def enter(self, state: State) -> None:
        """Move on to another state."""
        assert state in TRANSITIONS[self.state], f"a batch that is {self.state.value} cannot become {state.value}"
        self.state = state

    def looked_up(self, graph: Graph) -> None:
        """A lookup whose gradient may come while ``graph`` lives."""
        self.enter(State.LOOKED_UP)
        self._graphs = [known for known in self._graphs if known() is not None]
        self._graphs.append(weakref.ref(graph))

    @property
    def is_abandoned(self) -> bool:
        """Whether it was looked up, and no gradient has come or can still come: a forward pass without backward."""
        return (
            self.state is State.LOOKED_UP
            and not any(self.gradients)
            and not any(graph() is not None for graph in self._graphs)
        )
