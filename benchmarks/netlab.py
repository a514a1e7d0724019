"""Several hosts on one machine, each behind a rate-limited link of its own to one switch.

A host is a network namespace; a veth pair leads from it to a bridge in one more namespace, and a token bucket limits
both ends. Nothing appears in the machine's own network. Needs root, ``ip`` and ``tc`` (Debian's ``iproute2``).

    with Netlab(hosts=3, rate="1gbit") as lab:
        server = lab.popen(0, ["hetrec-ps", "--listen", f"grpc://{lab.address(0)}:7070"])
        lab.run(1, ["ping", "-c", "1", lab.address(0)])
        print(lab.traffic(1))
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["Netlab", "NetlabError", "Traffic"]

# Room for one offloaded packet (64 KiB) and then some: smaller buckets throttle below their rate.
_BURST, _LATENCY = "128kb", "50ms"
_GRACE_S = 5.0


class NetlabError(RuntimeError):
    """There can be no hosts here; the message says what is missing."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that a host's link has carried so far, headers included."""

    sent: int
    received: int

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.sent - other.sent, self.received - other.received)


class Netlab:
    """A context manager: the hosts are there inside ``with``, and gone after it, with every process on them.

    On SIGTERM the block ends as if by ``sys.exit``. What a killed process left behind is removed by the next lab.

    Args:
        hosts: how many, 1 to 250.
        rate: of each link and direction, as ``tc`` writes it (``1gbit``); None: as fast as the machine copies.

    Raises:
        NetlabError: on entry, where this process is not root or iproute2 is absent.
    """

    def __init__(self, hosts: int, rate: str | None = "1gbit") -> None:
        if not 1 <= hosts <= 250:
            raise ValueError(f"a lab has 1 to 250 hosts, got {hosts}")
        self.hosts = hosts
        self.rate = rate

    def __enter__(self) -> Netlab:
        _check()
        _remove_left_behind()
        # The process's number is in the names, so that labs beside each other do not collide.
        self._prefix = f"hetlab{os.getpid()}-{_next_number()}-"
        self._on_sigterm: Any = None
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        if threading.current_thread() is threading.main_thread():
            self._on_sigterm = signal.signal(signal.SIGTERM, _exit)
        return self

    def __exit__(self, *_: object) -> None:
        if self._on_sigterm is not None:
            signal.signal(signal.SIGTERM, self._on_sigterm)
        _remove(name for name in _namespaces() if name.startswith(self._prefix))

    def address(self, host: int) -> str:
        """The host's IPv4 address."""
        return f"10.77.0.{self._checked(host) + 1}"

    def command(self, host: int, command: Sequence[str | Path]) -> list[str]:
        """The command line that runs ``command`` on a host. The loopback interface is up there too."""
        return ["ip", "netns", "exec", self._name(self._checked(host)), *map(str, command)]

    def popen(self, host: int, command: Sequence[str | Path], **options: Any) -> subprocess.Popen[Any]:
        """Start ``command`` on a host; ``options`` are those of ``subprocess.Popen``."""
        return subprocess.Popen(self.command(host, command), **options)

    def run(self, host: int, command: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[Any]:
        """Run ``command`` on a host to its end; ``options`` are those of ``subprocess.run``."""
        return subprocess.run(self.command(host, command), **options)

    def traffic(self, host: int) -> Traffic:
        """Bytes over the host's link so far."""
        files = [f"/sys/class/net/eth0/statistics/{direction}_bytes" for direction in ("tx", "rx")]
        sent, received = self.run(host, ["cat", *files], check=True, capture_output=True, text=True).stdout.split()
        return Traffic(int(sent), int(received))

    def _build(self) -> None:
        switch = f"{self._prefix}switch"
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for host in range(self.hosts):
            name, port = self._name(host), f"port{host}"
            _ip("netns", "add", name)
            _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", switch, "link", "set", port, "master", "br0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            if self.rate is not None:
                for namespace, device in ((name, "eth0"), (switch, port)):
                    bucket = ["rate", self.rate, "burst", _BURST, "latency", _LATENCY]
                    _call("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *bucket)

    def _name(self, host: int) -> str:
        return f"{self._prefix}{host}"

    def _checked(self, host: int) -> int:
        if not 0 <= host < self.hosts:
            raise ValueError(f"there is no host {host}; this lab has hosts 0 to {self.hosts - 1}")
        return host


def _check() -> None:
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if absent:
        raise NetlabError(f"{' and '.join(absent)} not found; on Debian and Ubuntu: apt install iproute2")
    if os.geteuid() != 0:
        raise NetlabError("hosts with links of their own need root: run this with sudo")


_numbers = iter(range(1 << 30))


def _next_number() -> int:
    return next(_numbers)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetlabError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


def _ip(*arguments: str) -> str:
    return _call("ip", *arguments)


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _ip("netns", "list").splitlines() if line.startswith("hetlab")]


def _remove(namespaces: Any) -> None:
    """End what still runs in the namespaces, then remove them."""
    namespaces = list(namespaces)

    def running() -> list[int]:
        return [int(pid) for name in namespaces for pid in _ip("netns", "pids", name).split()]

    for sign, grace in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
        for pid in running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sign)
        end = time.monotonic() + grace
        while running() and time.monotonic() < end:
            time.sleep(0.05)
    for name in namespaces:
        with contextlib.suppress(NetlabError):
            _ip("netns", "del", name)


def _remove_left_behind() -> None:
    """Labs whose process is no more: it was killed."""
    dead = []
    for name in _namespaces():
        owner = re.match(r"hetlab(\d+)-", name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            dead.append(name)
    _remove(dead)
