"""Nothing that arrives, cut, garbled or malicious, ends the server or changes a row."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl
import pytest
from frames import Request, Round, decode_reply, encode_request, seal
from running import DIM, STATE, Peer, Program

from cache_backend._table import WireError, parse_request
from cache_backend.flight import EXCHANGE, FRAME_SCHEMA

KEYS = list(range(20))
PUSHING = Request(
    DIM,
    STATE,
    worker=99,
    session=3,
    sequence=1,
    pushes=[(0, 3, 2, 1), (0, 1000, 5, 5)],
    deltas=[[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]],
    checks=[(0, 3, 0, 2), (0, 7, 9, 0)],
    fetches=[(0, 3), (0, 500), (0, 7)],
)
SHARING = replace(
    PUSHING,
    pushes=[(0, 3), (0, 1000)],
    deltas=[[1.0, 2.0, 3.0], [5.0, 6.0, 7.0]],
    round=Round(group=5, rank=1, ranks=2),
)
ASKING = replace(PUSHING, pushes=[], deltas=[], sequence=0)
REFUSED = (pa.ArrowInvalid,)


@pytest.fixture
def held(standing: Program) -> Iterator[Peer]:
    """A client of a server with rows, which must be the same, in the same process, when the test is over."""
    peer = Peer(standing.address, worker=random.getrandbits(63))
    peer.open()
    peer.push(KEYS)
    before = state(peer)
    yield peer
    peer.close()
    after = Peer(standing.address)
    assert standing.process.poll() is None, standing.errors
    assert state(after) == before
    after.close()


def state(peer: Peer) -> object:
    """Every row and clock there can be a doubt about."""
    (reply,) = peer.send(peer.frame(fetch=[*KEYS, 1000, 500]))
    return decode_reply(reply).fetched, peer.act("stats")["rows"]


@pytest.mark.parametrize("request_", [PUSHING, SHARING], ids=["deltas", "share"])
def test_a_bit_flipped_anywhere(held: Peer, request_: Request) -> None:
    whole = encode_request(request_)
    for position in range(len(whole)):
        frame = bytearray(whole)
        frame[position] ^= 1 << position % 8
        with pytest.raises(REFUSED):
            held.send(bytes(frame))


@pytest.mark.parametrize("request_", [PUSHING, SHARING], ids=["deltas", "share"])
def test_a_frame_cut_anywhere(held: Peer, request_: Request) -> None:
    whole = encode_request(request_)
    for length in range(len(whole)):
        with pytest.raises(REFUSED):
            held.send(whole[:length])
    for more in (1, 8, 1000):
        with pytest.raises(REFUSED):
            held.send(whole + bytes(more))


@pytest.mark.parametrize("seed", range(3))
def test_random_bytes(held: Peer, seed: int) -> None:
    noise = random.Random(seed)
    for length in [*range(1, 40), *(noise.randrange(40, 3000) for _ in range(60))]:
        frame = noise.randbytes(length)
        for disguised in (frame, b"HETQ" + frame, encode_request(PUSHING)[:96] + frame):
            with pytest.raises(REFUSED):
                held.send(disguised)


@pytest.mark.parametrize(
    "false",
    [
        {field: value}
        for field in ("pushes", "checks", "fetches", "dim", "state_dim")
        for value in (0, 1, 4, 1000, 2**20, 2**20 + 1, 2**31, 2**32 - 1)
        # A few checks or fetches more would fit into the same words: another request, and nothing to find out.
        if not (field in ("checks", "fetches") and 0 < value < 20) and value != getattr(PUSHING, field, None)
    ]
    + [{field: value} for field in ("push_bytes", "query_bytes") for value in (0, 8, 2**32, 2**63, 2**64 - 1)]
    + [{"push_bytes": 2**64 - 8, "query_bytes": 200}, {"push_codec": 4}, {"fetch_codec": 255}, {"version": 1}],
    ids=str,
)
def test_counts_and_sizes_that_lie(held: Peer, false: dict[str, int]) -> None:
    """The checksums are right: whoever sends this means harm."""
    with pytest.raises(REFUSED):
        held.send(encode_request(PUSHING, **false))


@pytest.mark.parametrize("seed", range(4))
def test_shares_with_right_checksums_and_wrong_bits(seed: int) -> None:
    """They are read, for what they say then, or refused."""
    noise = random.Random(seed)
    whole = encode_request(SHARING)
    push_bytes = int.from_bytes(whole[80:88], "little")
    read = 0
    for _ in range(2000):
        frame = bytearray(whole)
        for _ in range(noise.randrange(1, 4)):
            frame[noise.randrange(12, len(frame))] ^= 1 << noise.randrange(8)
        try:
            parse_request(np.frombuffer(seal(bytes(frame), push_bytes), np.uint8), 1 << 20)
            read += 1
        except WireError:
            pass
    assert 0 < read < 2000


def test_many_rows_in_no_bytes(held: Peer) -> None:
    """A block of equal values takes no bits, so that a short frame can ask for any number of rows."""
    for fetches in (2**20 + 1, 2**31, 2**32 - 1):
        with pytest.raises(pa.ArrowInvalid, match="--max-rows"):
            held.send(encode_request(replace(ASKING, fetches=[(0, 3)]), fetches=fetches))
    frame = encode_request(replace(ASKING, checks=[], fetches=[(0, 3)]), fetches=2**20)
    reply = held.send(frame)[0]
    assert int.from_bytes(reply[24:28], "little") == 2**20  # the written rows among them: all


@pytest.mark.parametrize("seed", range(4))
def test_questions_with_right_checksums_and_wrong_bits_change_nothing(held: Peer, seed: int) -> None:
    noise = random.Random(seed)
    whole = encode_request(ASKING)
    push_bytes = int.from_bytes(whole[80:88], "little")
    answered = 0
    for _ in range(200):
        frame = bytearray(whole)
        for _ in range(noise.randrange(1, 4)):
            frame[noise.randrange(12, len(frame))] ^= 1 << noise.randrange(8)
        try:
            held.send(seal(bytes(frame), push_bytes))
            answered += 1
        except (*REFUSED, fl.FlightServerError):  # the latter: another generation
            pass
    assert answered > 0


@pytest.mark.parametrize("seed", range(4))
def test_pushes_with_right_checksums_and_wrong_bits_are_applied_whole_or_not_at_all(
    standing: Program, seed: int
) -> None:
    """They may mean another push. Where they are refused, no row of theirs has changed."""
    noise = random.Random(seed)
    peer = Peer(standing.address, worker=noise.getrandbits(60), session=seed)
    peer.open()
    refused = 0
    for sequence in range(1, 151):
        whole = encode_request(replace(PUSHING, worker=peer.worker, session=seed, sequence=sequence))
        push_bytes = int.from_bytes(whole[80:88], "little")
        frame = bytearray(whole)
        for _ in range(noise.randrange(1, 3)):
            frame[noise.choice([*range(12, 48), *range(80, len(frame))])] ^= 1 << noise.randrange(8)
        before = state(peer)
        try:
            peer.send(seal(bytes(frame), push_bytes))
        except REFUSED:
            refused += 1
            # repr: a flipped bit makes a NaN of a row, once in a while
            assert repr(state(peer)) == repr(before)
    assert 0 < refused < 150
    assert standing.process.poll() is None
    peer.close()


def false_offsets(start: int, end: int) -> pa.RecordBatch:
    """A batch whose column says it lies elsewhere: changed when pyarrow has checked it."""
    offsets = np.array([0, len(FRAME)], np.int64)
    column = pa.Array.from_buffers(pa.large_binary(), 1, [None, pa.py_buffer(offsets), pa.py_buffer(FRAME)])
    batch = pa.RecordBatch.from_arrays([column], names=["frame"])
    offsets[:] = start, end
    return batch


FRAME = encode_request(PUSHING)
STRANGE = {
    "no rows": [pa.record_batch([pa.array([], pa.large_binary())], ["frame"])],
    "two rows": [pa.record_batch([pa.array([FRAME, FRAME], pa.large_binary())], ["frame"])],
    "null": [pa.record_batch([pa.array([None], pa.large_binary())], ["frame"])],
    "empty": [pa.record_batch([pa.array([b""], pa.large_binary())], ["frame"])],
    "another name": [pa.record_batch([pa.array([FRAME], pa.large_binary())], ["fame"])],
    "another type": [pa.record_batch([pa.array([FRAME], pa.binary())], ["frame"])],
    "numbers": [pa.record_batch([pa.array([1, 2, 3])], ["frame"])],
    "no columns": [pa.record_batch([], [])],
    "a dictionary": [pa.record_batch([pa.array([FRAME], pa.binary()).dictionary_encode()], ["frame"])],
    "nested": [pa.record_batch([pa.array([[[FRAME]]])], ["frame"])],
    "offsets beyond the data": [false_offsets(0, 1 << 40)],
    "offsets backwards": [false_offsets(100, 8)],
    "negative offsets": [false_offsets(-100, 8)],
}  # fmt: skip


@pytest.mark.parametrize("batch", [pytest.param(b, id=name) for name, (b, *_) in STRANGE.items()])
def test_strange_batches(held: Peer, batch: pa.RecordBatch) -> None:
    with pytest.raises((pa.ArrowInvalid, fl.FlightError)):
        held.send_batch(batch)


def test_metadata_without_a_frame(held: Peer) -> None:
    writer, reader = held.client.do_exchange(EXCHANGE, held.options)
    writer.write_metadata(b"hello")
    writer.done_writing()
    with pytest.raises(pa.ArrowInvalid):
        reader.read_chunk()


def test_an_exchange_by_another_name(held: Peer) -> None:
    writer, reader = held.client.do_exchange(fl.FlightDescriptor.for_command(b"other"), held.options)
    writer.begin(FRAME_SCHEMA)
    writer.done_writing()
    with pytest.raises(pa.ArrowInvalid, match=r"hetrec\.exchange"):
        reader.read_chunk()


@pytest.mark.parametrize(
    ("action", "body"),
    [
        ("unknown", b"{}"),
        ("hello", b""),
        ("hello", b"\xff\xfe"),
        ("hello", b"[1]"),
        ("hello", b'{"protocol": 1}'),
        ("hello", b'{"protocol": 2, "more": 1}'),
        ("open", b'{"tables": 5, "ids": null}'),
        ("open", b'{"tables": [{"name": "x"}], "ids": null}'),
        ("open", b'{"tables": [], "ids": [1]}'),
        ("open", b"[" * 100_000),
        ("stats", b'{"rows": 1}'),
        ("snapshot", b'{"folder": "/proc/nowhere", "prefix": "x"}'),
        ("snapshot", b'{"folder": "/tmp", "prefix": "../x"}'),
        ("restore", b'{"folder": "/nowhere"}'),
        ("restore", b'{"folder": 3}'),
    ],
)
def test_actions_that_make_no_sense(held: Peer, action: str, body: bytes) -> None:
    with pytest.raises((pa.ArrowInvalid, fl.FlightServerError)):
        list(held.client.do_action(fl.Action(action, body), held.options))


@pytest.mark.parametrize(
    "field",
    [
        {"dim": 0}, {"dim": -1}, {"dim": 1 << 40}, {"dim": "3"}, {"dim": 1.5}, {"dim": True}, {"optimizer": "adamw"},
        {"optimizer": 1}, {"optimizer": ["sgd"]}, {"state_dim": 1}, {"dim": 1 << 20, "optimizer": "adam"},
        {"seed": -1}, {"seed": 1 << 64}, {"name": 5}, {"init_low": "x"}, {"init_high": None},
    ],
    ids=str,
)  # fmt: skip
def test_tables_that_make_no_sense(held: Peer, field: dict[str, object]) -> None:
    table = {
        "name": "bad", "dim": 2, "optimizer": "sgd", "seed": 5, "init_low": 0.0, "init_high": 0.0, "init_state": 0.0
    }  # fmt: skip
    with pytest.raises(pa.ArrowInvalid):
        held.open(table | field)
    assert [t["name"] for t in held.act("schemas")] == ["t"]


def test_noise_on_the_socket(held: Peer, standing: Program) -> None:
    noise = random.Random(0)
    for prefix in (b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"):
        for _ in range(10):
            with socket.create_connection(("127.0.0.1", standing.port)) as connection:
                connection.sendall(prefix + noise.randbytes(500))
