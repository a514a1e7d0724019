"""Any history of training through the cache, against dictionaries: failures of the store, flushes and changes of plan
included.

One rank, SGD at learning rate 1, whole-number gradients: sums are exact in float32, so values must be equal, always.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

from cache_backend import CacheConfig, EmbeddingOptimizer, EmbeddingStore, LocalStore, RemoteStore
from cache_backend.config import POLICIES
from cache_backend.store import ExchangeReply, ExchangeRequest, StoreError
from hetrec import HetEmbeddingBagCollection

# Two widths, so two caches; two tables in one of them; "b2" reads the same table as "b".
DIMS = {"a": 2, "b": 2, "c": 3}
TABLE_OF = {"a": "a", "b": "b", "b2": "b", "c": "c"}
FEATURES = list(TABLE_OF)
EXTREMES = [-(1 << 63), -(1 << 63) + 1, -1, 0, 1, (1 << 63) - 1]
_numbers = count()

keys = st.one_of(st.integers(0, 50), st.sampled_from(EXTREMES), st.integers(-(1 << 63), (1 << 63) - 1))
some_bags = st.lists(st.lists(keys, max_size=4), min_size=8, max_size=8)  # of two samples, feature by feature


@st.composite
def many_bags(draw: st.DrawFn) -> list[list[int]]:
    """More keys than a small cache has slots."""
    first, n = draw(st.integers(0, 100)), draw(st.integers(0, 200))
    return [[first + (i * 7 + bag) % n for i in range(n // 4)] if n else [] for bag in range(8)]


batches = st.one_of(some_bags, some_bags, many_bags())


def table(name: str, prefix: str) -> EmbeddingBagConfig:
    """Without a size: every int64 is a key. Rows begin at zero."""
    return EmbeddingBagConfig(
        name=f"{prefix}{name}",
        embedding_dim=DIMS[name],
        num_embeddings=0,
        feature_names=[feature for feature, of in TABLE_OF.items() if of == name],
        weight_init_min=0.0,
        weight_init_max=0.0,
    )


class Unreliable:
    """A store one of whose next exchanges can be made to fail, before it was applied or after it."""

    def __init__(self, store: EmbeddingStore) -> None:
        self._store = store
        self.fails: str | None = None
        self.after_exchanges = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def exchange(self, request: ExchangeRequest) -> ExchangeReply:
        if self.fails is None or self.after_exchanges > 0:
            self.after_exchanges -= 1
            return self._store.exchange(request)
        fails, self.fails = self.fails, None
        if fails == "after":
            self._store.exchange(request)
            if isinstance(self._store, RemoteStore):  # a reply that got lost: the request comes again under its number
                request.prepared._reply = None
                for piece in (piece for pieces in request.prepared.of_shard for piece in pieces):
                    piece.answered = False
        raise StoreError(f"unreachable, {fails} the request was applied")


class History(RuleBasedStateMachine):
    """``self.rows``: what each row must be. ``self.gradients``: of batches since the last step, by row."""

    make_store: Callable[[], EmbeddingStore]

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        rows=st.sampled_from([64, 160, 2000]),
        staleness=st.integers(0, 3),
        depth=st.integers(0, 3),
    )
    def open(self, policy: Any, rows: int, staleness: int, depth: int) -> None:
        self.store = Unreliable(self.make_store())
        self.tables = [table(name, f"{os.getpid()}-history-{next(_numbers)}-") for name in DIMS]
        self.bags = HetEmbeddingBagCollection(self.tables)
        config = CacheConfig(rows=rows, staleness=staleness, policy=policy, prefetch_depth=depth)
        self.bags.open(self.store, config, EmbeddingOptimizer("sgd"))  # type: ignore[arg-type]
        self.rows: dict[tuple[str, int], torch.Tensor] = {}
        self.gradients: dict[tuple[str, int], torch.Tensor] = {}
        self.coming: list[tuple[KeyedJaggedTensor, list[list[int]]]] = []

    def row(self, name: str, key: int) -> torch.Tensor:
        return self.rows.get((name, key), torch.zeros(DIMS[name]))

    def expected(self, bags: list[list[int]]) -> torch.Tensor:
        """Pooled rows of two samples."""
        samples = []
        for sample in range(2):
            parts = []
            for f, feature in enumerate(FEATURES):
                name = TABLE_OF[feature]
                found = [self.row(name, key) for key in bags[2 * f + sample]]
                parts.append(torch.stack(found).sum(0) if found else torch.zeros(DIMS[name]))
            samples.append(torch.cat(parts))
        return torch.stack(samples)

    def read_ahead(self, found: list[list[list[int]]]) -> None:
        """Coming batches are known; at least one."""
        for bags in found or ([] if self.coming else [[[7]] * 8]):
            lengths = torch.tensor([len(bag) for bag in bags], dtype=torch.int32)
            values = torch.tensor([key for bag in bags for key in bag], dtype=torch.int64)
            self.coming.append((KeyedJaggedTensor(FEATURES, values, lengths=lengths), bags))

    @precondition(lambda self: self.coming)
    @rule()
    def change_of_plan(self) -> None:
        """The next batch does not come after all."""
        self.coming.pop(0)

    @rule(found=st.lists(batches, max_size=4), known=st.integers(0, 5), unit=st.integers(-3, 3))
    def train(self, found: list[list[list[int]]], known: int, unit: int) -> None:
        self.read_ahead(found)
        if self.read(known, unit):
            self.step()

    @rule(found=st.lists(batches, max_size=4), known=st.integers(0, 5), unit=st.none() | st.integers(-3, 3))
    def accumulate(self, found: list[list[list[int]]], known: int, unit: int | None) -> None:
        self.read_ahead(found)
        self.read(known, unit)

    def read(self, known: int, unit: int | None) -> bool:
        """Look the next batch up; ``unit`` scales the gradient, None: no gradient. Says whether the store answered."""
        features, bags = self.coming[0]
        self.bags.train()
        try:
            self.bags.begin(features, [f for f, _ in self.coming[1 : 1 + known]])
        except StoreError:
            return False  # it is tried again, or another one instead
        self.coming.pop(0)
        pooled = self.bags(features).values()
        assert torch.equal(pooled.detach(), self.expected(bags))
        if unit is None:
            return True
        grad = torch.arange(pooled.numel()).view_as(pooled).remainder(5).sub(2).float() * unit
        pooled.backward(grad)
        column = 0
        for f, feature in enumerate(FEATURES):
            name = TABLE_OF[feature]
            for sample in range(2):
                for key in bags[2 * f + sample]:
                    sum_ = self.gradients.setdefault((name, key), torch.zeros(DIMS[name]))
                    sum_ += grad[sample, column : column + DIMS[name]]
            column += DIMS[name]
        return True

    @rule()
    def step(self) -> None:
        self.bags.step(lr=1.0)
        for row, gradient in self.gradients.items():
            self.rows[row] = self.row(*row) - gradient
        self.gradients = {}

    @rule()
    def skip(self) -> None:
        self.bags.discard()
        self.gradients = {}

    @rule(when=st.sampled_from(["before", "after"]), after_exchanges=st.integers(0, 4))
    def fail(self, when: str, after_exchanges: int) -> None:
        """An exchange to come fails."""
        self.store.fails, self.store.after_exchanges = when, after_exchanges

    @rule()
    def evaluate(self) -> None:
        """After a flush everybody reads from the store what was learned, and changes nothing."""
        try:
            self.bags.flush()
        except StoreError:
            return
        self.check_the_store()

    def check_the_store(self) -> None:
        self.bags.eval()
        of_table = defaultdict(list)
        for name, key in [*self.rows, *((name, key) for name in DIMS for key in (*EXTREMES, 1234567))]:
            of_table[name].append(key)
        for name, found in of_table.items():
            feature = next(f for f, of in TABLE_OF.items() if of == name)
            lengths = torch.tensor([[int(f == feature)] * len(found) for f in FEATURES], dtype=torch.int32).flatten()
            features = KeyedJaggedTensor(FEATURES, torch.tensor(found), lengths=lengths)
            stored = self.bags(features)[feature]
            assert torch.equal(stored, torch.stack([self.row(name, key) for key in found]))
        stats = self.bags.stats()
        assert stats.unique == stats.hits + stats.misses + stats.stale

    def teardown(self) -> None:
        if not hasattr(self, "bags"):
            return
        self.store.fails = None
        self.bags.discard()
        try:
            self.bags.flush()
        except StoreError:  # of an exchange that failed in the background
            self.bags.flush()
        self.check_the_store()
        self.bags.close()
        self.store.close()


def run(make_store: Callable[[], EmbeddingStore], examples: int) -> None:
    """Repeatable in CI; elsewhere every run tries other histories."""
    History.make_store = staticmethod(make_store)
    run_state_machine_as_test(
        History,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            derandomize="CI" in os.environ,
            database=None,
            phases=(Phase.generate, Phase.shrink),
        ),
    )


def test_any_history_in_process() -> None:
    run(LocalStore, examples=100)


@pytest.mark.parametrize("shards", [1, 3])
def test_any_history_over_servers(shard_addresses: Callable[..., Sequence[str]], shards: int) -> None:
    run(lambda: RemoteStore(list(shard_addresses(shards))), examples=25)
