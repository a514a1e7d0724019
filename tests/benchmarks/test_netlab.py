"""Hosts on one machine: they reach each other, are limited, counted, and never outlive their lab."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from netlab import Netlab, NetlabError

SEND = """
import socket, sys
here = socket.create_connection((sys.argv[1], 7000), timeout=20)
here.sendall(bytes(int(sys.argv[2])))
here.shutdown(socket.SHUT_WR)
here.recv(1)
"""
RECEIVE = """
import socket, sys, time
listener = socket.create_server((sys.argv[1], 7000))
print("ready", flush=True)
peer, _ = listener.accept()
total = 0
while part := peer.recv(1 << 20):
    total += len(part)
peer.close()
print(total)
"""


def _namespaces(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"hetlab{pid}-")]


@pytest.fixture
def root() -> None:
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("network namespaces need root and iproute2")


def _transfer(lab: Netlab, size: int) -> None:
    python = sys.executable
    receiver = lab.popen(0, [python, "-c", RECEIVE, lab.address(0)], stdout=subprocess.PIPE, text=True)
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == "ready\n"
    lab.run(1, [python, "-c", SEND, lab.address(0), str(size)], check=True, timeout=60)
    assert receiver.stdout.read() == f"{size}\n"
    receiver.wait(timeout=20)
    receiver.stdout.close()


@pytest.mark.usefixtures("root")
class TestLab:
    def test_counts_what_hosts_send_each_other(self) -> None:
        size = 4 << 20
        with Netlab(2, "1gbit") as lab:
            before = lab.traffic(1)
            _transfer(lab, size)
            traffic = lab.traffic(1) - before
        assert size < traffic.sent < 1.2 * size
        assert traffic.received < 0.2 * size

    def test_a_rate_is_an_upper_bound(self) -> None:
        with Netlab(2, "80mbit") as lab:
            start = time.monotonic()
            _transfer(lab, 2 << 20)
            assert time.monotonic() - start > 0.15  # at 80 Mbit/s 2 MiB take 0.2 s; the first 128 KiB are free

    def test_leaves_nothing_behind_after_an_error(self) -> None:
        with pytest.raises(subprocess.CalledProcessError), Netlab(2, None) as lab:
            lab.run(1, ["sh", "-c", "sleep 600 & exit 3"], check=True)
        assert _namespaces(os.getpid()) == []

    def test_two_labs_do_not_collide(self) -> None:
        with Netlab(1) as one, Netlab(1) as other:
            assert one.run(0, ["true"]).returncode == other.run(0, ["true"]).returncode == 0

    @pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL])
    def test_a_terminated_program_leaves_nothing(self, benchmarks: Path, sign: signal.Signals) -> None:
        code = "import time; from netlab import Netlab\nwith Netlab(2): print('up', flush=True); time.sleep(600)"
        program = subprocess.Popen([sys.executable, "-c", code], cwd=benchmarks, stdout=subprocess.PIPE, text=True)
        assert program.stdout is not None
        assert program.stdout.readline() == "up\n"
        assert len(_namespaces(program.pid)) == 3
        program.send_signal(sign)
        program.wait(timeout=20)
        program.stdout.close()
        with Netlab(1):  # a killed program cannot clean up; the next lab does
            assert _namespaces(program.pid) == []

    def test_an_unknown_host_is_named(self) -> None:
        with Netlab(2) as lab, pytest.raises(ValueError, match="no host 2; this lab has hosts 0 to 1"):
            lab.run(2, ["true"])


def test_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(NetlabError, match=r"ip and tc not found.*apt install iproute2"), Netlab(1):
        pass


def test_says_that_it_needs_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for tool in ("ip", "tc"):
        (tmp_path / tool).write_text("#!/bin/sh\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NetlabError, match="need root: run this with sudo"), Netlab(1):
        pass
