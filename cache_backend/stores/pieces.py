"""A request cut by shard and by size, and its answers put together again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cache_backend import _table
from cache_backend.store import Check, ExchangeReply, ExchangeRequest, Fetch, Push, Share

__all__ = ["Answer", "Piece", "Pieces"]

# Rows of about as many bytes, pushed and fetched, make a piece: while one travels, the server works on another, and the
# answer to a third one comes back.
_PIECE_BYTES = 512 << 10
_MOST_PIECES = 16  # of a shard, unless a limit asks for more
# One deadline is that of all that is under way. A server remembers the last 64 requests.
_MOST_UNDER_WAY = 32
_MOST_BYTES_UNDER_WAY = 64 << 20
_NAME_BYTES = 40  # of a row's name and clocks, in any encoding

Rows = np.ndarray | slice
_ALL = slice(None)


@dataclass
class Answer:
    """A decoded reply, and the bytes of both frames."""

    rows: np.ndarray
    clocks: np.ndarray
    fresh: np.ndarray
    lags: np.ndarray
    stale: np.ndarray
    stale_rows: np.ndarray
    stale_clocks: np.ndarray
    sent: int
    received: int


@dataclass
class Piece:
    """What travels in one frame: these pushes, checks and fetches of the whole request.

    ``size``: bytes of its frame or its reply, at most. ``sequence``: its number at the shard, 0 until it has one.
    ``frame``: as it was sent, until it is answered. ``share``: these rows of the request's share; None: no part of it.
    ``before``: the pieces with the rows before these, which are answered when this one is.
    """

    pushes: Rows
    checks: Rows
    fetches: Rows
    size: int
    sequence: int = 0
    frame: np.ndarray | None = None
    answered: bool = False
    share: Rows | None = None
    more: bool = False  # of the share, in the next piece
    before: list[Piece] = field(default_factory=list)


class Pieces:
    """A request in pieces, ``of_shard[i]`` those of shard i, and what is known of the reply.

    A row's push, check and fetch travel together, so that the answers hold the push.

    Args:
        request: the whole.
        shards: how many servers there are.
        row_bytes: of a pushed and a fetched row as they travel, together.
        max_bytes: neither a frame nor a reply becomes larger.
    """

    def __init__(self, request: ExchangeRequest, shards: int, row_bytes: int, max_bytes: int) -> None:
        self.request = request
        self.of_shard = _split(request, shards, row_bytes, max_bytes)
        # Shards are asked side by side.
        self._lock = threading.Lock()
        self._reply: ExchangeReply | None = None

    def left(self, shard: int) -> Iterator[list[Piece]]:
        """What was not answered yet, as much at once as may be under way."""
        some: list[Piece] = []
        for piece in self.of_shard[shard]:
            if piece.answered:
                continue
            if (
                some
                and not some[-1].more
                and (len(some) == _MOST_UNDER_WAY or sum(p.size for p in some) + piece.size > _MOST_BYTES_UNDER_WAY)
            ):
                yield some
                some = []
            some.append(piece)
        if some:
            yield some

    def encode(self, piece: Piece, **header: Any) -> np.ndarray:
        """A piece's frame; ``header``: the rest of ``_table.encode_request``'s arguments."""
        push, p = self.request.push, piece.pushes
        deltas, places = (push.deltas[p], None) if isinstance(p, slice) else (push.deltas, p)  # rows are not copied
        frame: np.ndarray = _table.encode_request(
            push_tables=push.tables[p],
            push_keys=push.keys[p],
            push_starts=push.starts[p],
            push_clocks=push.clocks[p],
            deltas=deltas,
            places=places,
            **self._asked(piece),
            **header,
        )
        return frame

    def encode_share(self, piece: Piece, **header: Any) -> np.ndarray:
        """The frame of a piece with rows of the share; ``header``: the rest of ``_table.encode_share``'s arguments."""
        share, s = self.request.share, piece.share
        assert share is not None
        frame: np.ndarray = _table.encode_share(
            group=share.group,
            number=share.number,
            rank=share.rank,
            ranks=share.ranks,
            more=piece.more,
            step=share.step,
            push_tables=share.tables[s],
            push_keys=share.keys[s],
            gradients=share.gradients[s],
            **self._asked(piece),
            **header,
        )
        return frame

    def _asked(self, piece: Piece) -> dict[str, Any]:
        """What both kinds of frames say: the row format, checks and fetches."""
        check, fetch = self.request.check, self.request.fetch
        c, f = piece.checks, piece.fetches
        return {
            "dim": self.request.dim,
            "state_dim": self.request.state_dim,
            "check_tables": check.tables[c],
            "check_keys": check.keys[c],
            "check_clocks": check.clocks[c],
            "check_staleness": check.staleness[c],
            "fetch_tables": fetch.tables[f],
            "fetch_keys": fetch.keys[f],
        }

    def take(self, piece: Piece, answer: Answer) -> None:
        """A piece was answered."""
        if piece.more:
            return  # the server keeps a share only while its last piece waits: until then all of it may be sent again
        for each in (*piece.before, piece):
            each.answered, each.frame = True, None
        a = answer
        with self._lock:
            if self._reply is None and piece.fetches is _ALL:
                self._reply = ExchangeReply(
                    a.rows, a.clocks, a.fresh, a.stale, a.stale_rows, a.stale_clocks, a.lags, a.sent, a.received
                )
                return
            reply = self.reply()
            checks = np.arange(len(self.request.check.keys))[piece.checks]
            reply.stale = np.concatenate([reply.stale, checks[a.stale].astype(np.int32)])
            reply.stale_rows = np.concatenate([reply.stale_rows, a.stale_rows])
            reply.stale_clocks = np.concatenate([reply.stale_clocks, a.stale_clocks])
            reply.lags += a.lags
            reply.bytes_sent += a.sent
            reply.bytes_received += a.received
        reply.rows[piece.fetches] = a.rows
        reply.clocks[piece.fetches] = a.clocks
        reply.fresh[piece.fetches] = a.fresh

    def reply(self) -> ExchangeReply:
        """What was answered, in the request's order."""
        if self._reply is None:
            n, width = len(self.request.fetch.keys), self.request.width
            i64 = np.empty(0, np.int64)
            self._reply = ExchangeReply(
                np.empty((n, width), np.float32),
                np.empty(n, np.int64),
                np.empty(n, np.uint8),
                np.empty(0, np.int32),
                np.empty((0, width), np.float32),
                i64,
                np.zeros(_table.LAG_BINS, np.int64),
                bytes_sent=0,
                bytes_received=0,
            )
        return self._reply


def _split(request: ExchangeRequest, shards: int, row_bytes: int, max_bytes: int) -> list[list[Piece]]:
    """A shard without rows gets no piece, unless it waits for a share."""
    if request.is_empty:
        return [[] for _ in range(shards)]
    if request.share is not None:
        others = _split(replace(request, share=None), shards, row_bytes, max_bytes)
        rows = _divided(request.share, shards)
        return [_after(_share(rows[i], request, max_bytes), others[i], max_bytes) for i in range(shards)]
    push, check, fetch = request.push, request.check, request.fetch
    travelling = max(len(push.keys), len(fetch.keys)) * row_bytes
    each = min(max(travelling // (shards * _PIECE_BYTES), 1), _MOST_PIECES)
    if shards * each == 1:
        return [_below((_ALL, _ALL, _ALL), request, max_bytes)]
    # By bucket, as rows are divided over shards: the pieces of a shard are what as many more shards would get.
    of_push, of_check, of_fetch = (_divided(rows, shards * each) for rows in (push, check, fetch))
    parts = list(zip(of_push, of_check, of_fetch, strict=True))
    return [
        [piece for part in parts[i * each : (i + 1) * each] for piece in _below(part, request, max_bytes)]
        for i in range(shards)
    ]


def _share(rows: np.ndarray, request: ExchangeRequest, max_bytes: int) -> list[Piece]:
    """These rows of the share, in pieces that follow each other; at least one, for an empty share is one too."""
    row, none = 4 * request.dim + _NAME_BYTES, slice(0, 0)
    step = max(1, max_bytes // row)
    parts = [rows[i : i + step] for i in range(0, max(1, len(rows)), step)]
    pieces = [Piece(none, none, none, row * len(part), share=part, more=True) for part in parts]
    pieces[-1].more, pieces[-1].before = False, pieces[:-1]
    return pieces


def _after(share: list[Piece], others: list[Piece], max_bytes: int) -> list[Piece]:
    """The others behind the share, the first of them in one frame with its end where it fits."""
    if others and share[-1].size + others[0].size <= max_bytes:
        end, first = share[-1], others[0]
        end.checks, end.fetches, end.size = first.checks, first.fetches, end.size + first.size
        others = others[1:]
    return share + others


def _divided(rows: Push | Check | Fetch | Share, parts: int) -> list[np.ndarray]:
    """Places of the rows of each part, ascending."""
    part = _table.shards(rows.tables, rows.keys, parts)
    ends = np.cumsum(np.bincount(part, minlength=parts))
    return np.split(np.argsort(part, kind="stable"), ends[:-1])


def _below(part: tuple[Rows, Rows, Rows], request: ExchangeRequest, max_bytes: int) -> list[Piece]:
    """These pushes, checks and fetches in frames and replies below the limit, pushes first; nothing for nothing."""
    row = 4 * request.width + _NAME_BYTES
    numbers = (len(request.push.keys), len(request.check.keys), len(request.fetch.keys))
    pushes, checks, fetches = (np.arange(n)[which] for n, which in zip(numbers, part, strict=True))
    size = row * (len(pushes) + len(checks) + len(fetches))
    if size <= max_bytes:
        return [Piece(*part, size)] if size else []
    none = slice(0, 0)
    step = max(1, max_bytes // row)
    pieces = [Piece(pushes[i : i + step], none, none, max_bytes) for i in range(0, len(pushes), step)]
    step = max(1, step // 2)  # of checks and fetches each
    for i in range(0, max(len(checks), len(fetches)), step):
        pieces.append(Piece(none, checks[i : i + step], fetches[i : i + step], max_bytes))
    return pieces
