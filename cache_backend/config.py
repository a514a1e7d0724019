"""What users say about the cache and the embedding optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["POLICIES", "CacheConfig", "EmbeddingOptimizer"]

#: Names of the policies and their numbers in ``csrc/core/policy.h``.
POLICIES = {"lru": 0, "lfu": 1, "light_lfu": 2, "tiny_lfu": 3, "lookahead": 4}


@dataclass(frozen=True)
class CacheConfig:
    """The bounded cache of hot rows that every rank keeps.

    Args:
        rows: rows kept, over all tables (rounded up to a multiple of 32). Give this or ``fraction``; without either,
            500,000.
        fraction: rows kept as a share of the tables' rows; needs tables with a size, or data that knows how many
            distinct keys it holds.
        staleness: the bound s. A cached row may miss up to s updates of others, and hold back up to s of its own.
        table_staleness: other bounds for single tables, by their names.
        policy: which row leaves when a set is full (docs/cache_policies.md). ``lru``: the one whose last use is longest
            ago. ``lfu``: the one that the fewest batches used since it came. ``light_lfu``: as ``lfu``, but a row used
            often is no longer counted, and counts age. ``tiny_lfu``: frequencies outlive eviction and age; a newcomer
            rarer than the row it would replace passes through without a slot. ``lookahead``: ``tiny_lfu`` that
            keeps, before anything else, what the coming batches (``data.lookahead``, at most 64) use soonest.
        prefetch_depth: batches whose exchange with the store is under way while the current one computes, as far as
            the loader looks ahead. 0: every exchange is waited for.
    """

    rows: int | None = None
    fraction: float | None = None
    staleness: int = 100
    table_staleness: dict[str, int] = field(default_factory=dict)
    policy: Literal["lru", "lfu", "light_lfu", "tiny_lfu", "lookahead"] = "lru"
    prefetch_depth: int = 1

    def __post_init__(self) -> None:
        if self.rows is not None and self.fraction is not None:
            raise ValueError(
                f"cache.rows ({self.rows}) and cache.fraction ({self.fraction}) exclude each other; give one"
            )
        if self.rows is not None and self.rows < 1:
            raise ValueError(f"cache.rows must be at least 1, got {self.rows}")
        if self.fraction is not None and not 0 < self.fraction <= 1:
            raise ValueError(f"cache.fraction must be in (0, 1], got {self.fraction}")
        if self.staleness < 0:
            raise ValueError(f"cache.staleness must be 0 or more updates, got {self.staleness}")
        for table, bound in self.table_staleness.items():
            if bound < 0:
                raise ValueError(f"cache.table_staleness[{table}] must be 0 or more updates, got {bound}")
        if self.prefetch_depth < 0:
            raise ValueError(f"cache.prefetch_depth must be 0 or more batches, got {self.prefetch_depth}")
        if self.policy not in POLICIES:
            raise ValueError(f"unknown cache.policy {self.policy!r}; available: {', '.join(POLICIES)}")


@dataclass(frozen=True)
class EmbeddingOptimizer:
    """How embedding rows are trained. Semantics are FBGEMM's EXACT optimizers: duplicate keys of a step are summed
    first.

    Args:
        name: ``sgd``: w -= lr g. ``adagrad``: m += g^2 per element, w -= lr g / (sqrt(m) + eps).
            ``rowwise_adagrad``: the same with one m per row, the mean of g^2.
        lr: learning rate the optimizer's "embeddings" parameter group starts with; schedulers change it there.
        eps: added to the root.
        initial_accumulator: where m begins.
    """

    name: Literal["sgd", "adagrad", "rowwise_adagrad"] = "rowwise_adagrad"
    lr: float = 0.02
    eps: float = 1e-8
    initial_accumulator: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in _IDS:
            raise ValueError(f"unknown embedding optimizer {self.name!r}; available: {', '.join(_IDS)}")
        for what, value in (("lr", self.lr), ("eps", self.eps), ("initial_accumulator", self.initial_accumulator)):
            if value < 0:
                raise ValueError(f"embedding.{what} must not be negative, got {value}")

    @property
    def id(self) -> int:
        """The optimizer's number in ``csrc/core/optimizer.h``."""
        return _IDS[self.name]

    def state_dim(self, dim: int) -> int:
        """Optimizer values a row of ``dim`` weights carries."""
        return {"sgd": 0, "adagrad": dim, "rowwise_adagrad": 1}[self.name]


_IDS = {"sgd": 0, "adagrad": 1, "rowwise_adagrad": 2}
