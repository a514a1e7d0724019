"""Frames written and read in plain Python from cache_backend/PROTOCOL.md alone, without the code under test."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

Rows = list[list[float]]
_REQUEST = struct.Struct("<4sIIHBBIIIIII8xQQQQQQ")
_ROUND = struct.Struct("<QQIIII7f4x")
_REPLY = struct.Struct("<4sIHBBIIIIIQQ")


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_CRC = _crc_table()


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


@dataclass
class Round:
    """A round header. step: learning rate, eps, beta1, beta2, weight decay, largest value and norm of a gradient."""

    group: int = 1
    number: int = 1
    rank: int = 0
    ranks: int = 1
    more: int = 0
    wait_ms: int = 0
    step: tuple[float, ...] = (0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

    def pack(self) -> bytes:
        return _ROUND.pack(self.group, self.number, self.rank, self.ranks, self.more, self.wait_ms, *self.step)


@dataclass
class Request:
    """Every field of a request frame. pushes: (table, key, c_c, c_c - c_s), or in a round (table, key); checks: (table,
    key, c_c, s)."""

    dim: int
    state_dim: int
    worker: int = 0
    session: int = 0
    sequence: int = 0
    generation: int = 0
    push_codec: int = 0
    fetch_codec: int = 0
    pushes: list[tuple[int, int, int, int]] = field(default_factory=list)
    deltas: Rows = field(default_factory=list)
    checks: list[tuple[int, int, int, int]] = field(default_factory=list)
    fetches: list[tuple[int, int]] = field(default_factory=list)
    round: Round | None = None


@dataclass
class Reply:
    """fetched: (c_g, row), or None where fresh. lags: 18 counts. stale: (index, c_g, row)."""

    codec: int
    dim: int
    state_dim: int
    generation: int
    sequence: int
    fetched: list[tuple[int, list[float]] | None]
    lags: list[int]
    stale: list[tuple[int, int, list[float]]]


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, n: int) -> bytes:
        assert self.at + n <= len(self.data), "the frame is too short"
        self.at += n
        return self.data[self.at - n : self.at]

    def block(self, n: int) -> list[int]:
        base, bits, zeros = struct.unpack("<qB7s", self.take(16))
        assert zeros == bytes(7)
        words = self.take((n * bits + 63) // 64 * 8)
        packed = int.from_bytes(words, "little")
        assert packed >> n * bits == 0, "the last word is not filled up with zeros"
        return [_signed(base + (packed >> i * bits & (1 << bits) - 1)) for i in range(n)]

    def rows(self, codec: int, n: int, dim: int, state_dim: int) -> Rows:
        start = self.at
        rows = [self._values(codec, dim) + self._values(0 if codec == 0 else 2, state_dim) for _ in range(n)]
        padding = self.take(-(self.at - start) % 8)
        assert padding == bytes(len(padding))
        return rows

    def _values(self, codec: int, n: int) -> list[float]:
        if codec == 0:
            return list(struct.unpack(f"<{n}f", self.take(4 * n)))
        if codec == 1:
            return list(struct.unpack(f"<{n}e", self.take(2 * n)))
        if codec == 2:
            halves = struct.unpack(f"<{n}H", self.take(2 * n))
            return [struct.unpack("<f", struct.pack("<I", half << 16))[0] for half in halves]
        (scale,) = struct.unpack("<f", self.take(4))
        return [scale * q for q in struct.unpack(f"<{n}b", self.take(n))]


def _signed(value: int) -> int:
    value %= 1 << 64
    return value - (1 << 64) if value >> 63 else value


def decode_request(frame: bytes) -> Request:
    (magic, push_crc, query_crc, version, push_codec, fetch_codec, dim, state_dim, pushes, checks, fetches, kind,
     generation, worker, session, sequence, push_bytes, query_bytes) = _REQUEST.unpack_from(frame)  # fmt: skip
    assert (magic, version) == (b"HETQ", 2)
    assert kind in (0, 1)
    assert frame[40:48] == bytes(8)
    assert len(frame) == 96 + push_bytes + query_bytes
    assert push_crc == crc32c(frame[12 : 96 + push_bytes])
    assert query_crc == crc32c(frame[96 + push_bytes :])
    push = _Reader(frame[96 : 96 + push_bytes])
    round_ = None
    if kind:
        group, number, rank, ranks, more, wait_ms, *step = _ROUND.unpack(push.take(64))
        round_ = Round(group, number, rank, ranks, more, wait_ms, tuple(step))
    columns = [push.block(pushes) for _ in range(2 if kind else 4)]
    deltas = push.rows(push_codec, pushes, dim, 0 if kind else state_dim)
    assert push.at == push_bytes
    query = _Reader(frame[96 + push_bytes :])
    asked = [query.block(checks) for _ in range(4)]
    wanted = [query.block(fetches) for _ in range(2)]
    assert query.at == query_bytes
    return Request(
        dim, state_dim, worker, session, sequence, generation, push_codec, fetch_codec,
        list(zip(*columns, strict=True)), deltas, list(zip(*asked, strict=True)), list(zip(*wanted, strict=True)),
        round_,
    )  # fmt: skip


def decode_reply(frame: bytes) -> Reply:
    magic, crc, version, codec, zero, dim, state_dim, fetches, written, stale, generation, sequence = (
        _REPLY.unpack_from(frame)
    )
    assert (magic, version, zero) == (b"HETR", 2, 0)
    assert crc == crc32c(frame[8:])
    reader = _Reader(frame[48:])
    flags = reader.take((fetches + 63) // 64 * 8)
    fresh = [flags[i // 8] >> i % 8 & 1 for i in range(fetches)]
    assert sum(fresh) == fetches - written
    rows = iter(zip(reader.block(written), reader.rows(codec, written, dim, state_dim), strict=True))
    fetched = [None if is_fresh else next(rows) for is_fresh in fresh]
    lags = reader.block(18)
    late = list(zip(reader.block(stale), reader.block(stale), reader.rows(codec, stale, dim, state_dim), strict=True))
    assert reader.at == len(frame) - 48
    return Reply(codec, dim, state_dim, generation, sequence, fetched, lags, late)


def block(values: Sequence[int]) -> bytes:
    base = min(values, default=0)
    bits = (max(values, default=0) - base).bit_length()
    packed = sum(value - base << i * bits for i, value in enumerate(values))
    return struct.pack("<qB7x", base, bits) + packed.to_bytes((len(values) * bits + 63) // 64 * 8, "little")


def encode_request(request: Request, **false: int) -> bytes:
    """An fp32 request frame. ``false``: header fields that shall not say the truth; the checksums still match."""
    assert request.push_codec == 0
    push = b"" if request.round is None else request.round.pack()
    push += b"".join(block([p[i] for p in request.pushes]) for i in range(4 if request.round is None else 2))
    rows = b"".join(struct.pack(f"<{len(row)}f", *row) for row in request.deltas)
    push += rows + bytes(-len(rows) % 8)
    query = b"".join(block([c[i] for c in request.checks]) for i in range(4))
    query += b"".join(block([f[i] for f in request.fetches]) for i in range(2))
    head = {
        "version": 2, "push_codec": 0, "fetch_codec": request.fetch_codec, "dim": request.dim,
        "state_dim": request.state_dim, "pushes": len(request.pushes),
        "checks": len(request.checks), "fetches": len(request.fetches),
        "kind": int(request.round is not None), "generation": request.generation,
        "worker": request.worker, "session": request.session, "sequence": request.sequence, "push_bytes": len(push),
        "query_bytes": len(query),
    }  # fmt: skip
    assert false.keys() <= head.keys()
    return seal(_REQUEST.pack(b"HETQ", 0, 0, *(head | false).values()) + push + query, len(push))


def seal(frame: bytes, push_bytes: int) -> bytes:
    """The frame with checksums that match what it holds."""
    push, query = frame[12 : 96 + push_bytes], frame[96 + push_bytes :]
    return frame[:4] + struct.pack("<II", crc32c(push), crc32c(query)) + push + query
