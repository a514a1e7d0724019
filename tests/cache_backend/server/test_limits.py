"""A client that wants too much gets an error, and nobody else notices."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl
import pytest
from frames import Request, encode_request
from running import DIM, STATE, TABLE, Peer, Program

from cache_backend.flight import EXCHANGE, FRAME_SCHEMA, batch_of


def test_message_size(program: Callable[..., Program], peer) -> None:
    server = program("--max-message-bytes", "4096")
    client = peer(server.address)
    client.open()
    rng = np.random.default_rng(0)
    for n in (300, 10_000, 1_000_000):
        deltas = rng.random((n, DIM + STATE), np.float32)
        with pytest.raises(
            pa.ArrowInvalid, match=r"a message of \d+ bytes, the limit is 4096; split it, or raise --max-m"
        ):
            client.push(np.arange(n), delta=deltas)
    client.push(range(100), sequence=100)
    assert client.read([0, 99]) == [1.0, 1.0]
    assert client.act("stats")["rows"] == 100
    with pytest.raises(pa.ArrowInvalid, match="the limit is 4096"):
        client.open(TABLE | {"name": "x" * 5000})


def test_a_message_that_only_grows_when_unpacked(program: Callable[..., Program], peer) -> None:
    """64 MB of zeros take a few KB on the wire."""
    server = program("--max-message-bytes", "4096")
    client = peer(server.address)
    writer, reader = client.client.do_exchange(EXCHANGE, client.options)
    writer.begin(FRAME_SCHEMA, options=pa.ipc.IpcWriteOptions(compression="zstd"))
    writer.write_batch(batch_of(np.zeros(64 << 20, np.uint8)))
    writer.done_writing()
    with pytest.raises(pa.ArrowInvalid, match="a message of 67108864 bytes"):
        reader.read_chunk()
    with pytest.raises(pa.ArrowInvalid):
        writer.close()
    assert client.act("health") == {"status": "serving"}


def test_rows_a_request(program: Callable[..., Program], peer) -> None:
    client = peer(program("--max-rows", "10").address)
    client.open()
    client.send(client.frame(push=range(4), check=range(3), fetch=range(3), sequence=1))
    for beyond in ({"push": range(11)}, {"fetch": range(11)}, {"push": range(5), "check": range(3), "fetch": range(3)}):
        with pytest.raises(pa.ArrowInvalid, match="is about 11 rows, the limit is 10; split it, or raise --max-rows"):
            client.send(client.frame(**beyond, sequence=2))
    assert client.act("stats")["rows"] == 4


def test_room_for_a_reply(program: Callable[..., Program], peer) -> None:
    """A frame of 200 bytes that asks for a row of 4 KB a quarter of a million times."""
    client = peer(program("--max-message-bytes", str(1 << 20)).address)
    client.open(TABLE | {"dim": 1000, "optimizer": "sgd"})
    request = Request(1000, 0, fetches=[(0, 7)])
    for codec, row in ((0, 4000), (1, 2000), (2, 2000), (3, 1004)):
        request.fetch_codec = codec
        with pytest.raises(pa.ArrowInvalid, match=f"{1 << 18} rows of {row} bytes, the limit is 1048576 bytes"):
            client.send(encode_request(request, fetches=1 << 18))
    client.send(encode_request(request, fetches=200))


class Idle:
    """Exchanges that are begun and go on saying nothing."""

    def __init__(self, client: Peer, n: int) -> None:
        self.streams = [client.client.do_exchange(EXCHANGE, client.options) for _ in range(n)]
        for (writer, _), i in zip(self.streams, range(n), strict=True):
            writer.begin(FRAME_SCHEMA)
            # A reply proves that the server has taken the stream up.
            writer.write_batch(batch(client, i))
            self.streams[i][1].read_chunk()

    def end(self) -> None:
        for writer, reader in self.streams:
            writer.done_writing()
            with pytest.raises(StopIteration):
                reader.read_chunk()
            writer.close()


def batch(client: Peer, key: int) -> pa.RecordBatch:
    return batch_of(client.frame(fetch=[key]))


@pytest.mark.parametrize("option", ["--max-streams", "--max-streams-per-client"])
def test_streams(program: Callable[..., Program], peer, option: str) -> None:
    client = peer(program(option, "5").address)
    client.open()
    idle = Idle(client, 5)
    for call in (lambda: client.read([1]), lambda: client.push([1]), lambda: client.act("stats")):
        with pytest.raises(fl.FlightUnavailableError, match=rf"5 calls .*\({option}\)"):
            call()
    idle.end()
    client.push([1], sequence=50)
    assert client.read([1]) == [1.0]


def test_a_client_that_breaks_off_frees_its_streams(program: Callable[..., Program], peer) -> None:
    server = program("--max-streams", "5")
    client, other = peer(server.address), peer(server.address)
    client.open()
    for _ in range(4):
        hostile = Peer(server.address)
        streams = Idle(hostile, 5).streams
        for writer, reader in streams:
            reader.cancel()
            del writer
        streams.clear()
        hostile.close()
        for _ in range(200):
            try:
                assert other.act("health") == {"status": "serving"}
                break
            except fl.FlightUnavailableError:
                continue
        else:
            raise AssertionError("the streams are still counted")
