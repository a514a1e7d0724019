"""Starting, the actions, stopping."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pyarrow as pa
import pyarrow.flight as fl
import pytest
from running import TABLE, Peer, Program

from cache_backend.flight import EXCHANGE, FRAME_SCHEMA
from cache_backend.server.main import main
from cache_backend.server.options import parse


def test_says_where_it_serves(program: Callable[..., Program], peer) -> None:
    server = program("--shard", "2/3", "--clock", "sum")
    assert re.fullmatch(r"hetrec-ps: shard 2/3 serving on grpc://127\.0\.0\.1:\d+", server.lines[-1])
    hello = peer(server.address).act("hello", protocol=2)
    assert (hello["protocol"], hello["shard"], hello["shards"], hello["clock"]) == (2, 2, 3, "sum")
    assert hello["generation"] > 0
    assert hello["release"]


def test_another_protocol_version_is_refused_by_name(standing: Program, peer) -> None:
    with pytest.raises(pa.ArrowInvalid, match=r"protocol version 1, this server speaks 2 .*same release"):
        peer(standing.address).act("hello", protocol=1)


def test_health_stats_and_schemas(standing: Program, peer) -> None:
    client = peer(standing.address)
    assert client.act("health") == {"status": "serving"}
    assert client.act("stats")["rows"] == 0
    client.open()
    client.push([1, 2, 3])
    stats = client.act("stats")
    assert stats["rows"] == 3
    assert stats["memory_bytes"] > 0
    assert client.act("schemas") == [{"id": 0, **TABLE}]
    assert {action.type for action in client.client.list_actions(client.options)} >= {"hello", "open", "snapshot"}


def test_opening_tables(program: Callable[..., Program], peer) -> None:
    client = peer(program().address)
    a, b, c = (TABLE | {"name": name, "seed": i} for i, name in enumerate("abc"))
    assert client.open(a, b) == [0, 1]
    assert client.open(b, c, a) == [1, 2, 0]
    assert client.act("open", tables=[a | {"seed": 99}, b], ids=[0, 1]) == {"ids": [0, 1]}
    assert client.act("schemas")[0]["seed"] == 0  # a table keeps the seed it was opened with
    assert client.act("open", tables=[TABLE | {"name": "d"}], ids=[9]) == {"ids": [9]}
    for tables, ids, message in (
        ([a | {"dim": 5}], None, "'a' holds rows of 3 weights trained by rowwise_adagrad; 5 and rowwise_adagrad were"),
        ([a], [3], "'a' has id 3 on another shard, here 0"),
        ([TABLE | {"name": "e"}], [1], "'e' has id 1 on another shard, but here that is table 'b'"),
        ([TABLE | {"name": "e"}], [1 << 16], "ids are 0 to 65535"),
        ([TABLE | {"name": "e"}, a | {"dim": 5}], None, "'a' holds rows"),
    ):
        with pytest.raises(pa.ArrowInvalid, match=message):
            client.act("open", tables=tables, ids=ids)
    assert [table["id"] for table in client.act("schemas")] == [0, 1, 2, 9]


def test_the_server_needs_no_torch(tmp_path) -> None:
    """A whole run, in an interpreter that then says what it has loaded."""
    script = (
        "import sys, threading\n"
        "from cache_backend.server.main import main\n"
        "status = main(['--listen', 'grpc://127.0.0.1:0', '--exit-with-stdin', '--durability', 'log', '--data',\n"
        f"               {str(tmp_path)!r}])\n"
        "print(status, sorted(name for name in ('torch', 'torchrec', 'pytorch_lightning') if name in sys.modules))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        client = Peer(process.stdout.readline().split()[-1])
        client.open()
        client.push([1])
        assert client.read([1]) == [1.0]
        client.close()
        process.stdin.close()
        assert process.stdout.read().strip() == "0 []"


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_signals_stop_it_cleanly_even_with_open_streams(
    program: Callable[..., Program], peer, how: signal.Signals
) -> None:
    server = program()
    client = peer(server.address)
    writer, _ = client.client.do_exchange(EXCHANGE, client.options)
    writer.begin(FRAME_SCHEMA)  # and nothing more, for ever
    time.sleep(0.2)
    assert server.stop(how) == 0
    assert server.errors == ""


def test_it_ends_with_its_standard_input(program: Callable[..., Program]) -> None:
    server = program()
    server.process.stdin.close()
    assert server.process.wait(20) == 0


def test_it_ends_with_its_parent_although_someone_else_holds_its_standard_input() -> None:
    reading, writing = os.pipe()
    start = (
        "import subprocess, sys\n"
        "server = subprocess.Popen([sys.executable, '-m', 'cache_backend.server', '--listen', 'grpc://127.0.0.1:0',\n"
        "                           '--exit-with-stdin'], stdout=subprocess.PIPE, text=True, stdin=0)\n"
        "print(server.pid, server.stdout.readline(), flush=True)\n"
        "server.wait()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", start], stdin=reading, stdout=subprocess.PIPE, text=True)
    server = int(parent.stdout.readline().split()[0])
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 20
    while runs(server) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not runs(server)
    os.close(reading)
    os.close(writing)


def runs(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as f:
            return f.read().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


def test_a_port_that_is_taken(standing: Program, capsys: pytest.CaptureFixture[str]) -> None:
    """gRPC itself would share the port, and each server would get some of the clients."""
    assert main(["--listen", standing.address]) == 1
    assert f"cannot listen on 127.0.0.1:{standing.port}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shard", "2/2"], "is not a shard"),
        (["--shard", "1"], "is not a shard"),
        (["--listen", "0.0.0.0:7070"], "is not an address"),
        (["--listen", "http://host:1"], "is not an address"),
        (["--listen", "grpc://host:70000"], "is not an address"),
        (["--durability", "log"], "needs --data"),
        (["--snapshot-on-exit"], "needs --data"),
        (["--max-rows", "0"], "whole number above 0"),
        (["--tls-cert", __file__], "belong together"),
        (["--tls-client-ca", __file__], "needs --tls-cert"),
        (["--listen", "grpc+tls://127.0.0.1:0"], "needs --tls-cert"),
        (["--token-file", "/nowhere"], "no file '/nowhere'"),
    ],
)
def test_options_that_make_no_sense(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(options)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_clients_are_told_to_come_back_while_it_stops(program: Callable[..., Program], peer) -> None:
    server = program()
    client = peer(server.address)
    client.open()
    server.process.send_signal(signal.SIGTERM)
    failure = None
    while failure is None:
        try:
            client.push([1])
        except fl.FlightError as error:
            failure = error
    assert isinstance(failure, (fl.FlightUnavailableError, fl.FlightInternalError, fl.FlightCancelledError))
    assert server.process.wait(20) == 0
