"""The remote client against real servers: codecs, lost replies, restarts, splitting, shards."""

from __future__ import annotations

import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from servers import Server, servers

from cache_backend import LocalStore, RemoteStore, StoreError, TableSchema
from cache_backend.store import Check, ExchangeReply, ExchangeRequest, Fetch, Push
from cache_backend.stores import pieces

DIM = 8


def schema(name: str = "t", optimizer: str = "rowwise_adagrad") -> TableSchema:
    return TableSchema(name, DIM, optimizer, 3, 0.0, 0.0, 0.0)  # rows begin at zero


def request(
    table: int, push: dict[int, float] | None = None, fetch: Sequence[int] = (), state_dim: int = 1, clock: int = 1
) -> ExchangeRequest:
    """Pushes value v into every column of row k for each k: v, and fetches rows."""
    push = push or {}
    keys, values = np.array(list(push), np.int64), np.array(list(push.values()), np.float32)
    wanted = np.array(list(fetch), np.int64)
    n = len(keys)
    pushes = Push(
        np.full(n, table, np.int32),
        keys,
        np.zeros(n, np.int64),
        np.full(n, clock, np.int64),
        np.repeat(values[:, None], DIM + state_dim, axis=1),
    )
    return ExchangeRequest(DIM, state_dim, pushes, Check(), Fetch(np.full(len(wanted), table, np.int32), wanted))


def rows(reply: ExchangeReply) -> list[float]:
    assert not reply.fresh.any()
    return reply.rows[:, 0].tolist()


class Proxy:
    """A TCP proxy before a server. ``lose_replies``: how many connections it cuts when the server begins to answer."""

    def __init__(self, target: str) -> None:
        host, port = target.removeprefix("grpc://").split(":")
        self._target = host, int(port)
        self.lose_replies = 0
        self.lost = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"grpc://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            for source, sink, answers in ((client, server, False), (server, client, True)):
                threading.Thread(target=self._pump, args=(source, sink, answers), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                # HTTP/2 data frames with a reply are large; settings and pings are not.
                if answers and self.lose_replies > 0 and len(data) > 400:
                    self.lose_replies -= 1
                    self.lost += 1
                    break
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with servers(1) as (address,):
        proxy = Proxy(address)
        yield proxy
        proxy.close()


@pytest.mark.parametrize("piece_bytes", [512 << 10, 1 << 10])
def test_a_push_whose_reply_was_lost_is_applied_once(
    proxy: Proxy, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "_PIECE_BYTES", piece_bytes)
    store = RemoteStore([proxy.address], timeout_s=5, retry_s=30)
    (table,) = store.open([schema()])
    keys = range(50)
    for step in range(1, 6):
        proxy.lose_replies = step % 3
        reply = store.exchange(request(table, dict.fromkeys(keys, 1.0), keys))
        assert rows(reply) == [float(step)] * len(keys)
    assert proxy.lost >= 4


def test_a_request_given_again_after_the_client_gave_up_is_applied_once(proxy: Proxy) -> None:
    store = RemoteStore([proxy.address], timeout_s=2, retry_s=0.2)
    (table,) = store.open([schema()])
    repeated = request(table, dict.fromkeys(range(50), 1.0), range(50))
    proxy.lose_replies = 1000
    with pytest.raises(StoreError, match=f"shard 0 at {proxy.address} did not answer for 0.2 s"):
        store.exchange(repeated)
    assert proxy.lost >= 1
    proxy.lose_replies = 0
    assert rows(store.exchange(repeated)) == [1.0] * 50


def test_nobody_there_is_an_error_in_bounded_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    store = RemoteStore([f"grpc://127.0.0.1:{port}"], timeout_s=1, retry_s=0.5)
    start = time.monotonic()
    with pytest.raises(StoreError, match=rf"127\.0\.0\.1:{port} did not answer for 0\.5 s.*Start it again"):
        store.open([schema()])
    assert time.monotonic() - start < 20  # a bound, not a measurement


@pytest.mark.parametrize("kills", [1, 3])
def test_a_killed_shard_with_a_log_goes_on(tmp_path: Path, kills: int) -> None:
    """Every acknowledged push is there after kill -9, and the client notices nothing but the wait."""
    options = "--data", str(tmp_path / "data"), "--durability", "log"
    server = Server(*options)
    address = server.address()
    store = RemoteStore([address], timeout_s=5, retry_s=60)
    (table,) = store.open([schema()])
    done = 0
    for round_number in range(kills):

        def restart(old: Server = server, after: float = 0.05 * (round_number + 1)) -> None:
            time.sleep(after)
            old.stop()
            nonlocal server
            server = Server(*options, port=int(address.rsplit(":", 1)[1]))
            server.address()

        thread = threading.Thread(target=restart)
        thread.start()
        for _ in range(40):
            done += 1
            assert rows(store.exchange(request(table, {1: 1.0, 2: 2.0}, [1, 2], clock=done))) == [done, 2.0 * done]
        thread.join(30)
    server.stop()


def test_a_shard_that_lost_its_rows_is_found_out() -> None:
    server = Server()
    address = server.address()
    store = RemoteStore([address], timeout_s=5, retry_s=30)
    (table,) = store.open([schema()])
    store.exchange(request(table, {1: 1.0}))
    server.stop()
    server = Server(port=int(address.rsplit(":", 1)[1]))
    server.address()
    try:
        with pytest.raises(StoreError, match=r"lost its rows.*ckpt_path"):
            store.exchange(request(table, {1: 1.0}, [1]))
    finally:
        server.stop()


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(("limit", "piece_bytes"), [(1 << 12, 512 << 10), (64 << 20, 512 << 10), (64 << 20, 1 << 12)])
def test_splitting_changes_nothing(
    shard_addresses: Callable, shards: int, limit: int, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "_PIECE_BYTES", piece_bytes)
    addresses = list(shard_addresses(shards, "lamport"))
    store, local = RemoteStore(addresses, max_message_bytes=limit), LocalStore(exclusive=False)
    rng = np.random.default_rng(shards)
    name = f"split-{limit}-{piece_bytes}"
    (table,), (local_table,) = store.open([schema(name)]), local.open([schema(name)])
    for step in range(1, 4):
        keys = rng.choice(5000, 1500, replace=False)
        checked, wanted = rng.choice(6000, 1200, replace=False), rng.choice(6000, 900, replace=False)
        allowed = rng.integers(0, 5, 1200)
        replies = []
        for where, number in ((store, table), (local, local_table)):
            r = request(number, {int(k): float(k) for k in keys}, wanted.tolist(), clock=3 * step)
            r.check = Check(np.full(1200, number, np.int32), checked, np.full(1200, step, np.int64), allowed)
            replies.append(where.exchange(r))
        theirs, ours = replies
        np.testing.assert_array_equal(theirs.fresh, ours.fresh)
        written = theirs.fresh == 0
        np.testing.assert_array_equal(theirs.rows[written], ours.rows[written])
        np.testing.assert_array_equal(theirs.clocks[written], ours.clocks[written])
        order = np.argsort(theirs.stale)
        np.testing.assert_array_equal(theirs.stale[order], ours.stale)
        np.testing.assert_array_equal(theirs.stale_rows[order], ours.stale_rows)
        np.testing.assert_array_equal(theirs.stale_clocks[order], ours.stale_clocks)
        np.testing.assert_array_equal(theirs.lags, ours.lags)
        assert theirs.lags.sum() == 1200


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_rows_pushed_and_fetched_together_come_back_with_the_push(
    shard_addresses: Callable, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "_PIECE_BYTES", 1 << 12)
    store = RemoteStore(list(shard_addresses(2, "lamport")), push_codec=codec)
    (table,) = store.open([schema(f"both-{codec}")])
    keys = np.random.default_rng(0).permutation(2000).tolist()
    for step in range(1, 5):
        assert rows(store.exchange(request(table, dict.fromkeys(keys, 1.0), keys[::-1]))) == [float(step)] * len(keys)


@pytest.mark.parametrize("idle_s", [0.0, 0.3, 1.5])
def test_a_store_that_was_idle_goes_on(shard_addresses: Callable, idle_s: float) -> None:
    """Within its first quarter of a second a stream is used again, later another one; after a second it has ended."""
    store = RemoteStore(list(shard_addresses(1, "lamport")), timeout_s=1.0, retry_s=0.0)
    (table,) = store.open([schema(f"idle-{idle_s}")])
    for step in range(1, 4):
        assert rows(store.exchange(request(table, {1: 1.0}, [1]))) == [float(step)]
        time.sleep(idle_s)


def test_a_server_that_falls_silent_is_an_error_in_bounded_time() -> None:
    server = Server()
    address = server.address()
    store = RemoteStore([address], timeout_s=1.0, retry_s=0.2)
    (table,) = store.open([schema()])
    assert rows(store.exchange(request(table, {1: 1.0}, [1]))) == [1.0]
    repeated = request(table, dict.fromkeys(range(50_000), 1.0), range(50_000))  # many pieces
    server.process.send_signal(signal.SIGSTOP)
    start = time.monotonic()
    try:
        with pytest.raises(StoreError, match=r"did not answer for 0\.2 s"):
            store.exchange(repeated)
        assert time.monotonic() - start < 20  # a bound, not a measurement
    finally:
        server.process.send_signal(signal.SIGCONT)
    store = RemoteStore([address])
    store.open([schema()])
    assert set(rows(store.exchange(request(table, fetch=[1])))) <= {1.0, 2.0}
    server.stop()


def test_requests_without_rows_for_some_or_all_shards(shard_addresses: Callable) -> None:
    store = RemoteStore(list(shard_addresses(3, "lamport")))
    (table,) = store.open([schema("few")])
    assert rows(store.exchange(request(table, {7: 1.0}, [7]))) == [1.0]
    nothing = store.exchange(request(table))
    assert nothing.rows.shape == (0, DIM + 1)
    assert nothing.bytes_sent == nothing.bytes_received == 0


# One push of values of about 1: the nearest representable value is at most this far away.
HALF_STEP = {"fp16": 2**-11, "bf16": 2**-8, "int8": 1 / 254}


@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8"])
def test_lossy_pushes_lose_nothing_in_the_end(shard_addresses: Callable, codec: str) -> None:
    store = RemoteStore(list(shard_addresses(3, "lamport")), push_codec=codec)
    (table,) = store.open([schema(f"lossy-{codec}", "sgd")])
    rng = np.random.default_rng(1)
    keys = np.arange(40)
    total = np.zeros((40, DIM))
    for _ in range(30):
        r = request(table, dict.fromkeys(keys.tolist(), 0.0), keys.tolist(), state_dim=0)
        r.push.deltas = rng.uniform(-1, 1, (40, DIM)).astype(np.float32)
        total += r.push.deltas
        reply = store.exchange(r)
        # What is missing is the rounding of one push, not of all of them: each row's largest entry is about 1.
        assert np.abs(reply.rows - total).max() < 1.5 * HALF_STEP[codec]
    store.flush()
    final, _ = store.read(DIM, 0, Fetch(np.full(40, table, np.int32), keys))
    np.testing.assert_allclose(final, total, rtol=0, atol=1e-5)  # float32 sums of 30 numbers


@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16", "int8"])
def test_small_updates_move_a_row(shard_addresses: Callable, codec: str) -> None:
    """10,000 updates of 1e-5 on 1.0, pushed in hundreds of pieces."""
    store = RemoteStore(list(shard_addresses(1, "lamport")), push_codec=codec)
    (table,) = store.open([schema(f"small-{codec}", "sgd")])
    store.exchange(request(table, {1: 1.0}, state_dim=0))
    for _ in range(500):
        store.exchange(request(table, {1: 20e-5}, state_dim=0))
    store.flush()
    final, _ = store.read(DIM, 0, Fetch(np.array([table], np.int32), np.array([1], np.int64)))
    np.testing.assert_allclose(final, 1.1, rtol=0, atol=2e-4)


@pytest.mark.parametrize(("codec", "tolerance"), [("fp16", 2**-11), ("bf16", 2**-8), ("int8", 1 / 250)])
def test_rows_come_back_rounded_once_and_evaluation_reads_them_exactly(
    shard_addresses: Callable, codec: str, tolerance: float
) -> None:
    store = RemoteStore(list(shard_addresses(1, "lamport")), fetch_codec=codec)
    (table,) = store.open([schema(f"fetch-{codec}")])
    values = np.random.default_rng(0).uniform(-1, 1, (1, DIM + 1)).astype(np.float32)
    values[0, DIM] = 1e-7  # optimizer state: a small mean of squares must not become 0
    r = request(table, {5: 0.0}, [5])
    r.push.deltas = values
    reply = store.exchange(r)
    assert np.abs(reply.rows[0, :DIM] - values[0, :DIM]).max() <= tolerance
    assert reply.rows[0, DIM] == pytest.approx(1e-7, rel=2**-8)
    exact, _ = store.read(DIM, 1, Fetch(np.array([table], np.int32), np.array([5], np.int64)))
    np.testing.assert_array_equal(exact, values)


def test_snapshots_fit_any_number_of_shards(tmp_path: Path) -> None:
    keys = np.arange(-500, 500)
    expected = {int(k): float(k) / 7 for k in keys}
    paths = []
    for number, shards in enumerate((1, 2, 3, 1)):
        with servers(shards) as addresses:
            store = RemoteStore(list(addresses))
            (table,) = store.open([schema()])
            if not paths:
                store.exchange(request(table, expected, clock=9))
            else:
                store.restore(paths[-1])
            reply = store.exchange(request(table, fetch=keys.tolist()))
            np.testing.assert_array_equal(reply.rows[:, 0], np.array(list(expected.values()), np.float32))
            assert (reply.clocks == 9).all()
            assert store.stats().rows == len(keys)
            paths.append(tmp_path / f"snapshot-{number}")
            store.snapshot(paths[-1])
    local = LocalStore()
    local.restore(paths[-1])
    (table,) = local.open([schema()])
    np.testing.assert_array_equal(local.exchange(request(table, fetch=keys.tolist())).rows, reply.rows)


def test_shards_out_of_order_are_refused(shard_addresses: Callable) -> None:
    first, second, third = shard_addresses(3, "lamport")
    with pytest.raises(StoreError, match=r"is shard 1/3, but stands at place 0 of 3"):
        RemoteStore([second, first, third]).open([schema()])
    with pytest.raises(StoreError, match=r"is shard 0/3, but stands at place 0 of 1"):
        RemoteStore([first]).open([schema()])


def test_a_copy_in_another_process_is_another_client(shard_addresses: Callable) -> None:
    store = RemoteStore(list(shard_addresses(1, "lamport")), push_codec="fp16")
    (table,) = store.open([schema("pickled")])
    store.exchange(request(table, {1: 1.0}))
    copy = pickle.loads(pickle.dumps(store))
    copy.open([schema("pickled")])
    assert rows(copy.exchange(request(table, {1: 1.0}, [1]))) == [2.0]  # its sequence 1 is not the other's


def test_settings_are_checked() -> None:
    for bad, message in (
        ({"addresses": []}, "store.addresses is empty"),
        ({"addresses": ["grpc://x"], "push_codec": "fp8"}, "unknown store.push_codec 'fp8'; available: fp32, fp16"),
        ({"addresses": ["grpc://x"], "tls_cert": __file__}, "belong together"),
        ({"addresses": ["grpc://x"], "max_message_bytes": 1}, "at least 4096"),
    ):
        with pytest.raises(ValueError, match=message):
            RemoteStore(**bad)
