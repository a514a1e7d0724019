"""Exporting, assigning and erasing rows at a server: durable, applied once, and harmless whatever arrives."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl
import pytest
from running import DIM, STATE, TABLE, Peer, Program

from cache_backend import RemoteStore, StoredRows, StoreError, TableSchema
from cache_backend.row_batches import rows_schema

WIDTH = DIM + STATE
REFUSED = (pa.ArrowInvalid,)
TEN = list(range(10))


def batch(
    keys: Sequence[int], value: float = 1.0, table: int = 0, clock: int = 5, schema: pa.Schema | None = None
) -> pa.RecordBatch:
    n = len(keys)
    return pa.record_batch(
        [
            pa.array([table] * n, pa.int32()),
            pa.array(keys, pa.int64()),
            pa.array([clock] * n, pa.int64()),
            pa.array([[value] * WIDTH] * n, pa.list_(pa.float32(), WIDTH)),
        ],
        schema=schema or rows_schema(WIDTH),
    )


def numbered(peer: Peer) -> dict[str, int]:
    peer.sequence += 1
    return {"worker": peer.worker, "session": peer.session, "sequence": peer.sequence}


def command(peer: Peer, **fields: Any) -> dict[str, Any]:
    return {"dim": DIM, "state_dim": STATE} | numbered(peer) | fields


def put(peer: Peer, *batches: pa.RecordBatch, said: Any = None, **fields: Any) -> None:
    said = json.dumps(command(peer, **fields)) if said is None else said
    writer, _ = peer.client.do_put(fl.FlightDescriptor.for_command(said), batches[0].schema, peer.options)
    with writer:
        for each in batches:
            writer.write_batch(each)


def get(peer: Peer, said: Any = None, **fields: Any) -> pa.Table:
    ticket = {"dim": DIM, "state_dim": STATE, "tables": [0], "part": 0, "parts": 1} | fields
    return peer.client.do_get(fl.Ticket(json.dumps(ticket) if said is None else said), peer.options).read_all()


def erase(peer: Peer, tables: list[int], **fields: Any) -> None:
    peer.act("erase", tables=tables, **numbered(peer), **fields)


def held_rows(peer: Peer) -> list[tuple[Any, ...]]:
    table = get(peer)
    return sorted(zip(*(table[name].to_pylist() for name in table.column_names), strict=True))


@pytest.fixture
def held(standing: Program) -> Iterator[Peer]:
    """A client of a server with rows, which must be the same, in the same process, when the test is over."""
    peer = Peer(standing.address, worker=random.getrandbits(63))
    peer.open()
    put(peer, batch(TEN))
    before = held_rows(peer)
    yield peer
    assert standing.process.poll() is None, standing.errors
    assert held_rows(peer) == before
    peer.close()


def test_a_stream_of_several_batches(program: Callable[..., Program], peer: Callable[..., Peer]) -> None:
    client = peer(program().address)
    client.open()
    put(client, batch([1, 2]), batch([2, 3], value=2.0), batch([4], value=3.0))
    assert client.read([1, 2, 3, 4, 5]) == [1.0, 2.0, 2.0, 3.0, 0.0]
    client.sequence += 2  # the stream's batches had numbers of their own
    client.push([1])
    assert client.read([1]) == [2.0]


def test_the_same_number_is_applied_once(program: Callable[..., Program], peer: Callable[..., Peer]) -> None:
    """Whatever comes late, after its repetition was answered, must not undo what happened since."""
    client = peer(program().address)
    client.open()
    put(client, batch([1]), sequence=1)
    client.push([1], sequence=2)
    put(client, batch([1]), sequence=1)
    assert client.read([1]) == [2.0]
    client.act("erase", tables=[0], worker=client.worker, session=client.session, sequence=3)
    put(client, batch([1]), sequence=4)
    client.act("erase", tables=[0], worker=client.worker, session=client.session, sequence=3)
    assert client.read([1]) == [1.0]


def test_rows_survive_a_kill(program: Callable[..., Program], peer: Callable[..., Peer], tmp_path: Path) -> None:
    options = ("--data", str(tmp_path), "--durability", "log")
    server = program(*options)
    client = peer(server.address)
    client.open(TABLE, TABLE | {"name": "u"})
    client.push(TEN)
    put(client, batch([3, 100], value=7.0), batch([4], table=1))
    client.sequence += 1
    client.push([100])
    erase(client, [1])
    put(client, batch([8], value=0.5, clock=2**48 - 1))
    expected = held_rows(client)
    server.stop(signal.SIGKILL)
    server = program(*options)
    client = peer(server.address)
    assert held_rows(client) == expected
    assert get(client, tables=[1]).num_rows == 0
    # What was applied before the kill is not applied again.
    client.act("erase", tables=[0], worker=1, session=1, sequence=1)
    put(client, batch(TEN, value=9.0), sequence=2)
    assert held_rows(client) == expected


def test_compaction_in_between(program: Callable[..., Program], peer: Callable[..., Peer], tmp_path: Path) -> None:
    """The log is replaced by snapshots all the time, and the server killed at some moment: buckets that a snapshot
    took before a change get it from the log, the others do not get it twice."""
    options = ("--data", str(tmp_path), "--durability", "log", "--compact-bytes", "20000")
    server = program(*options)
    client = peer(server.address)
    client.open(TABLE, TABLE | {"name": "u"})
    chance = random.Random(3)
    for _ in range(4):
        for _ in range(30):
            keys = chance.sample(range(500), 60)
            put(client, batch(keys, value=chance.random(), clock=chance.randrange(100)))
            client.push(chance.sample(range(500), 60))
            if chance.random() < 0.3:
                erase(client, [0])
            put(client, batch(keys, table=1))
            if chance.random() < 0.3:
                erase(client, [1])
        expected = held_rows(client), get(client, tables=[1]).num_rows
        server.stop(signal.SIGKILL)
        server = program(*options)
        old = client
        client = peer(server.address)
        client.sequence = old.sequence
        assert (held_rows(client), get(client, tables=[1]).num_rows) == expected


def test_limits(program: Callable[..., Program], peer: Callable[..., Peer]) -> None:
    client = peer(program("--max-rows", "10", "--max-message-bytes", "4096").address)
    client.open(TABLE, TABLE | {"name": "wide", "dim": 1000, "optimizer": "sgd"})
    put(client, batch(TEN))
    with pytest.raises(REFUSED, match="11 rows, the limit is 10; split them, or raise --max-rows"):
        put(client, batch(range(100, 111)))
    with pytest.raises(REFUSED, match=r"a message of \d+ bytes, the limit is 4096"):
        put(client, batch(range(100, 400)))
    for i in range(10, 100, 10):
        client.sequence += 1
        put(client, batch(range(i, i + 10)))
    assert client.act("stats")["rows"] == 100
    assert {len(piece) for piece in get(client).to_batches()} <= set(range(1, 11))
    assert get(client).num_rows == 100


def test_a_token(program: Callable[..., Program], peer: Callable[..., Peer], tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    address = program("--token-file", str(tmp_path / "token")).address
    client = peer(address, token="Bearer secret")
    client.open()
    put(client, batch(TEN))
    for stranger in (peer(address), peer(address, token="Bearer guess")):
        for call in (lambda c=stranger: put(c, batch(TEN, value=2.0)), lambda c=stranger: get(c)):
            with pytest.raises(fl.FlightUnauthenticatedError):
                call()
    assert client.read(TEN) == [1.0] * 10
    store = RemoteStore([address], token_file=str(tmp_path / "token"))
    assert sum(len(rows) for rows in store.export([0])) == 10
    store.erase([0])
    assert store.stats().rows == 0
    store.close()


def test_a_server_that_comes_back(program: Callable[..., Program], tmp_path: Path) -> None:
    """Calls that it interrupts are made again; one that lost its rows is found out."""
    options = ("--data", str(tmp_path), "--durability", "log")
    server = program(*options)
    store = RemoteStore([server.address], timeout_s=5, retry_s=30)
    (table,) = store.open([TableSchema(**TABLE)])
    keys = np.arange(1000)
    rows = StoredRows(DIM, STATE, np.full(1000, table, np.int32), keys, keys, np.ones((1000, WIDTH), np.float32))
    store.assign(rows)
    server.stop(signal.SIGKILL)
    starting = threading.Timer(0.5, program, options, {"listen": server.address})
    starting.start()
    store.assign(rows)
    starting.join()
    assert sum(len(piece) for piece in store.export([table])) == 1000
    store.close()

    server = program()
    store = RemoteStore([server.address], timeout_s=5, retry_s=30)
    store.open([TableSchema(**TABLE)])
    server.stop(signal.SIGKILL)
    program(listen=server.address)
    for call in (lambda: list(store.export([0])), lambda: store.assign(rows), lambda: store.erase([0])):
        with pytest.raises(StoreError, match="lost its rows"):
            call()
    store.close()


def test_rows_of_another_shard(program: Callable[..., Program], peer: Callable[..., Peer]) -> None:
    client = peer(program("--shard", "1/2").address)
    client.open()
    with pytest.raises(REFUSED, match=r"row \d+ of table 0 does not belong to shard 1 of 2"):
        put(client, batch(TEN))
    assert client.act("stats")["rows"] == 0


def test_a_wrong_generation(held: Peer) -> None:
    generation = held.act("hello", protocol=2)["generation"]
    put(held, batch(TEN), generation=generation)
    assert get(held, generation=generation).num_rows == 10
    for call in (
        lambda: put(held, batch(TEN, value=2.0), generation=generation + 1),
        lambda: get(held, generation=generation + 1),
        lambda: erase(held, [0], generation=generation + 1),
    ):
        with pytest.raises(fl.FlightServerError) as error:
            call()
        assert error.value.extra_info == b"generation"


def narrow(column: int, kind: pa.DataType) -> pa.RecordBatch:
    whole = batch(TEN)
    columns = list(whole.columns)
    columns[column] = columns[column].cast(kind)
    return pa.record_batch(columns, names=whole.schema.names)


def with_null(column: int) -> pa.RecordBatch:
    whole = batch(TEN)
    columns = list(whole.columns)
    columns[column] = pa.array([None, *columns[column].to_pylist()[1:]], columns[column].type)
    return pa.record_batch(columns, schema=whole.schema)


def null_inside() -> pa.RecordBatch:
    rows = pa.array([[1.0, None, 1.0, 1.0]] * 10, pa.list_(pa.float32(), WIDTH))
    return pa.record_batch([*batch(TEN).columns[:3], rows], schema=rows_schema(WIDTH))


STRANGE = {
    "keys as int32": narrow(1, pa.int32()),
    "values as lists": narrow(3, pa.list_(pa.float32())),
    "another width": pa.record_batch(
        [*batch(TEN).columns[:3], pa.array([[1.0] * 3] * 10, pa.list_(pa.float32(), 3))], schema=rows_schema(3)
    ),
    "columns in another order": batch(TEN).select(["key", "table", "clock", "row"]),
    "a column too few": batch(TEN).select(["table", "key", "clock"]),
    "no columns": pa.record_batch([], []),
    "a table of null": with_null(0),
    "a key of null": with_null(1),
    "a row of null": with_null(3),
    "a value of null": null_inside(),
    "an unknown table": batch(TEN, table=9),
    "a table below 0": batch(TEN, table=-1),
    "a clock below 0": batch(TEN, clock=-1),
    "a clock too high": batch(TEN, clock=2**48),
}


@pytest.mark.parametrize("strange", [pytest.param(b, id=name) for name, b in STRANGE.items()])
def test_strange_batches(held: Peer, strange: pa.RecordBatch) -> None:
    with pytest.raises(REFUSED):
        put(held, strange)


@pytest.mark.parametrize(
    "wrong",
    [
        {"dim": 4}, {"dim": 2, "state_dim": 2}, {"dim": "3"}, {"dim": None}, {"dim": -1}, {"dim": [3]},
        {"state_dim": {}}, {"dim": 1 << 70}, {"sequence": 0}, {"sequence": -1}, {"sequence": "1"},
        {"sequence": 1 << 64}, {"worker": -1}, {"worker": 1.5}, {"session": None}, {"more": 1},
        {"generation": "x"}, {"generation": None},
    ],
    ids=str,
)  # fmt: skip
def test_commands_that_make_no_sense(held: Peer, wrong: dict[str, Any]) -> None:
    with pytest.raises((*REFUSED, fl.FlightServerError)):
        put(held, batch(TEN, value=2.0), **wrong)


@pytest.mark.parametrize("said", [b"", b"{", b"[]", b"5", b"{}", b'{"dim": 3}', b"\xff\xfe", b"[" * 100_000])
def test_commands_and_tickets_that_are_none(held: Peer, said: bytes) -> None:
    with pytest.raises((*REFUSED, fl.FlightServerError)):
        put(held, batch(TEN, value=2.0), said=said)
    with pytest.raises((*REFUSED, fl.FlightServerError)):
        get(held, said=said)


@pytest.mark.parametrize(
    "wrong",
    [
        {"tables": [9]}, {"tables": [-1]}, {"tables": "0"}, {"tables": [[0]]}, {"tables": None}, {"tables": 0},
        {"tables": [0.5]}, {"part": 1}, {"part": -1}, {"parts": 0}, {"parts": 4097}, {"part": "0"}, {"parts": True},
        {"dim": 4}, {"dim": 0}, {"dim": "3"}, {"state_dim": -1}, {"more": 1}, {"generation": 3},
    ],
    ids=str,
)  # fmt: skip
def test_tickets_that_make_no_sense(held: Peer, wrong: dict[str, Any]) -> None:
    with pytest.raises((*REFUSED, fl.FlightServerError)):
        get(held, **wrong)


@pytest.mark.parametrize("tables", [[9], [0, 9], [-1], "0", None, [[0]], [0.5], {}, [True]], ids=str)
def test_erasing_what_is_no_table(held: Peer, tables: Any) -> None:
    with pytest.raises(REFUSED):
        held.act("erase", tables=tables, worker=1, session=9, sequence=1)


def test_a_path_instead_of_a_command(held: Peer) -> None:
    writer, _ = held.client.do_put(fl.FlightDescriptor.for_path("rows"), rows_schema(WIDTH), held.options)
    with pytest.raises(REFUSED), writer:
        writer.write_batch(batch(TEN, value=2.0))


@pytest.mark.parametrize("seed", range(3))
def test_noise(held: Peer, seed: int) -> None:
    """Commands and tickets with a few characters changed: refused, or the same as before."""
    noise = random.Random(seed)
    for _ in range(100):
        said = bytearray(json.dumps(command(held, session=77)).encode())
        ticket = bytearray(b'{"dim": 3, "state_dim": 1, "tables": [0], "part": 0, "parts": 1}')
        for text in (said, ticket):
            for _ in range(noise.randrange(1, 4)):
                text[noise.randrange(len(text))] = noise.randrange(32, 127)
        with suppress(*REFUSED, fl.FlightServerError):
            put(held, batch(TEN), said=bytes(said))
        with suppress(*REFUSED, fl.FlightServerError):
            get(held, said=bytes(ticket))


def test_exporting_while_rows_are_pushed(program: Callable[..., Program], peer: Callable[..., Peer]) -> None:
    client, other = (peer(program_address) for program_address in [program().address] * 2)
    client.open()
    put(client, batch(range(50_000)))
    reader = client.client.do_get(
        fl.Ticket(json.dumps({"dim": DIM, "state_dim": STATE, "tables": [0], "part": 0, "parts": 1})), client.options
    )
    other.push(range(50_000, 60_000))
    seen = sum(chunk.data.num_rows for chunk in reader)
    assert 50_000 <= seen <= 60_000


def test_a_client_that_goes_away_while_it_is_answered(
    program: Callable[..., Program], peer: Callable[..., Peer]
) -> None:
    server = program("--max-rows", "100", "--max-streams", "3")
    client = peer(server.address)
    client.open(TABLE | {"dim": 2000, "optimizer": "sgd"})
    schema = rows_schema(2000)
    rows = pa.array(np.ones((100, 2000), np.float32).tolist(), pa.list_(pa.float32(), 2000))
    for i in range(20):
        keys = pa.array(range(100 * i, 100 * i + 100), pa.int64())
        zeros = pa.array([0] * 100, pa.int32()), pa.array([0] * 100, pa.int64())
        put(client, pa.record_batch([zeros[0], keys, zeros[1], rows], schema=schema), dim=2000, state_dim=0)
    said = json.dumps({"dim": 2000, "state_dim": 0, "tables": [0], "part": 0, "parts": 1})
    for _ in range(6):
        leaver = Peer(server.address)
        reader = leaver.client.do_get(fl.Ticket(said), leaver.options)
        reader.read_chunk()
        reader.cancel()
        leaver.close()
    deadline = time.monotonic() + 20
    while True:  # the server notices when it writes next
        try:
            assert get(client, said=said).num_rows == 2000
            break
        except fl.FlightUnavailableError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
