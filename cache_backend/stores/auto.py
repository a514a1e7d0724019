"""The store that fits the run: in process for one rank, servers of this machine for several."""

from __future__ import annotations

import atexit
import os
import select
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Literal

from cache_backend.store import EmbeddingStore, StoreError
from cache_backend.stores.local import LocalStore
from cache_backend.stores.remote import RemoteStore, RowCodec

if TYPE_CHECKING:
    from typing import Any

__all__ = ["AutoStore"]

#: The first rank starts the servers; the ranks that it starts find them here.
ADDRESSES = "HETREC_AUTO_STORE"
_START_S = 60.0
_STOP_S = 10.0


class AutoStore:
    """Chooses by the number of ranks: one trains on a ``LocalStore``, several share servers started for the run.

    Args:
        shards: server processes to start for several ranks.
        push_codec, fetch_codec: how rows travel to and from them (see ``RemoteStore``).
        clock: how a push merges into a row's clock. ``lamport``: the later of both (HET). ``sum``: every update counts.
    """

    def __init__(
        self,
        shards: int = 1,
        push_codec: RowCodec = "fp32",
        fetch_codec: RowCodec = "fp32",
        clock: Literal["lamport", "sum"] = "lamport",
    ) -> None:
        if not 1 <= shards <= 64:
            raise ValueError(f"store.shards must be 1 to 64 processes of this machine, got {shards}")
        self.shards = shards
        self.clock = clock
        self._codecs: dict[str, Any] = {"push_codec": push_codec, "fetch_codec": fetch_codec}

    def for_ranks(self, world_size: int, nodes: int) -> EmbeddingStore:
        """The store itself.

        Raises:
            ValueError: the ranks are on several machines.
            StoreError: a server did not start.
        """
        if world_size == 1:
            return LocalStore(self.clock)
        if nodes > 1:
            raise ValueError(
                f"{nodes} machines need servers that all of them reach: start hetrec-ps and set store=remote "
                "store.addresses=[...]"
            )
        if ADDRESSES not in os.environ:
            os.environ[ADDRESSES] = ",".join(_start(self.shards, self.clock))
        return RemoteStore(os.environ[ADDRESSES].split(","), **self._codecs)


def _start(shards: int, clock: str) -> list[str]:
    """Servers that end with this process, however it ends: each watches its standard input."""
    command = [sys.executable, "-m", "cache_backend.server", "--listen", "grpc://127.0.0.1:0", "--exit-with-stdin"]
    servers = [
        # Sessions of their own: Ctrl-C is for the ranks, which still have deltas to push.
        subprocess.Popen(
            [*command, "--shard", f"{i}/{shards}", "--clock", clock],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for i in range(shards)
    ]
    atexit.register(_stop, servers)
    return [_address_of(server) for server in servers]


def _address_of(server: subprocess.Popen[str]) -> str:
    deadline = time.monotonic() + _START_S
    assert server.stdout is not None
    while time.monotonic() < deadline:
        if not select.select([server.stdout], [], [], 0.5)[0]:
            continue
        line = server.stdout.readline()
        if " serving on " in line:
            return line.rsplit(" serving on ", 1)[1].strip()
        if not line:
            break
    raise StoreError(f"a parameter server did not start within {_START_S:g} s (exit code {server.poll()})")


def _stop(servers: list[subprocess.Popen[str]]) -> None:
    for server in servers:
        server.terminate()
    for server in servers:
        try:
            server.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()
