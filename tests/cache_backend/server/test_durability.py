"""Servers killed and started again, from outside: what was acknowledged is there, or the client is told."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow.flight as fl
import pytest
from running import TABLE, Peer, Program

PASSING = (fl.FlightUnavailableError, fl.FlightInternalError, fl.FlightCancelledError, fl.FlightTimedOutError)


class Worker(threading.Thread):
    """Pushes one after the other, each repeated under its number until it is acknowledged, and keeps the count."""

    def __init__(self, address: str, number: int, seed: int) -> None:
        super().__init__(daemon=True)
        self.address, self.number, self.chance = address, number, random.Random(seed * 100 + number)
        self.sums: Counter[int] = Counter()
        self.acknowledged = self.repeated = 0
        self.stop = False
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.stop:
                keys = self.chance.sample(range(300), self.chance.randrange(1, 60))
                self.push(keys)
                self.sums.update(keys)
                self.acknowledged += 1
        except BaseException as error:
            self.failure = error

    def push(self, keys: list[int]) -> None:
        while True:
            peer = Peer(self.address, worker=self.number)
            try:
                peer.push(keys, sequence=self.acknowledged + 1)
                return
            except PASSING:
                self.repeated += 1
                time.sleep(0.02)
            finally:
                peer.close()


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_any_moment_no_acknowledged_push_is_lost(
    program: Callable[..., Program], tmp_path: Path, seed: int
) -> None:
    """Compaction is made to run all the time, so that kills meet it too."""
    chance = random.Random(seed)
    options = ("--data", str(tmp_path), "--durability", "log", "--compact-bytes", "30000")
    server = program(*options)
    first = Peer(server.address)
    first.open()
    generation = first.act("hello", protocol=2)["generation"]
    first.close()
    address = server.address
    workers = [Worker(address, number, seed) for number in (1, 2)]
    for worker in workers:
        worker.start()
    for _ in range(3):
        time.sleep(chance.uniform(0.1, 0.6))
        server.stop(signal.SIGKILL)
        server = program(*options, listen=address)
        assert server.address == address, server.errors
    time.sleep(0.2)
    for worker in workers:
        worker.stop = True
    for worker in workers:
        worker.join(30)
        assert worker.failure is None, worker.failure
        assert worker.acknowledged > 10
        assert worker.repeated > 0  # kills did hit requests
    sums = workers[0].sums + workers[1].sums
    peer = Peer(address)
    assert peer.read(range(300)) == [float(sums[key]) for key in range(300)]
    assert peer.act("hello", protocol=2)["generation"] == generation
    peer.close()
    assert list(tmp_path.glob("base-*"))  # it was compacted


def test_without_a_log_a_restart_is_another_generation(program: Callable[..., Program], peer) -> None:
    server = program()
    client = peer(server.address)
    client.open()
    generation = client.act("hello", protocol=2)["generation"]
    client.send(client.frame(push=[1], sequence=1, generation=generation))
    server.stop(signal.SIGKILL)
    again = program(listen=server.address)
    client = peer(again.address)
    assert client.act("hello", protocol=2)["generation"] not in (generation, 0)
    client.open()
    for frame in (
        client.frame(push=[1], sequence=2, generation=generation),
        client.frame(fetch=[1], generation=generation),
    ):
        with pytest.raises(fl.FlightServerError, match="restarted without its rows") as refusal:
            client.send(frame)
        assert refusal.value.extra_info == b"generation"
    assert client.read([1]) == [0.0]
    for action, body in (("snapshot", {"folder": "/tmp", "prefix": "x"}), ("open", {"tables": [], "ids": None})):
        with pytest.raises(fl.FlightServerError, match="restarted without its rows"):
            client.act(action, **body, generation=generation)


def test_snapshot_on_exit_is_taken_up_by_the_next_start(program: Callable[..., Program], peer, tmp_path: Path) -> None:
    options = ("--data", str(tmp_path), "--snapshot-on-exit")
    server = program(*options)
    client = peer(server.address, worker=5)
    client.open()
    client.push([1, 2], delta=3.0)
    hello = client.act("hello", protocol=2)
    assert server.stop() == 0
    again = program(*options, listen=server.address)
    client = peer(again.address, worker=5)
    assert client.act("hello", protocol=2) == hello
    client.send(client.frame(push=[1, 2], sequence=1))  # applied before the stop
    client.push([2], sequence=2)
    assert client.read([1, 2]) == [3.0, 4.0]
    assert again.stop() == 0
    third = program(*options)
    client = peer(third.address)
    assert client.read([1, 2]) == [3.0, 4.0]
    assert len(list(tmp_path.glob("base-*"))) == 1


def test_an_old_exit_snapshot_is_not_taken_for_the_present(
    program: Callable[..., Program], peer, tmp_path: Path
) -> None:
    """Killed after a start from a snapshot: the rows have moved on since, and are gone."""
    options = ("--data", str(tmp_path), "--snapshot-on-exit")
    server = program(*options)
    client = peer(server.address)
    client.open()
    client.push([1])
    generation = client.act("hello", protocol=2)["generation"]
    server.stop()
    second = program(*options)
    second.stop(signal.SIGKILL)
    third = program(*options)
    client = peer(third.address)
    assert client.act("hello", protocol=2)["generation"] != generation
    assert client.act("stats")["rows"] == 0
    assert "starting empty" in third.errors
    (base,) = tmp_path.glob("base-*")
    assert str(base) in third.errors
    assert client.act("restore", folder=str(base)) == {"rows": 1}  # the message's remedy
    assert client.read([1]) == [1.0]


def test_snapshot_on_exit_compacts_the_log(program: Callable[..., Program], peer, tmp_path: Path) -> None:
    options = ("--data", str(tmp_path), "--durability", "log")
    server = program(*options, "--snapshot-on-exit")
    client = peer(server.address)
    client.open()
    for _ in range(20):
        client.push(range(50))
    assert server.stop() == 0
    assert [path.name for path in tmp_path.glob("log-*")] == ["log-00000002"]
    client = peer(program(*options).address)
    assert client.read(range(50)) == [20.0] * 50


def test_a_restore_is_durable(program: Callable[..., Program], peer, tmp_path: Path) -> None:
    options = ("--data", str(tmp_path / "data"), "--durability", "log")
    server = program(*options)
    client = peer(server.address)
    client.open()
    client.push([1, 2])
    snapshot = save(client, tmp_path / "snapshot")
    client.push([2, 3])
    assert client.act("restore", folder=str(snapshot)) == {"rows": 2}
    client.push([1])
    server.stop(signal.SIGKILL)
    client = peer(program(*options).address)
    assert client.read([1, 2, 3]) == [2.0, 1.0, 0.0]


def save(client: Peer, folder: Path) -> Path:
    """A snapshot, as a client makes it."""
    from cache_backend.snapshot import write_manifest
    from cache_backend.store import TableSchema

    folder.mkdir()
    files = client.act("snapshot", folder=str(folder), prefix="shard-00000-of-00001")["files"]
    write_manifest(folder, [TableSchema(**TABLE)], files)
    return folder


def test_a_disk_that_refuses_stops_the_server(program: Callable[..., Program], peer, tmp_path: Path) -> None:
    """Here at a file size limit of 16 KiB. Nothing unwritten is acknowledged, and what was is there afterwards."""
    options = ("--data", str(tmp_path), "--durability", "log")
    limited = program(*options, within=("bash", "-c", 'ulimit -f 16; exec "$@"', "-"))
    client = peer(limited.address)
    client.open()
    acknowledged = 0
    try:
        for acknowledged in range(100):  # noqa: B007 - counts those before the one that fails
            client.push(range(100))
    except PASSING:
        pass
    assert 3 < acknowledged < 99
    assert limited.process.wait(30) == 1
    assert "the log cannot be written" in limited.errors
    client = peer(program(*options).address)
    assert client.read(range(100)) == [float(acknowledged)] * 100
