"""The write-ahead log: segments of checksummed records; one fsync serves every request that waits for it.

A record is u32 length, u32 zlib.crc32 (both little-endian) and as many bytes as the length says: a byte for the kind,
then the payload. Every batch that is written begins with a *commit* record, which says at which offset it stands:
everything before a readable commit record had reached the disk when it was written. So a damaged record at the end of
the last segment is told from damage to what was acknowledged: after the former no commit record follows.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cache_backend.server.errors import LogError, LogFailed

__all__ = ["ASSIGN", "ERASE", "PUSH", "ROUND", "TABLES", "Log", "Segment"]

SEGMENT, COMMIT, TABLES, PUSH = b"S", b"C", b"T", b"P"
ROUND, ASSIGN, ERASE = b"R", b"A", b"E"
_FORMAT = 2
_HEAD = struct.Struct("<II")
_COMMIT_MARK = bytes.fromhex("6865747265632d636f6d6d69740a8100")
_COMMIT = struct.Struct("<16sQ")

#: (kind, payload, offset of the record)
Record = tuple[bytes, memoryview, int]


def record(kind: bytes, payload: bytes | memoryview) -> list[bytes | memoryview]:
    """A record in pieces, so that a large payload is not copied."""
    return [_HEAD.pack(1 + len(payload), zlib.crc32(payload, zlib.crc32(kind))) + kind, payload]


class Segment:
    """A segment on disk, for reading. ``end``: where its last whole record ends, known once ``records`` is through."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.end = 0

    def records(self, is_last: bool) -> Iterator[Record]:
        """All records but commits.

        Raises:
            LogError: a damaged record that had been acknowledged; names file and offset. At the end of the last
                segment a damaged record was not, and ends the log.
        """
        size = self.path.stat().st_size
        if size == 0:
            if not is_last:
                raise LogError(f"{self.path} is empty, and is not the last segment of the log")
            return
        with open(self.path, "rb") as f:
            data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)  # lives as long as payloads look into it
        view = memoryview(data)
        at = 0
        while at < size:
            body = _body(view, at)
            if body is None:
                if not is_last or _commit_follows(data, view, at):
                    raise LogError(
                        f"{self.path}: the record at byte {at} is damaged, and it had been acknowledged. Put back an "
                        f"undamaged copy, or start with an empty --data folder and restore the last snapshot"
                    )
                return
            kind = bytes(body[:1])
            if kind != COMMIT:
                yield kind, body[1:], at
            at += _HEAD.size + len(body)
            self.end = at


def _body(view: memoryview, at: int) -> memoryview | None:
    """The record's bytes after length and checksum; None where there is no whole record."""
    if at + _HEAD.size > len(view):
        return None
    length, checksum = _HEAD.unpack_from(view, at)
    start = at + _HEAD.size
    if length < 1 or start + length > len(view):
        return None
    body = view[start : start + length]
    return body if zlib.crc32(body) == checksum else None


def _commit_follows(data: mmap.mmap, view: memoryview, at: int) -> bool:
    while (found := data.find(_COMMIT_MARK, at)) != -1:
        start = found - _HEAD.size - 1
        body = _body(view, start) if start > at else None
        if body is not None and len(body) == 1 + _COMMIT.size and _COMMIT.unpack(body[1:])[1] == start:
            return True
        at = found + 1
    return False


class Log:
    """The end of the log, for appending. Changes are numbered on through all segments.

    Appends come from one thread at a time (under the shard's lock); a thread of the log's own writes what has gathered,
    syncs, and wakes all who waited for it.

    Args:
        on_synced: called with the seconds that a write and sync took, and its bytes.
        on_failure: called once when the disk refuses; from then on ``wait`` raises LogFailed.
    """

    def __init__(
        self,
        folder: Path,
        segment: int,
        change: int,
        on_synced: Callable[[float, int], None],
        on_failure: Callable[[OSError], None],
    ) -> None:
        self.segment = segment
        self.last = change
        self.bytes = 0  # of the segments since the last snapshot
        self._folder = folder
        self._on_synced, self._on_failure = on_synced, on_failure
        self._changed = threading.Condition()
        self._pending: list[bytes | memoryview] = []
        self._durable = change
        self._failure: OSError | None = None
        self._closing = False
        self._file = -1
        self._size = 0
        self._thread = threading.Thread(target=self._commit_loop, name="log", daemon=True)

    def begin(self, resume_at: int | None) -> None:
        """Open the last segment: go on after its byte ``resume_at``, or make it (None)."""
        if resume_at is None:
            self._create()
        else:
            self._file = os.open(segment_path(self._folder, self.segment), os.O_RDWR)
            os.ftruncate(self._file, resume_at)
            os.fsync(self._file)
            os.lseek(self._file, resume_at, os.SEEK_SET)
            self._size = resume_at
        self.bytes += self._size
        self._thread.start()

    def _create(self) -> None:
        path = segment_path(self._folder, self.segment)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        head = {"format": _FORMAT, "segment": self.segment, "change": self.last}
        self._size = write_all(self._file, record(SEGMENT, json.dumps(head).encode()))
        os.fsync(self._file)
        sync_folder(self._folder)

    def append(self, kind: bytes, payload: bytes | memoryview) -> int:
        """Number of the change, which ``wait`` waits for. The payload must not be altered afterwards."""
        pieces = record(kind, payload)
        with self._changed:
            self._pending += pieces
            self.last += 1
            self._changed.notify_all()
            return self.last

    def wait(self, change: int) -> None:
        """Return once the change and all before it are on the disk.

        Raises:
            LogFailed: they will never be.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._durable >= change or self._failure is not None)
            if self._durable < change:
                raise LogFailed(f"the log in {self._folder} cannot be written: {self._failure}")

    def rotate(self) -> int:
        """Go on in a new segment; returns its number. Nothing may be appended meanwhile."""
        self.wait(self.last)
        with self._changed:
            os.close(self._file)
            self.segment += 1
            self._create()
            self.bytes += self._size
            return self.segment

    def forget_before(self) -> None:
        """Segments before the present one no longer count."""
        with self._changed:
            self.bytes = self._size

    def close(self) -> None:
        """Write what is pending and end."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        os.close(self._file)

    def _commit_loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closing)
                if not self._pending:
                    return
                batch, self._pending, last = self._pending, [], self.last
            start = time.perf_counter()
            try:
                commit = record(COMMIT, _COMMIT.pack(_COMMIT_MARK, self._size))
                written = write_all(self._file, [*commit, *batch])
                os.fdatasync(self._file)
            except OSError as error:
                # What reached the disk is unknown from here on, and a second fsync would not tell: stop.
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                self._on_failure(error)
                return
            self._on_synced(time.perf_counter() - start, written)
            with self._changed:
                self._size += written
                self.bytes += written
                self._durable = last
                self._changed.notify_all()


def segment_path(folder: Path, segment: int) -> Path:
    return folder / f"log-{segment:08d}"


def segments_in(folder: Path) -> list[int]:
    return sorted(int(path.name[4:]) for path in folder.glob("log-*") if path.name[4:].isdecimal())


def write_all(file: int, pieces: list[bytes | memoryview]) -> int:
    """Write every byte; returns how many."""
    most = 512  # pieces a call: below any system's limit
    total = 0
    for first in range(0, len(pieces), most):
        some = pieces[first : first + most]
        left = sum(len(piece) for piece in some)
        total += left
        written = os.writev(file, some)
        if written < left:  # a signal, or a disk that is filling up
            rest = memoryview(b"".join(some))[written:]
            while rest:
                rest = rest[os.write(file, rest) :]
    return total


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def parse_head(kind: bytes, payload: memoryview, path: Path) -> dict[str, Any]:
    """What a segment's first record says."""
    head: dict[str, Any] = json.loads(bytes(payload)) if kind == SEGMENT else {}
    if head.get("format") != _FORMAT:
        raise LogError(f"{path} has log format {head.get('format')!r}; this version reads {_FORMAT}")
    return head
