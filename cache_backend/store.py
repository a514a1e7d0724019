"""The store interface: where the embedding tables live. Torch-free: a parameter server imports this too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cache_backend.config import OPTIMIZERS, state_dim_of

__all__ = [
    "Check",
    "EmbeddingStore",
    "ExchangeReply",
    "ExchangeRequest",
    "Fetch",
    "Push",
    "Share",
    "StoreError",
    "StoreStats",
    "StoredRows",
    "TableSchema",
]

MAX_CLOCK = (1 << 48) - 1


class StoreError(RuntimeError):
    """A store that cannot be reached, turned this client away, or is not the one it was."""


@dataclass(frozen=True)
class TableSchema:
    """One table as the store knows it.

    Rows are float32, ``dim`` weights and the values that ``optimizer`` keeps with them. A row that nobody wrote has
    weights uniform in ``[init_low, init_high)`` as a pure function of (``seed``, key), and state ``init_state``.

    Raises:
        ValueError: an unknown optimizer.
    """

    name: str
    dim: int
    optimizer: str
    seed: int
    init_low: float
    init_high: float
    init_state: float

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(
                f"table {self.name!r} is trained by {self.optimizer!r}, which is unknown here; there are "
                f"{', '.join(OPTIMIZERS)}"
            )

    @property
    def state_dim(self) -> int:
        """Optimizer values of a row."""
        return state_dim_of(self.optimizer, self.dim)

    def check_opens(self, wanted: TableSchema) -> None:
        """
        Raises:
            ValueError: this table, which is there, holds other rows than the one that was asked for.
        """
        if (self.dim, self.optimizer) != (wanted.dim, wanted.optimizer):
            raise ValueError(
                f"table {self.name!r} holds rows of {self.dim} weights trained by {self.optimizer}; {wanted.dim} and "
                f"{wanted.optimizer} were asked for. Use the embedding dimension and optimizer it was made with, or "
                f"another store"
            )

    def check_restores(self, saved: TableSchema, path: Path) -> None:
        """
        Raises:
            ValueError: the snapshot at ``path`` has a table of this name with other rows.
        """
        if (self.dim, self.optimizer) != (saved.dim, saved.optimizer):
            raise ValueError(
                f"snapshot {path}: table {saved.name!r} has rows of {saved.dim} weights trained by {saved.optimizer}, "
                f"but {self.dim} and {self.optimizer} are expected here; use the embedding dimension and optimizer of "
                f"the run that wrote it"
            )


def _empty(dtype: type, *shape: int) -> np.ndarray:
    return np.empty(shape, dtype)


@dataclass
class Push:
    """Pending deltas of n rows. tables int32 (n,); keys, starts, clocks int64 (n,); deltas float32 (n, width)."""

    tables: np.ndarray
    keys: np.ndarray
    starts: np.ndarray
    clocks: np.ndarray
    deltas: np.ndarray

    @staticmethod
    def nothing(width: int) -> Push:
        i64 = _empty(np.int64, 0)
        return Push(_empty(np.int32, 0), i64, i64, i64, _empty(np.float32, 0, width))

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (self.tables, self.keys, self.starts, self.clocks, self.deltas))


@dataclass
class Check:
    """Clocks of cached rows: is c_g <= c_c + staleness? tables int32; keys, clocks, staleness int64; each (n,)."""

    tables: np.ndarray = field(default_factory=lambda: _empty(np.int32, 0))
    keys: np.ndarray = field(default_factory=lambda: _empty(np.int64, 0))
    clocks: np.ndarray = field(default_factory=lambda: _empty(np.int64, 0))
    staleness: np.ndarray = field(default_factory=lambda: _empty(np.int64, 0))

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (self.tables, self.keys, self.clocks, self.staleness))


@dataclass
class Fetch:
    """Rows wanted. tables int32 (n,), keys int64 (n,)."""

    tables: np.ndarray
    keys: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.tables.nbytes + self.keys.nbytes


@dataclass
class Share:
    """One rank's gradients for a synchronous step, a *round*: those of all ranks are summed per row and applied as one
    optimizer step before any of their requests is answered.

    group: random, the same for the ranks that step together and for their run; number: of the round, 1, 2, ...;
    rank: of ``ranks``. step float32 (7,): the learning rate and ``EmbeddingOptimizer.settings()``. tables int32 (n,),
    keys int64 (n,), gradients float32 (n, dim): a row may be there more than once.
    """

    group: int
    number: int
    rank: int
    ranks: int
    step: np.ndarray
    tables: np.ndarray
    keys: np.ndarray
    gradients: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.step.nbytes + self.tables.nbytes + self.keys.nbytes + self.gradients.nbytes


@dataclass
class ExchangeRequest:
    """One step's traffic for the tables of one row format: pushes first, then checks and fetches are answered. With
    ``share`` the answer waits until the round is applied; ``push`` is empty then."""

    dim: int
    state_dim: int
    push: Push
    check: Check
    fetch: Fetch
    share: Share | None = None
    #: What a store keeps with a request, so that the same one, given again after a failure, is not applied twice.
    prepared: Any = field(default=None, repr=False)

    @property
    def width(self) -> int:
        return self.dim + self.state_dim

    @property
    def nbytes(self) -> int:
        """Payload, before any encoding."""
        share = 0 if self.share is None else self.share.nbytes
        return share + self.push.nbytes + self.check.nbytes + self.fetch.nbytes

    @property
    def is_empty(self) -> bool:
        return self.share is None and not (len(self.push.keys) or len(self.check.keys) or len(self.fetch.keys))


@dataclass
class ExchangeReply:
    """Answers in the request's order.

    rows float32 (n, width), clocks int64 (n,), fresh uint8 (n,): the fetched rows; where ``fresh`` is 1 nobody wrote
    the row, nothing travelled and ``rows`` and ``clocks`` mean nothing. stale int32 (k,): which checks failed;
    stale_rows and stale_clocks: those rows. lags int64 (18,): how many checks, failed or not, found c_g - c_c <= 0, and
    how many from 2^(i - 1) below 2^i, i = 1, 2, ...; the last count is open-ended. bytes_sent, bytes_received: of
    request and reply as they travelled, or would have.
    """

    rows: np.ndarray
    clocks: np.ndarray
    fresh: np.ndarray
    stale: np.ndarray
    stale_rows: np.ndarray
    stale_clocks: np.ndarray
    lags: np.ndarray
    bytes_sent: int
    bytes_received: int


@dataclass(frozen=True)
class StoreStats:
    """rows: written rows held; memory_bytes: what they and their index take."""

    rows: int
    memory_bytes: int


@dataclass
class StoredRows:
    """Written rows of one format, as a store has them: tables int32 (n,), keys and clocks int64 (n,), rows float32
    (n, dim + state_dim), weights first."""

    dim: int
    state_dim: int
    tables: np.ndarray
    keys: np.ndarray
    clocks: np.ndarray
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.keys)

    def check(self) -> None:
        """
        Raises:
            ValueError: the arrays do not fit together, a clock is none, or a row is not finite.
        """
        n, width = len(self.keys), self.dim + self.state_dim
        if self.rows.shape != (n, width) or not len(self.tables) == len(self.clocks) == n:
            raise ValueError(
                f"{n} keys came with {len(self.tables)} tables, {len(self.clocks)} clocks and rows of shape "
                f"{self.rows.shape}; ({n}, {width}) is expected"
            )
        if n and not 0 <= self.clocks.min() <= self.clocks.max() <= MAX_CLOCK:
            raise ValueError(f"clocks are 0 to 2^48 - 1, these reach from {self.clocks.min()} to {self.clocks.max()}")
        finite = np.isfinite(self.rows).all(axis=1)
        if not finite.all():
            first = int(finite.argmin())
            raise ValueError(
                f"{n - int(finite.sum())} of {n} rows hold NaN or infinite values, the first one key "
                f"{self.keys[first]} of the table with id {self.tables[first]}: a store takes finite ones only"
            )


class EmbeddingStore(Protocol):
    """Where tables live. Implementations: ``stores/local.py``, ``stores/remote.py``."""

    #: True where no other rank can write: then a cached row cannot be made stale by others, and nothing is checked.
    exclusive: bool

    def open(self, schemas: Sequence[TableSchema]) -> list[int]:
        """Declare tables; returns their ids. Opening again returns the same id.

        Raises:
            ValueError: the table exists with another row format.
        """
        ...

    def schemas(self) -> list[TableSchema]:
        """All tables, by id. A table keeps the seed it was first opened with, also across a restore."""
        ...

    def exchange(self, request: ExchangeRequest) -> ExchangeReply:
        """Pushes, validity checks and fetches, together. A request that failed may be given again: it is applied once.

        Raises:
            StoreError: the store cannot be reached, or lost its rows; or a round waited in vain for other ranks.
            ValueError: ranks that share a round do not agree about it.
        """
        ...

    def read(self, dim: int, state_dim: int, rows: Fetch) -> tuple[np.ndarray, np.ndarray]:
        """Rows (n, width) float32 and fresh flags (n,) uint8, for evaluation and export. Changes nothing."""
        ...

    def flush(self) -> None:
        """Send what the store's client still holds back (rounding errors of lossy pushes)."""
        ...

    def snapshot(self, path: Path) -> None:
        """Write every row to the folder ``path``, whole or not at all."""
        ...

    def restore(self, path: Path) -> None:
        """Replace every row by a snapshot's. On an error nothing has changed."""
        ...

    def export(self, tables: Sequence[int], part: int = 0, parts: int = 1) -> Iterator[StoredRows]:
        """The written rows of tables, in pieces of bounded memory, each of one format.

        Rows fall into 4096 buckets; ``part`` of ``parts`` is that share of them, so that several ranks can divide the
        work. While others push, the pieces are of different moments.

        Raises:
            ValueError: an unknown table, or no such part.
            StoreError: the store cannot be reached, or lost its rows.
        """
        ...

    def assign(self, rows: StoredRows) -> None:
        """Set rows to exact values. What caches hold of them is out of date afterwards.

        Raises:
            ValueError: an unknown table, arrays that do not fit together, or a clock outside 0 .. 2^48 - 1.
            StoreError: the store cannot be reached, or lost its rows.
        """
        ...

    def erase(self, tables: Sequence[int]) -> None:
        """Forget every row of tables: they are fresh again. As ``assign``."""
        ...

    def stats(self) -> StoreStats: ...

    def close(self) -> None: ...
