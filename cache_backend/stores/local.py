"""The embedded store: the tables live in this process. Nothing to start, one rank only."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from cache_backend._table import EmbeddingTable
from cache_backend.groups import Format, declare, new_groups, tables_by_format
from cache_backend.interrupts import uninterrupted
from cache_backend.rounds import Rounds
from cache_backend.snapshot import read_snapshot, write_snapshot
from cache_backend.store import ExchangeReply, ExchangeRequest, Fetch, Share, StoredRows, StoreStats, TableSchema
from cache_backend.stored import bucket_range, stored_rows

__all__ = ["LocalStore"]

_ROWS_AT_A_TIME = 1 << 16
_WAIT_S = 60.0  # for the shares of other ranks, which are threads here


class LocalStore:
    """Tables in this process's memory; rows exist once they are written.

    Args:
        clock: how a push merges into the row's global clock. ``lamport`` (HET's paper): max(c_g, c_c). ``sum``:
            c_g += c_c - c_s, which counts every update.
        exclusive: whether one cache alone writes here. Several caches over one LocalStore (tests, experiments) must say
            False, so that they check each other's clocks.
    """

    def __init__(self, clock: str = "lamport", exclusive: bool = True) -> None:
        if clock not in ("lamport", "sum"):
            raise ValueError(f"unknown clock rule {clock!r}; available: lamport, sum")
        self.exclusive = exclusive
        self._clock = clock
        self._schemas: list[TableSchema] = []
        self._groups: dict[Format, EmbeddingTable] = {}
        self._rounds = Rounds(threading.Lock())

    def __reduce__(self) -> tuple[Any, ...]:
        # Ranks that are started for a run get the settings of a store that nobody has opened.
        if self._schemas:
            raise TypeError("a LocalStore that holds tables lives in its process and cannot be copied")
        return LocalStore, (self._clock, self.exclusive)

    def open(self, schemas: Sequence[TableSchema]) -> list[int]:
        known = {schema.name: i for i, schema in enumerate(self._schemas)}
        for schema in schemas:
            if schema.name in known:
                self._schemas[known[schema.name]].check_opens(schema)
        for schema in schemas:
            if schema.name not in known:
                known[schema.name] = len(self._schemas)
                self._schemas.append(schema)
                declare(self._groups, known[schema.name], schema)
        return [known[schema.name] for schema in schemas]

    def schemas(self) -> list[TableSchema]:
        return list(self._schemas)

    def exchange(self, request: ExchangeRequest) -> ExchangeReply:
        table = self._group(request.dim, request.state_dim)
        push, check, fetch = request.push, request.check, request.fetch
        if request.share is not None:
            self._step(table, request, request.share)
        if request.prepared is None:
            with uninterrupted():  # a request given again, after Ctrl-C say, is answered and not applied again
                table.push(push.tables, push.keys, push.starts, push.clocks, push.deltas, self._clock)
                request.prepared = True
        stale, lags = table.stale(check.tables, check.keys, check.clocks, check.staleness)
        stale_rows, stale_clocks, _ = _fetch(table, Fetch(check.tables[stale], check.keys[stale]))
        rows, clocks, fresh = _fetch(table, fetch)
        written = len(fresh) - int(np.count_nonzero(fresh)) + len(stale)
        received = fresh.nbytes + stale.nbytes + written * (rows.itemsize * request.width + clocks.itemsize)
        return ExchangeReply(
            rows,
            clocks,
            fresh,
            stale,
            stale_rows,
            stale_clocks,
            lags,
            bytes_sent=request.nbytes,
            bytes_received=received,
        )

    def _step(self, table: EmbeddingTable, request: ExchangeRequest, share: Share) -> None:
        def apply(shares: Sequence[Share]) -> None:
            table.step([(s.tables, s.keys, s.gradients) for s in shares], share.step)

        key = share.group, request.dim, request.state_dim
        self._rounds.add(key, share.number, share.rank, share.ranks, share.step, share, apply, _WAIT_S)

    def read(self, dim: int, state_dim: int, rows: Fetch) -> tuple[np.ndarray, np.ndarray]:
        values, _, fresh = _fetch(self._group(dim, state_dim), rows)
        return values, fresh

    def flush(self) -> None:
        """Nothing is held back."""

    def snapshot(self, path: Path) -> None:
        write_snapshot(Path(path), self._schemas, self._groups)

    def restore(self, path: Path) -> None:
        snapshot = read_snapshot(Path(path))
        by_name = {schema.name: schema for schema in snapshot.schemas}
        # Tables opened here but absent from the snapshot keep their ids and start fresh.
        schemas = [by_name.pop(mine.name, mine) for mine in self._schemas] + list(by_name.values())
        for mine, theirs in zip(self._schemas, schemas, strict=False):
            mine.check_restores(theirs, path)
        groups = new_groups(dict(enumerate(schemas)))
        ids = {schema.name: i for i, schema in enumerate(schemas)}
        for part in snapshot.parts():
            groups[part.dim, part.state_dim].assign(part.table_ids(ids), part.keys, part.clocks, part.rows)
        self._schemas, self._groups = schemas, groups

    def export(self, tables: Sequence[int], part: int = 0, parts: int = 1) -> Iterator[StoredRows]:
        by_format = self._by_format(tables)
        bucket_range(part, parts)
        return chain.from_iterable(
            stored_rows(self._groups[row_format], ids, part, parts, _ROWS_AT_A_TIME)
            for row_format, ids in by_format.items()
        )

    def assign(self, rows: StoredRows) -> None:
        rows.check()
        self._group(rows.dim, rows.state_dim).assign(rows.tables, rows.keys, rows.clocks, rows.rows)

    def erase(self, tables: Sequence[int]) -> None:
        for row_format, ids in self._by_format(tables).items():
            self._groups[row_format].erase(np.array(ids, np.int32))

    def stats(self) -> StoreStats:
        groups = self._groups.values()
        return StoreStats(sum(len(g) for g in groups), sum(g.memory_bytes for g in groups))

    def close(self) -> None:
        """Nothing to close: memory goes with the object."""

    def _by_format(self, tables: Sequence[int]) -> dict[Format, list[int]]:
        return tables_by_format(dict(enumerate(self._schemas)), tables)

    def _group(self, dim: int, state_dim: int) -> EmbeddingTable:
        try:
            return self._groups[dim, state_dim]
        except KeyError:
            raise ValueError(
                f"no table with {dim} weights and {state_dim} optimizer values a row is open; open() it first"
            ) from None


def _fetch(table: EmbeddingTable, fetch: Fetch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    n = len(fetch.keys)
    rows = np.empty((n, table.dim + table.state_dim), np.float32)
    clocks = np.empty(n, np.int64)
    fresh = np.empty(n, np.uint8)
    table.fetch(fetch.tables, fetch.keys, rows, clocks, fresh)
    return rows, clocks, fresh
