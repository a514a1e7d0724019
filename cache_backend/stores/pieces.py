"""A request cut by shard and by size, and the replies put together again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from cache_backend import _table
from cache_backend.store import Check, ExchangeReply, ExchangeRequest, Fetch, Push

__all__ = ["Answer", "Part", "Piece", "join", "split"]


@dataclass
class Answer:
    """A decoded reply, and the bytes of both frames."""

    rows: np.ndarray
    clocks: np.ndarray
    fresh: np.ndarray
    stale: np.ndarray
    stale_rows: np.ndarray
    stale_clocks: np.ndarray
    lags: np.ndarray
    sent: int
    received: int


@dataclass
class Piece:
    """What travels in one frame. ``sequence``: its number at the shard, 0 until it has one. ``frame``: as it was sent,
    until it is answered."""

    request: ExchangeRequest
    sequence: int = 0
    frame: np.ndarray | None = None
    answer: Answer | None = None


@dataclass
class Part:
    """One shard's share. checks, fetches: where its rows stand in the whole request, int64; None: everything."""

    checks: np.ndarray | None
    fetches: np.ndarray | None
    pieces: list[Piece] = field(default_factory=list)


def split(request: ExchangeRequest, shards: int, max_bytes: int) -> list[Part]:
    """One part a shard; a shard without rows gets a part without pieces."""
    if shards == 1:
        return [Part(None, None, [Piece(r) for r in _pieces(request, max_bytes)])]
    push, check, fetch = request.push, request.check, request.fetch
    of_push, of_check, of_fetch = (_table.shards(rows.tables, rows.keys, shards) for rows in (push, check, fetch))
    parts = []
    for shard in range(shards):
        pushes, checks, fetches = (np.flatnonzero(of == shard) for of in (of_push, of_check, of_fetch))
        share = ExchangeRequest(
            request.dim,
            request.state_dim,
            _pushes(push, pushes),
            _checks(check, checks),
            Fetch(fetch.tables[fetches], fetch.keys[fetches]),
        )
        parts.append(Part(checks, fetches, [Piece(r) for r in _pieces(share, max_bytes)]))
    return parts


def join(request: ExchangeRequest, parts: list[Part]) -> ExchangeReply:
    """The answers of all pieces as one reply in the request's order."""
    answers = list(_answers(parts))
    sent, received = sum(a.sent for _, _, a in answers), sum(a.received for _, _, a in answers)
    if len(parts) == 1 and len(answers) == 1:
        a = answers[0][2]
        return ExchangeReply(a.rows, a.clocks, a.fresh, a.stale, a.stale_rows, a.stale_clocks, a.lags, sent, received)
    n, width = len(request.fetch.keys), request.width
    reply = ExchangeReply(
        np.empty((n, width), np.float32),
        np.empty(n, np.int64),
        np.empty(n, np.uint8),
        np.concatenate([np.empty(0, np.int32), *(checks[a.stale].astype(np.int32) for checks, _, a in answers)]),
        np.concatenate([np.empty((0, width), np.float32), *(a.stale_rows for _, _, a in answers)]),
        np.concatenate([np.empty(0, np.int64), *(a.stale_clocks for _, _, a in answers)]),
        sum((a.lags for _, _, a in answers), np.zeros(_table.LAG_BINS, np.int64)),
        sent,
        received,
    )
    for _, fetches, a in answers:
        reply.rows[fetches], reply.clocks[fetches], reply.fresh[fetches] = a.rows, a.clocks, a.fresh
    return reply


def _answers(parts: list[Part]) -> Iterator[tuple[np.ndarray, np.ndarray, Answer]]:
    """Every answer with the places of its checks and fetches in the whole request."""
    for part in parts:
        n_checks = n_fetches = 0
        for piece in part.pieces:
            assert piece.answer is not None
            checks = np.arange(n_checks, n_checks + len(piece.request.check.keys))
            fetches = np.arange(n_fetches, n_fetches + len(piece.request.fetch.keys))
            n_checks, n_fetches = n_checks + len(checks), n_fetches + len(fetches)
            yield (
                checks if part.checks is None else part.checks[checks],
                fetches if part.fetches is None else part.fetches[fetches],
                piece.answer,
            )


def _pieces(request: ExchangeRequest, max_bytes: int) -> list[ExchangeRequest]:
    """Frames and replies below the limit, pushes first; no piece where there is nothing to say."""
    if request.is_empty:
        return []
    push, check, fetch = request.push, request.check, request.fetch
    row = 4 * request.width + 40  # no encoding of a row, its name and its clocks takes more
    if (len(push.keys) + len(check.keys) + len(fetch.keys)) * row <= max_bytes:
        return [request]
    step = max(1, max_bytes // row)
    no_check, no_fetch = Check(), Fetch(fetch.tables[:0], fetch.keys[:0])
    pieces = [
        ExchangeRequest(request.dim, request.state_dim, _pushes(push, slice(i, i + step)), no_check, no_fetch)
        for i in range(0, len(push.keys), step)
    ]
    step = max(1, step // 2)  # of checks and fetches each
    for i in range(0, max(len(check.keys), len(fetch.keys)), step):
        s = slice(i, i + step)
        query = _checks(check, s), Fetch(fetch.tables[s], fetch.keys[s])
        pieces.append(ExchangeRequest(request.dim, request.state_dim, Push.nothing(request.width), *query))
    return pieces


def _pushes(push: Push, which: np.ndarray | slice) -> Push:
    return Push(push.tables[which], push.keys[which], push.starts[which], push.clocks[which], push.deltas[which])


def _checks(check: Check, which: np.ndarray | slice) -> Check:
    return Check(check.tables[which], check.keys[which], check.clocks[which], check.staleness[which])
