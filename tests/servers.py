"""Real parameter servers in processes of their own, for tests."""

from __future__ import annotations

import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class Server:
    """One ``hetrec-ps`` process on a free port of the loopback."""

    def __init__(self, *options: str, shard: str = "0/1", port: int = 0) -> None:
        command = [sys.executable, "-m", "cache_backend.server", "--shard", shard, "--exit-with-stdin"]
        self.process = subprocess.Popen(
            [*command, "--listen", f"grpc://127.0.0.1:{port}", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def address(self, within_s: float = 30.0) -> str:
        """Waits until it serves."""
        deadline = time.monotonic() + within_s
        assert self.process.stdout is not None
        while time.monotonic() < deadline:
            if select.select([self.process.stdout], [], [], 0.2)[0]:
                line = self.process.stdout.readline()
                if " serving on " in line:
                    return line.rsplit(" serving on ", 1)[1].strip()
                if not line:
                    break
        raise AssertionError(f"the server did not start; exit code {self.process.poll()}")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def servers(shards: int, *options: str) -> Iterator[Sequence[str]]:
    """``shards`` servers; yields their addresses in order."""
    started = [Server(*options, shard=f"{i}/{shards}") for i in range(shards)]
    try:
        yield [server.address() for server in started]
    finally:
        for server in started:
            server.stop()
