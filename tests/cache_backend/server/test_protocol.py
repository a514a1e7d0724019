"""Frames are what PROTOCOL.md says, byte by byte, by the word of a decoder that was written from the page alone."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from frames import Request, crc32c, decode_reply, decode_request, encode_request
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_backend import _table
from cache_backend.config import OPTIMIZERS, state_dim_of

# Two pushes, one check, three fetches, of rows of two weights and one optimizer value.
REQUEST = bytes.fromhex(
    "48455451291e06f6a99908f8020000000200000001000000020000000100000003000000000000000000000000000000"
    "070000000000000088776655443322119900000000000000050000000000000070000000000000006800000000000000"
    "00000000000000000000000000000000"  # push tables: 0, 0 in no bits
    "fdffffffffffffff0600000000000000c00a000000000000"  # push keys: -3 + (0, 43) in 6 bits
    "020000000000000003000000000000002000000000000000"  # clocks: 2 + (0, 4) in 3 bits
    "010000000000000002000000000000000c00000000000000"  # updates: 1 + (0, 3) in 2 bits
    "0000003f000080bf00000040000000000000803f0000803e"  # deltas
    "00000000000000000000000000000000"  # check tables, keys, clocks, staleness
    "28000000000000000000000000000000"
    "03000000000000000000000000000000"
    "0a000000000000000000000000000000"
    "00000000000000000000000000000000"  # fetch tables, keys
    "fdffffffffffffff060000000000000000b2020000000000"
)
REPLY = bytes.fromhex(
    "48455452e792ddfe02000000020000000100000003000000020000000000000007000000000000000500000000000000"
    "0200000000000000"  # the second fetch is fresh
    "020000000000000003000000000000002000000000000000"  # clocks: 2 + (0, 4) in 3 bits
    "0000003f000080bf00002040000000000000803f0000403f"  # rows
    "000000000000000001000000000000000400000000000000"  # lags: the third count is 1
    "00000000000000000000000000000000"  # no stale checks
    "00000000000000000000000000000000"
)
MEANING = Request(
    dim=2,
    state_dim=1,
    worker=0x1122334455667788,
    session=0x99,
    sequence=5,
    generation=7,
    pushes=[(0, -3, 2, 1), (0, 40, 6, 4)],
    deltas=[[0.5, -1.0, 2.0], [0.0, 1.0, 0.25]],
    checks=[(0, 40, 3, 10)],
    fetches=[(0, -3), (0, 5), (0, 40)],
)


def native(request: Request) -> bytes:
    """The request as the code under test writes it."""

    def column(rows: list[tuple[int, ...]], i: int, dtype: type = np.int64) -> np.ndarray:
        return np.array([row[i] for row in rows], dtype)

    width = request.dim + request.state_dim
    return bytes(
        _table.encode_request(
            worker=request.worker,
            session=request.session,
            sequence=request.sequence,
            generation=request.generation,
            dim=request.dim,
            state_dim=request.state_dim,
            push_codec=request.push_codec,
            fetch_codec=request.fetch_codec,
            push_tables=column(request.pushes, 0, np.int32),
            push_keys=column(request.pushes, 1),
            push_starts=np.array([clock - updates for _, _, clock, updates in request.pushes], np.int64),
            push_clocks=column(request.pushes, 2),
            deltas=np.array(request.deltas, np.float32).reshape(-1, width),
            check_tables=column(request.checks, 0, np.int32),
            check_keys=column(request.checks, 1),
            check_clocks=column(request.checks, 2),
            check_staleness=column(request.checks, 3),
            fetch_tables=column(request.fetches, 0, np.int32),
            fetch_keys=column(request.fetches, 1),
        )
    )


def table(request: Request) -> _table.EmbeddingTable:
    """An empty table for the request; rows begin at zero."""
    made = _table.EmbeddingTable(request.dim, request.state_dim)
    optimizer = next(i for name, i in OPTIMIZERS.items() if state_dim_of(name, request.dim) == request.state_dim)
    for number in {name[0] for names in (request.pushes, request.checks, request.fetches) for name in names}:
        made.declare(number, 0, 0.0, 0.0, 0.0, optimizer)
    return made


def test_checksum_is_castagnolis() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # the check value of RFC 3720's polynomial


def test_golden_request() -> None:
    assert decode_request(REQUEST) == MEANING
    assert native(MEANING) == REQUEST
    assert encode_request(MEANING) == REQUEST


def test_golden_reply() -> None:
    frame = np.frombuffer(REQUEST, np.uint8)
    held = _table.EmbeddingTable(2, 1)
    held.declare(0, 1, 0.0, 0.0, 0.5, OPTIMIZERS["rowwise_adagrad"])
    request = _table.parse_request(frame, 100)
    _table.apply_push(held, request, "lamport")
    reply = bytes(_table.answer(held, request, 7))
    assert reply == REPLY
    read = decode_reply(REPLY)
    assert (read.generation, read.sequence) == (7, 5)
    assert read.fetched == [(2, [0.5, -1.0, 2.5]), None, (6, [0.0, 1.0, 0.75])]
    assert read.lags == [0, 0, 1, *[0] * 15]  # 6 - 3 is 2 or 3
    assert read.stale == []


I64 = st.integers(-(2**63), 2**63 - 1)
U64 = st.integers(0, 2**64 - 1)
TABLES = st.integers(0, 2**16 - 1)
CLOCK = st.integers(0, 2**47)
STALENESS = st.integers(0, 2**63 - 1) | st.integers(0, 3)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    dim = draw(st.integers(1, 5))
    state_dim = state_dim_of(draw(st.sampled_from(["sgd", "adagrad", "rowwise_adagrad"])), dim)
    value = st.floats(-1000, 1000, width=32).filter(lambda x: x == 0 or abs(x) > 1e-3)
    # One key column shape: small keys, so that names meet, or any.
    name = st.tuples(st.integers(0, 2), st.integers(0, 5)) | st.tuples(TABLES, I64)
    pushes = draw(st.lists(st.tuples(name, CLOCK, CLOCK), max_size=6))
    row = st.lists(value, min_size=dim + state_dim, max_size=dim + state_dim)
    return Request(
        dim,
        state_dim,
        *(draw(U64) for _ in range(4)),
        push_codec=draw(st.integers(0, 3)),
        fetch_codec=draw(st.integers(0, 3)),
        pushes=[(*name, max(a, b), max(a, b) - min(a, b)) for name, a, b in pushes],
        deltas=[draw(row) for _ in pushes],
        checks=[(*name, clock, s) for name, clock, s in draw(st.lists(st.tuples(name, CLOCK, STALENESS), max_size=6))],
        fetches=draw(st.lists(name, max_size=70)),
    )


# What a codec may lose of a weight x in a row whose largest weight is m.
TOLERANCE = {
    0: lambda x, m: 0.0,
    1: lambda x, m: abs(x) * 2**-11 + 2**-25,
    2: lambda x, m: abs(x) * 2**-8,
    3: lambda x, m: m / 254 * 1.001,
}


def assert_rows_close(codec: int, dim: int, found: list[float], expected: list[float]) -> None:
    largest = max((abs(x) for x in expected[:dim]), default=0.0)
    for i, (x, y) in enumerate(zip(found, expected, strict=True)):
        tolerance = TOLERANCE[codec if i < dim or codec == 0 else 2]
        assert math.isclose(x, y, rel_tol=0, abs_tol=tolerance(y, largest)), (codec, i, x, y)


@settings(max_examples=150, deadline=None)
@given(requests())
def test_requests_say_what_went_in(request: Request) -> None:
    frame = native(request)
    read = decode_request(frame)
    for got, given_row in zip(read.deltas, request.deltas, strict=True):
        assert_rows_close(request.push_codec, request.dim, got, given_row)
    read.deltas = request.deltas
    assert read == request
    if request.push_codec == 0:
        assert encode_request(request) == frame


@settings(max_examples=150, deadline=None)
@given(requests())
def test_replies_say_what_the_rules_say(request: Request) -> None:
    """Push, check and fetch against a dictionary."""
    frame = np.frombuffer(native(request), np.uint8)
    parsed = _table.parse_request(frame, 1 << 20)
    held = table(request)
    _table.apply_push(held, parsed, "lamport")
    rows: dict[tuple[int, int], np.ndarray] = {}
    clocks: dict[tuple[int, int], int] = {}
    for (number, key, clock, _), delta in zip(request.pushes, decode_request(bytes(frame)).deltas, strict=True):
        name = number, key
        rows[name] = rows.get(name, np.zeros(len(delta), np.float32)) + np.array(delta, np.float32)
        clocks[name] = max(clocks.get(name, 0), clock)

    reply = decode_reply(bytes(_table.answer(held, parsed, 77)))
    assert (reply.generation, reply.sequence) == (77, request.sequence)
    assert (reply.codec, reply.dim, reply.state_dim) == (request.fetch_codec, request.dim, request.state_dim)
    for name, got in zip(request.fetches, reply.fetched, strict=True):
        assert (got is None) == (name not in rows)
        if got is not None:
            assert got[0] == clocks[name]
            assert_rows_close(request.fetch_codec, request.dim, got[1], rows[name].tolist())
    stale = [
        i
        for i, (number, key, clock, staleness) in enumerate(request.checks)
        if (number, key) in rows and clocks[number, key] > clock + staleness
    ]
    lags = [clocks.get((number, key), 0) - clock for number, key, clock, _ in request.checks]
    bounds = [-math.inf, *(2**i for i in range(17)), math.inf]
    assert reply.lags == [sum(low <= lag < high for lag in lags) for low, high in pairwise(bounds)]
    assert [index for index, _, _ in reply.stale] == stale
    for index, clock, row in reply.stale:
        name = request.checks[index][:2]
        assert clock == clocks[name]
        assert_rows_close(request.fetch_codec, request.dim, row, rows[name].tolist())


@pytest.mark.parametrize("version", [0, 1, 65535])
def test_another_version_is_refused_by_name(version: int) -> None:
    frame = np.frombuffer(encode_request(MEANING, version=version), np.uint8)
    with pytest.raises(_table.WireError, match=f"protocol version {version}, this side speaks 2"):
        _table.parse_request(frame, 100)


@pytest.mark.parametrize("clock", [-1, 2**48, 2**63 - 1])
def test_clocks_beyond_48_bits_are_refused(clock: int) -> None:
    for request in (
        replace(MEANING, checks=[(0, 40, clock, 1)]),
        replace(MEANING, pushes=[(0, 1, clock, 0), (0, 2, 5, 1)]),
    ):
        frame = np.frombuffer(encode_request(request), np.uint8)
        with pytest.raises(_table.WireError, match="outside 48 bits"):
            _table.parse_request(frame, 100)
