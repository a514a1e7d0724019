"""The data folder: which shard's it is, what makes up its state, and the way back to that state.

``current.json`` names a snapshot (or none) and the first log segment to replay on top; it is replaced atomically, so
that the folder is one whole state at every moment. What it does not name is left over from a crash and removed.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy as np

from cache_backend._table import EmbeddingTable, apply_push, apply_round, parse_request
from cache_backend.groups import Format, declare, new_groups, tables_by_format
from cache_backend.row_batches import unpack_rows
from cache_backend.server.cut import CutTable
from cache_backend.server.errors import LogError, StorageError
from cache_backend.server.log import (
    ASSIGN,
    ERASE,
    PUSH,
    ROUND,
    TABLES,
    Log,
    Segment,
    parse_head,
    segment_path,
    segments_in,
    sync_folder,
)
from cache_backend.server.shard import Shard, by_id
from cache_backend.snapshot import new_snapshot, read_snapshot, write_manifest, write_rows_files
from cache_backend.store import TableSchema

__all__ = ["ExitSnapshot", "Folder", "LogStorage"]

_FORMAT = 2
_ANY_ROWS = (1 << 64) - 1
_FRAME_SIZE = struct.Struct("<Q")


class Folder:
    """A data folder, held by this process alone until it ends."""

    def __init__(self, path: Path, shard: Shard, durability: str) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._identity = {
            "format": _FORMAT,
            "durability": durability,
            "shard": shard.index,
            "shards": shard.count,
            "clock": shard.clock,
        }
        self._lock = _lock(path / "lock")

    @property
    def current(self) -> Path:
        return self.path / "current.json"

    def read_current(self) -> dict[str, Any] | None:
        """The current state's description; None in a new folder.

        Raises:
            StorageError: it is another shard's.
        """
        try:
            state: dict[str, Any] = json.loads(self.current.read_text())
        except FileNotFoundError:
            return None
        except json.JSONDecodeError as error:
            raise StorageError(f"{self.current} is damaged: {error}") from None
        for name, mine in self._identity.items():
            if state.get(name) != mine:
                raise StorageError(
                    f"{self.path} was written with {name} {state.get(name)!r}, this server has {mine!r}: start it with "
                    f"the same options, or with another --data folder"
                )
        return state

    def write_current(self, state: dict[str, Any]) -> None:
        building = self.path / "current.json.tmp"
        with open(building, "w") as f:
            json.dump(self._identity | state, f)
            f.flush()
            os.fsync(f.fileno())
        building.rename(self.current)
        sync_folder(self.path)

    def others(self, base: str | None, first_segment: int) -> list[Path]:
        """Snapshots and segments that a state with this snapshot and this first segment does not need."""
        bases = [path for path in self.path.glob("base-*") if path.name != base]
        return bases + [segment_path(self.path, s) for s in segments_in(self.path) if s < first_segment]

    def close(self) -> None:
        self._lock.close()


def remove(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _lock(path: Path) -> IO[str]:
    file = open(path, "a+")  # noqa: SIM115 - stays open: the lock ends with it
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise StorageError(f"{path.parent} is in use by another hetrec-ps (process {holder})") from None
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def _write_base(
    path: Path, schemas: dict[int, TableSchema], groups: dict[Format, EmbeddingTable] | dict[Format, CutTable]
) -> None:
    with new_snapshot(path) as folder:
        files = write_rows_files(folder, "rows", by_id(schemas), groups)
        write_manifest(folder, list(schemas.values()), files)


def _load(shard: Shard, folder: Folder, state: dict[str, Any]) -> None:
    """Bring a shard to the state that the folder's description names, without the log."""
    shard.generation = state["generation"]
    shard.sessions.load(state["sessions"], time.monotonic())
    shard.rounds.load(state["rounds"])
    for table in state["tables"]:
        number = table.pop("id")
        shard.schemas[number] = TableSchema(**table)
    shard.groups = new_groups(shard.schemas)
    if state["base"] is None:
        return
    ids = {schema.name: table for table, schema in shard.schemas.items()}
    for part in read_snapshot(folder.path / state["base"]).parts():
        shard.groups[part.dim, part.state_dim].assign(part.table_ids(ids), part.keys, part.clocks, part.rows)


class ExitSnapshot:
    """Rows written at a clean end and taken up by the next start. After any other end the server starts empty."""

    def __init__(self, path: Path, shard: Shard) -> None:
        self._folder = Folder(path, shard, "none")
        self._shard = shard
        self._number = 0
        loaded = path / "loaded.json"
        if (state := self._folder.read_current()) is not None:
            _load(shard, self._folder, state)
            self._number = state["number"]
            # From now on the rows change in memory only: if this ends badly, nobody may take the old ones for current.
            self._folder.current.rename(loaded)
            sync_folder(path)
        elif loaded.exists():
            last = json.loads(loaded.read_text())
            self._number = last["number"]
            print(
                f"hetrec-ps: the last run did not end cleanly: starting empty. Rows as of its start are in "
                f"{path / last['base']}, a snapshot that clients can restore",
                file=sys.stderr,
                flush=True,
            )

    def close(self, save: bool) -> None:
        """End; with ``save``, the next start goes on from the rows of now."""
        if save:
            self._save()
        self._folder.close()

    def _save(self) -> None:
        shard = self._shard
        base = f"base-{self._number + 1:08d}"
        shutil.rmtree(self._folder.path / base, ignore_errors=True)
        _write_base(self._folder.path / base, shard.schemas, shard.groups)
        self._folder.write_current(
            {
                "generation": shard.generation,
                "number": self._number + 1,
                "base": base,
                "tables": shard.table_schemas(),
                "sessions": shard.sessions.dump(),
                "rounds": shard.rounds.dump(),
            }
        )
        remove(self._folder.others(base, 0))


class _TablesChanged(Exception):
    """The set of tables changed under a compaction."""


class LogStorage:
    """The journal of a shard: recovers it, then logs its changes, and replaces a long log by a snapshot."""

    def __init__(
        self,
        path: Path,
        shard: Shard,
        compact_bytes: int,
        on_synced: Callable[[float, int], None],
        on_failure: Callable[[OSError], None],
    ) -> None:
        self._folder = Folder(path, shard, "log")
        self._shard = shard
        self._compact_bytes = compact_bytes
        self._replaced = 0  # how often a restore gave the shard another state
        self._due = threading.Event()
        self._closing = False
        state = self._folder.read_current()
        if state is None:
            self._refuse_orphans()
            segment, change, resume_at = 1, 0, None
        else:
            remove([*self._folder.others(state["base"], state["first_segment"]), *path.glob(".base-*.tmp")])
            _load(shard, self._folder, state)
            segment, change, resume_at = self._replay(state)
        self._log = Log(path, segment, change, on_synced, on_failure)
        self._log.bytes = sum(segment_path(path, s).stat().st_size for s in segments_in(path) if s < segment)
        self._log.begin(resume_at)
        if state is None:
            self._describe(None, 1, 0, {})
        shard.journal = self
        self._thread = threading.Thread(target=self._compact_loop, name="compaction", daemon=True)
        self._thread.start()

    # Journal

    def append_tables(self, tables: list[dict[str, Any]]) -> int:
        return self._log.append(TABLES, json.dumps(tables).encode())

    def append_push(self, frame: np.ndarray) -> int:
        return self._append(PUSH, frame.data)

    def append_assign(self, rows: bytes) -> int:
        return self._append(ASSIGN, rows)

    def append_erase(self, tables: list[int], worker: int, session: int, sequence: int) -> int:
        note = {"tables": tables, "worker": worker, "session": session, "sequence": sequence}
        return self._append(ERASE, json.dumps(note).encode())

    def _append(self, kind: bytes, payload: bytes | memoryview) -> int:
        if self._log.bytes > self._compact_bytes:
            self._due.set()
        return self._log.append(kind, payload)

    def append_round(self, frames: Sequence[np.ndarray]) -> int:
        pieces: list[Any] = []
        for frame in frames:
            pieces += [_FRAME_SIZE.pack(frame.nbytes), frame.data]
        return self._append(ROUND, b"".join(pieces))

    @property
    def last(self) -> int:
        return self._log.last

    def wait(self, change: int) -> None:
        self._log.wait(change)

    def replace(self, schemas: dict[int, TableSchema], groups: dict[Format, EmbeddingTable]) -> None:
        segment = self._log.rotate()
        base = f"base-{segment:08d}"
        _write_base(self._folder.path / base, schemas, groups)
        tables = [{"id": table, **asdict(schema)} for table, schema in sorted(schemas.items())]
        self._describe(base, segment, self._log.last, {}, tables)
        self._replaced += 1
        remove(self._folder.others(base, segment))

    # Compaction

    def compact(self) -> None:
        """Write all rows as a snapshot and drop the log before it. Pushes go on meanwhile.

        Each bucket is copied in an instant of its own; the description notes after which change. Replay then leaves out
        what a bucket already holds.
        """
        while True:
            try:
                return self._compact()
            except _TablesChanged:
                continue

    def _compact(self) -> None:
        shard = self._shard
        with shard.lock:
            segment = self._log.rotate()
            change, replaced = self._log.last, self._replaced
            schemas, groups = dict(shard.schemas), dict(shard.groups)
            tables, sessions, rounds = shard.table_schemas(), shard.sessions.dump(), shard.rounds.dump()

        def last_change() -> int:
            if len(shard.schemas) != len(schemas) or self._replaced != replaced:
                raise _TablesChanged
            return self._log.last

        base = f"base-{segment:08d}"
        cuts = {row_format: CutTable(group, shard.lock, last_change) for row_format, group in groups.items()}
        _write_base(self._folder.path / base, schemas, cuts)
        # A bucket may hold pushes that are not on the disk yet; they must be before the snapshot counts.
        self._log.wait(self._log.last)
        changes = {f"{dim}x{state_dim}": cut.changes for (dim, state_dim), cut in cuts.items()}
        with shard.lock:
            if self._replaced != replaced:  # by a restore, which wrote a snapshot of its own
                others = [self._folder.path / base]
            else:
                self._describe(base, segment, change, changes, tables, sessions, rounds)
                others = self._folder.others(base, segment)
        remove(others)

    @property
    def log_bytes(self) -> int:
        return self._log.bytes

    def close(self, compact: bool) -> None:
        self._closing = True
        self._due.set()
        self._thread.join()
        if compact:
            self.compact()
        self._log.close()
        self._folder.close()

    def _compact_loop(self) -> None:
        while True:
            self._due.wait()
            if self._closing:
                return
            self._due.clear()
            if self._log.bytes <= self._compact_bytes:
                continue
            try:
                self.compact()
            except Exception as error:  # the log still holds everything
                print(f"hetrec-ps: the log could not be compacted: {error}", file=sys.stderr, flush=True)
                self._compact_bytes *= 2

    def _describe(
        self,
        base: str | None,
        first_segment: int,
        change: int,
        cuts: dict[str, list[int]],
        tables: list[dict[str, Any]] | None = None,
        sessions: list[list[int]] | None = None,
        rounds: list[list[int]] | None = None,
    ) -> None:
        shard = self._shard
        self._folder.write_current(
            {
                "generation": shard.generation,
                "base": base,
                "first_segment": first_segment,
                "change": change,
                "cuts": cuts,
                "tables": shard.table_schemas() if tables is None else tables,
                "sessions": shard.sessions.dump() if sessions is None else sessions,
                "rounds": shard.rounds.dump() if rounds is None else rounds,
            }
        )
        self._log.forget_before()

    # Recovery

    def _refuse_orphans(self) -> None:
        for segment in segments_in(self._folder.path):
            path = segment_path(self._folder.path, segment)
            if any(kind in (TABLES, PUSH, ROUND) for kind, _, _ in Segment(path).records(is_last=True)):
                raise StorageError(f"{path} is a log, but {self._folder.current} is absent: restore that file")
            path.unlink()

    def _replay(self, state: dict[str, Any]) -> tuple[int, int, int | None]:
        """Apply the log on top of the snapshot. Returns last segment, last change, and where to go on writing."""
        segments = [s for s in segments_in(self._folder.path) if s >= state["first_segment"]]
        if segments != list(range(state["first_segment"], state["first_segment"] + max(1, len(segments)))):
            raise LogError(
                f"{self._folder.path} lacks segments of the log from {state['first_segment']}: has {segments}"
            )
        change = state["change"]
        cuts = {name: np.asarray(changes, np.int64) for name, changes in state["cuts"].items()}
        end = 0
        for number in segments:
            segment = Segment(segment_path(self._folder.path, number))
            records = segment.records(is_last=number == segments[-1])
            first = next(records, None)
            if first is not None and parse_head(first[0], first[1], segment.path)["change"] != change:
                raise LogError(f"{segment.path} does not continue the segment before it at change {change}")
            for kind, payload, offset in records:
                change += 1
                self._redo(kind, payload, change, cuts, f"{segment.path}: the record at byte {offset}")
            end = segment.end
            if (size := segment.path.stat().st_size) > end:
                print(
                    f"hetrec-ps: {segment.path}: cut off {size - end} bytes from byte {end} on, a write that a crash "
                    f"interrupted and nobody was told of",
                    file=sys.stderr,
                    flush=True,
                )
        # A segment without its first record was being made when the server died: made again.
        return segments[-1], change, end or None

    def _redo(self, kind: bytes, payload: memoryview, change: int, cuts: dict[str, np.ndarray], where: str) -> None:
        shard = self._shard
        if kind == TABLES:
            for table in json.loads(bytes(payload)):
                number = table.pop("id")
                shard.schemas[number] = TableSchema(**table)
                declare(shard.groups, number, shard.schemas[number])
        elif kind == PUSH:
            frame = np.frombuffer(payload, np.uint8)
            request = parse_request(frame, _ANY_ROWS)
            row_format = request.dim, request.state_dim
            apply_push(shard.groups[row_format], request, shard.clock, _held(cuts, row_format, change))
            shard.sessions.mark((request.worker, request.session), request.sequence, time.monotonic())
        elif kind == ASSIGN:
            rows, note = unpack_rows(payload)
            row_format = rows.dim, rows.state_dim
            held = _held(cuts, row_format, change)
            shard.groups[row_format].assign(rows.tables, rows.keys, rows.clocks, rows.rows, held)
            shard.sessions.mark((note["worker"], note["session"]), note["sequence"], time.monotonic())
        elif kind == ERASE:
            note = json.loads(bytes(payload))
            for row_format, ids in tables_by_format(shard.schemas, note["tables"]).items():
                shard.groups[row_format].erase(np.array(ids, np.int32), _held(cuts, row_format, change))
            shard.sessions.mark((note["worker"], note["session"]), note["sequence"], time.monotonic())
        elif kind == ROUND:
            requests = [parse_request(frame, _ANY_ROWS) for frame in _frames(payload)]
            row_format = requests[0].dim, requests[0].state_dim
            apply_round(shard.groups[row_format], requests, _held(cuts, row_format, change))
            shard.rounds.mark((requests[0].round.group, *row_format), requests[0].round.number)
        else:
            raise LogError(f"{where} is of an unknown kind {kind!r}; a newer release wrote it")


def _held(cuts: dict[str, np.ndarray], row_format: Format, change: int) -> np.ndarray | None:
    """Flags, uint8 (BUCKETS,), of the buckets whose copy in the snapshot has this change already; None: there is
    none."""
    cut = cuts.get("{}x{}".format(*row_format))
    held = None if cut is None else cut >= change
    return None if held is None or not held.any() else held.view(np.uint8)


def _frames(payload: memoryview) -> Iterator[np.ndarray]:
    """The frames of a round's record: each after its size."""
    at = 0
    while at < len(payload):
        (size,) = _FRAME_SIZE.unpack_from(payload, at)
        at += _FRAME_SIZE.size
        yield np.frombuffer(payload[at : at + size], np.uint8)
        at += size
