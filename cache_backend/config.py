"""What users say about the cache and the embedding optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["OPTIMIZERS", "POLICIES", "CacheConfig", "EmbeddingOptimizer", "state_dim_of"]

#: Names of the policies and their numbers in ``csrc/core/policy.h``.
POLICIES = {"lru": 0, "lfu": 1, "light_lfu": 2, "tiny_lfu": 3, "lookahead": 4}

#: Names of the optimizers and their numbers in ``csrc/core/optimizer.h``.
OPTIMIZERS = {"sgd": 0, "adagrad": 1, "rowwise_adagrad": 2, "adam": 3}


def state_dim_of(optimizer: str, dim: int) -> int:
    """Optimizer values that a row of ``dim`` weights carries."""
    return {"sgd": 0, "adagrad": dim, "rowwise_adagrad": 1, "adam": 2 * dim + 1}[optimizer]


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
        consistency: ``het``: rows are trained in the cache, and replicas drift apart up to the bound. ``bsp``: all
            ranks' gradients of a step are summed at the store and applied as one optimizer step before any read of the
            next, as if one process trained on their batches together. A cached row is then valid while no other rank
            has stepped it; ``staleness`` and ``prefetch_depth`` have no meaning.
        prefetch_depth: batches whose exchange with the store is under way while the current one computes, as far as
            the loader looks ahead. 0: every exchange is waited for.
    """

    rows: int | None = None
    fraction: float | None = None
    staleness: int = 100
    table_staleness: dict[str, int] = field(default_factory=dict)
    policy: Literal["lru", "lfu", "light_lfu", "tiny_lfu", "lookahead"] = "lookahead"
    consistency: Literal["het", "bsp"] = "het"
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
        if self.consistency not in ("het", "bsp"):
            raise ValueError(f"unknown cache.consistency {self.consistency!r}; available: het, bsp")
        if self.policy not in POLICIES:
            raise ValueError(f"unknown cache.policy {self.policy!r}; available: {', '.join(POLICIES)}")


@dataclass(frozen=True)
class EmbeddingOptimizer:
    """How embedding rows are trained. Semantics are FBGEMM's EXACT optimizers: duplicate keys of a step are summed
    first, and a row is stepped when a batch holds it, and only then: decay of state and of weights waits for that.

    Args:
        name: ``sgd``: w -= lr g. ``adagrad``: m += g^2 per element, w -= lr g / (sqrt(m) + eps).
            ``rowwise_adagrad``: the same with one m per row, the mean of g^2. ``adam``: Kingma and Ba's, where t counts
            the row's own steps (FBGEMM's row-wise bias correction).
        lr: learning rate the optimizer's "embeddings" parameter group starts with; schedulers change it there.
        eps: added to the root.
        initial_accumulator: where Adagrad's m begins.
        betas: how much of its running means Adam keeps a step.
        weight_decay: pulls weights towards 0. ``adam``: decoupled, w -= lr weight_decay w beside the step. The others:
            L2, weight_decay w is added to g.
        max_gradient: each value of a row's gradient, summed over the rank's batch and scaled to the mean over ranks,
            is clamped to [-max_gradient, max_gradient].
        max_gradient_norm: then the gradient of a row is scaled down to this 2-norm where it is larger.
        nonfinite: what happens to a row whose gradient is NaN or infinite, or that would be after the step. ``skip``:
            it stays as it is, and is counted. ``error``: so, and the run ends with its table, key and step.
    """

    name: Literal["sgd", "adagrad", "rowwise_adagrad", "adam"] = "rowwise_adagrad"
    lr: float = 0.02
    eps: float = 1e-8
    initial_accumulator: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    max_gradient: float | None = None
    max_gradient_norm: float | None = None
    nonfinite: Literal["skip", "error"] = "skip"

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise ValueError(f"unknown embedding optimizer {self.name!r}; available: {', '.join(OPTIMIZERS)}")
        for what in ("lr", "eps", "initial_accumulator", "weight_decay"):
            if getattr(self, what) < 0:
                raise ValueError(f"embedding.{what} must not be negative, got {getattr(self, what)}")
        for what in ("max_gradient", "max_gradient_norm"):
            most = getattr(self, what)
            if most is not None and not most > 0:
                raise ValueError(f"embedding.{what} must be positive, or null for no clipping; got {most}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"embedding.betas must be two numbers in [0, 1), got {self.betas}")
        if self.nonfinite not in ("skip", "error"):
            raise ValueError(f"unknown embedding.nonfinite {self.nonfinite!r}; available: skip, error")
        if self.name == "adam" and self.initial_accumulator:
            raise ValueError(
                f"embedding.initial_accumulator={self.initial_accumulator} is Adagrad's; Adam's means begin at 0"
            )

    @property
    def id(self) -> int:
        """The optimizer's number in ``csrc/core/optimizer.h``."""
        return OPTIMIZERS[self.name]

    def state_dim(self, dim: int) -> int:
        """Optimizer values a row of ``dim`` weights carries."""
        return state_dim_of(self.name, dim)

    def settings(self) -> list[float]:
        """What a step needs beside the learning rate: the fields of ``OptimizerSettings`` in ``csrc/core/optimizer.h``,
        in order; 0: no clipping."""
        return [self.eps, *self.betas, self.weight_decay, self.max_gradient or 0.0, self.max_gradient_norm or 0.0]
