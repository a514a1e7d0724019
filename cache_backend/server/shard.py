"""One shard's state: tables, what has been applied, generation. Neither Flight nor files are known here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cache_backend._table import (
    EmbeddingTable,
    Request,
    answer,
    apply_push,
    apply_round,
    check_tables,
    encoded_row_bytes,
    parse_request,
    push_part,
    shards,
)
from cache_backend.groups import Format, declare, new_groups, tables_by_format
from cache_backend.rounds import Rounds
from cache_backend.row_batches import pack_rows
from cache_backend.server.errors import WrongGeneration
from cache_backend.server.sessions import Sessions
from cache_backend.snapshot import read_snapshot, write_rows_files
from cache_backend.store import StoredRows, TableSchema
from cache_backend.stored import bucket_range, stored_rows

__all__ = ["Exchanged", "Journal", "Shard"]

MAX_TABLES = 1 << 16
_EXPORT_ROWS = 1 << 16  # at a time
_MOST_WAIT_S = 600.0

#: A frame of a share, and what the log keeps of it.
SharePart = tuple[Request, np.ndarray]


class Journal(Protocol):
    """Where changes are made durable. Appends come under the shard's lock, in the order they were applied."""

    def append_tables(self, tables: list[dict[str, Any]]) -> int: ...

    def append_push(self, frame: np.ndarray) -> int: ...

    def append_assign(self, rows: bytes) -> int:
        """``pack_rows`` of rows, noted: worker, session, sequence."""
        ...

    def append_erase(self, tables: list[int], worker: int, session: int, sequence: int) -> int: ...

    def append_round(self, frames: Sequence[np.ndarray]) -> int:
        """All shares of a round, in the order in which their gradients were summed."""
        ...

    @property
    def last(self) -> int:
        """The number of the last change appended."""
        ...

    def wait(self, change: int) -> None:
        """Return once this change and all before it are durable."""
        ...

    def replace(self, schemas: dict[int, TableSchema], groups: dict[Format, EmbeddingTable]) -> None:
        """Make a whole new state durable; called under the shard's lock, before that state is taken."""
        ...


@dataclass(frozen=True)
class Exchanged:
    """A reply frame and what the request was about."""

    reply: np.ndarray
    pushes: int
    checks: int
    fetches: int
    duplicate: bool


class Shard:
    """State of shard ``index`` of ``count``.

    Pushes, together with the decision whether they were applied before and with the append to the journal, happen one
    at a time under ``lock``; reading runs beside them.
    """

    def __init__(
        self, index: int, count: int, clock: str, generation: int, max_rows: int, max_message_bytes: int
    ) -> None:
        self.index, self.count = index, count
        self.clock = clock
        self.generation = generation
        self.sessions = Sessions()
        self.schemas: dict[int, TableSchema] = {}
        self.groups: dict[Format, EmbeddingTable] = {}
        self.journal: Journal | None = None
        self.lock = threading.Lock()
        self.rounds = Rounds(self.lock)
        self._max_rows = max_rows
        self._max_message_bytes = max_message_bytes

    def open(self, schemas: Sequence[TableSchema], ids: Sequence[int] | None) -> list[int]:
        """Declare tables. ``ids`` None: this shard numbers new ones; otherwise they were numbered by another shard.

        Raises:
            ValueError: a table exists with another row format or id, or an id is taken.
        """
        with self.lock:
            opened = self._numbered(schemas, ids)
            new = {table: schema for table, schema in opened if table not in self.schemas}
            for table, schema in new.items():
                declare(self.groups, table, schema)
                self.schemas[table] = schema
            change = None
            if self.journal is not None:
                change = self.journal.last
                if new:
                    change = self.journal.append_tables([{"id": i, **asdict(schema)} for i, schema in new.items()])
        if self.journal is not None and change is not None:
            self.journal.wait(change)
        return [table for table, _ in opened]

    def _numbered(self, schemas: Sequence[TableSchema], ids: Sequence[int] | None) -> list[tuple[int, TableSchema]]:
        if ids is not None and len(ids) != len(schemas):
            raise ValueError(f"{len(schemas)} tables came with {len(ids)} ids; give one each, or none")
        tables = dict(self.schemas)
        known = {schema.name: table for table, schema in tables.items()}
        opened = []
        for i, schema in enumerate(schemas):
            table = known.get(schema.name)
            if table is None:
                table = max(tables, default=-1) + 1 if ids is None else ids[i]
                if not 0 <= table < MAX_TABLES:
                    raise ValueError(f"table {schema.name!r} would get id {table}; ids are 0 to {MAX_TABLES - 1}")
                if table in tables:
                    raise ValueError(
                        f"table {schema.name!r} has id {table} on another shard, but here that is table "
                        f"{tables[table].name!r}: these shards do not belong together, or not all were restored"
                    )
                known[schema.name], tables[table] = table, schema
            have = tables[table]
            have.check_opens(schema)
            if ids is not None and ids[i] != table:
                raise ValueError(
                    f"table {schema.name!r} has id {ids[i]} on another shard, here {table}: these shards do not belong "
                    f"together, or not all were restored"
                )
            opened.append((table, have))
        return opened

    def exchange(self, frame: np.ndarray, parts: list[SharePart] | None = None) -> Exchanged:
        """Apply a request's pushes, unless that was done before, and answer it. Returns once they are durable.

        Args:
            parts: of a rank's share for a round, from the frames before in this stream; kept from call to call.
                None: there are none.

        Raises:
            ValueError: a malformed frame (WireError), or a request beyond the limits; nothing has changed.
            RoundIncomplete: other ranks' shares did not come in time.
            WrongGeneration: the client relies on a state that this shard does not have.
        """
        request = parse_request(frame, self._max_rows)
        self.check_generation(request.generation)
        table = self._group(request.dim, request.state_dim)
        self._check_reply_size(request)
        check_tables(table, request)
        duplicate, change = False, None
        if request.round is not None:
            if request.round.more and (request.checks or request.fetches):
                raise ValueError("checks and fetches come with the last frame of a share")
            parts = [] if parts is None else parts
            parts.append((request, frame if self.journal is None else push_part(request, frame)))
            if not request.round.more:
                share = parts[:]
                parts.clear()
                duplicate, change = self._step(share)
        elif parts:
            raise ValueError("the frames of a share follow each other, without others between them")
        elif request.pushes:
            duplicate, change = self._push(request, frame)
        table = self._group(request.dim, request.state_dim)
        reply = answer(table, request, self.generation)
        if change is not None and self.journal is not None:
            self.journal.wait(change)
        return Exchanged(reply, request.pushes, request.checks, request.fetches, duplicate)

    def export(self, dim: int, state_dim: int, tables: list[int], part: int, parts: int) -> Iterator[StoredRows]:
        """The written rows of tables of one format in a part of the buckets, in pieces within the limits.

        Raises:
            ValueError: tables that are not of this format, or no such part.
        """
        table = self._group(dim, state_dim)
        if set(self._by_format(tables)) - {(dim, state_dim)}:
            raise ValueError(f"tables {tables} are not all of {dim} weights and {state_dim} optimizer values a row")
        bucket_range(part, parts)
        row = 4 * (dim + state_dim) + 20
        most = min(_EXPORT_ROWS, self._max_rows, max(1, self._max_message_bytes // row))
        return stored_rows(table, tables, part, parts, most)

    def assign(self, rows: StoredRows, worker: int, session: int, sequence: int) -> None:
        """Set rows to exact values, unless this request was applied before. Returns once they are durable.

        Raises:
            ValueError: rows of another shard or beyond the limits, or clocks that are none; nothing has changed.
            IndexError: an unknown table; nothing has changed.
        """
        if len(rows) > self._max_rows:
            raise ValueError(f"{len(rows)} rows, the limit is {self._max_rows}; split them, or raise --max-rows")
        rows.check()
        self._group(rows.dim, rows.state_dim)
        if (foreign := np.flatnonzero(shards(rows.tables, rows.keys, self.count) != self.index)).size:
            raise ValueError(
                f"row {rows.keys[foreign[0]]} of table {rows.tables[foreign[0]]} does not belong to shard {self.index} "
                f"of {self.count}"
            )
        record = b"" if self.journal is None else pack_rows(rows, worker=worker, session=session, sequence=sequence)

        def apply() -> None:
            self._group(rows.dim, rows.state_dim).assign(rows.tables, rows.keys, rows.clocks, rows.rows)

        self._once(worker, session, sequence, apply, lambda journal: journal.append_assign(record))

    def erase(self, tables: list[int], worker: int, session: int, sequence: int) -> None:
        """Forget every row of tables, unless this request was applied before. Returns once that is durable.

        Raises:
            ValueError: an unknown table; nothing has changed.
        """

        def apply() -> None:
            for row_format, ids in self._by_format(tables).items():
                self.groups[row_format].erase(np.array(ids, np.int32))

        self._once(
            worker,
            session,
            sequence,
            apply,
            lambda journal: journal.append_erase(tables, worker, session, sequence),
        )

    def _by_format(self, tables: list[int]) -> dict[Format, list[int]]:
        if not isinstance(tables, list) or any(type(table) is not int for table in tables):
            raise ValueError(f"tables are a list of ids, got {tables!r}")
        return tables_by_format(self.schemas, tables)

    def _once(
        self, worker: int, session: int, sequence: int, apply: Callable[[], None], append: Callable[[Journal], int]
    ) -> None:
        if any(type(number) is not int or not 0 <= number < 1 << 64 for number in (worker, session, sequence)):
            raise ValueError(
                f"worker, session and sequence are 64 bits each, got {worker!r}, {session!r}, {sequence!r}"
            )
        if sequence == 0:
            raise ValueError("a request that changes rows needs a sequence number from 1; 0 is for reading")
        with self.lock:
            if not self.sessions.is_applied((worker, session), sequence):
                apply()
                self.sessions.mark((worker, session), sequence, time.monotonic())
                if self.journal is not None:
                    append(self.journal)
            change = None if self.journal is None else self.journal.last
        if self.journal is not None and change is not None:
            self.journal.wait(change)

    def check_generation(self, known: int) -> None:
        """
        Raises:
            WrongGeneration: ``known`` is neither this shard's generation nor 0.
        """
        if known not in (0, self.generation):
            raise WrongGeneration(
                f"shard {self.index} has generation {self.generation:#x}, the client knows {known:#x}: the server was "
                f"restarted without its rows. Restore the last snapshot and resume from its checkpoint"
            )

    def _push(self, request: Request, frame: np.ndarray) -> tuple[bool, int | None]:
        if request.sequence == 0:
            raise ValueError("a request that pushes rows needs a sequence number from 1; 0 is for reading")
        key = request.worker, request.session
        record = frame if self.journal is None else push_part(request, frame)
        with self.lock:
            if self.sessions.is_applied(key, request.sequence):
                # Its first arrival may still be on its way to the disk.
                return True, None if self.journal is None else self.journal.last
            apply_push(self._group(request.dim, request.state_dim), request, self.clock)
            self.sessions.mark(key, request.sequence, time.monotonic())
            return False, None if self.journal is None else self.journal.append_push(record)

    def _step(self, share: list[SharePart]) -> tuple[bool, int | None]:
        """Wait until the round of this share is applied, with it. True: it had been before."""
        last = share[-1][0]
        rounds = [request.round for request, _ in share]
        if len({(r.group, r.number, r.rank, r.ranks, r.step.tobytes()) for r in rounds}) > 1:
            raise ValueError("the frames of a share are of different rounds")
        if any((request.dim, request.state_dim) != (last.dim, last.state_dim) for request, _ in share):
            raise ValueError("the frames of a share are about different row formats")

        def apply(shares: Sequence[list[SharePart]]) -> None:
            parts = [part for each in shares for part in each]
            apply_round(self._group(last.dim, last.state_dim), [request for request, _ in parts])
            if self.journal is not None:
                self.journal.append_round([record for _, record in parts])

        mine = rounds[-1]
        key = mine.group, last.dim, last.state_dim
        wait_s = min(mine.wait_ms / 1000, _MOST_WAIT_S)
        new = self.rounds.add(key, mine.number, mine.rank, mine.ranks, mine.step, share, apply, wait_s)
        # Whoever completed the round logged it; it may still be on its way to the disk.
        return not new, None if self.journal is None else self.journal.last

    def _group(self, dim: int, state_dim: int) -> EmbeddingTable:
        try:
            return self.groups[dim, state_dim]
        except KeyError:
            raise ValueError(
                f"no table with {dim} weights and {state_dim} optimizer values a row is open; open() it first"
            ) from None

    def _check_reply_size(self, request: Request) -> None:
        """A short request can ask for any number of long rows; room for the reply is made only within the limit."""
        row = encoded_row_bytes(request.fetch_codec, request.dim, request.state_dim)
        rows = request.fetches + request.checks
        if rows * row > self._max_message_bytes:
            raise ValueError(
                f"the reply may hold {rows} rows of {row} bytes, the limit is {self._max_message_bytes} bytes; split "
                f"the request, or raise --max-message-bytes"
            )

    def table_schemas(self) -> list[dict[str, Any]]:
        return [{"id": table, **asdict(schema)} for table, schema in sorted(self.schemas.items())]

    def stats(self) -> dict[str, int]:
        groups = list(self.groups.values())
        return {
            "rows": sum(len(group) for group in groups),
            "memory_bytes": sum(group.memory_bytes for group in groups),
            "left_out": sum(group.left_out for group in groups),
            "tables": len(self.schemas),
            "sessions": len(self.sessions),
        }

    def snapshot(self, folder: Path, prefix: str) -> dict[str, Any]:
        """Write this shard's part files of a snapshot; pushes wait meanwhile."""
        with self.lock:
            return write_rows_files(folder, prefix, by_id(self.schemas), self.groups)

    def restore(self, folder: Path) -> int:
        """Replace every row by this shard's share of a snapshot; on an error nothing has changed. Returns the rows."""
        snapshot = read_snapshot(folder)
        with self.lock:
            schemas = dict(self.schemas)
            known = {schema.name: table for table, schema in schemas.items()}
            for theirs in snapshot.schemas:
                table = known.setdefault(theirs.name, max(schemas, default=-1) + 1)
                schemas.get(table, theirs).check_restores(theirs, folder)
                schemas[table] = theirs
            groups = new_groups(schemas)
            for part in snapshot.parts():
                tables = part.table_ids(known)
                mine_only = shards(tables, part.keys, self.count) == self.index
                groups[part.dim, part.state_dim].assign(
                    tables[mine_only], part.keys[mine_only], part.clocks[mine_only], part.rows[mine_only]
                )
            if self.journal is not None:
                self.journal.replace(schemas, groups)
            self.schemas, self.groups = schemas, groups
        return sum(len(group) for group in groups.values())


def by_id(schemas: dict[int, TableSchema]) -> list[TableSchema]:
    """Schemas as a list by id. An id may be free: a client that opened tables on several shards ended in between."""
    nobody = TableSchema("", 1, "sgd", 0, 0.0, 0.0, 0.0)
    return [schemas.get(table, nobody) for table in range(max(schemas, default=-1) + 1)]
