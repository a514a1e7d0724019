"""How much one client, and all together, may keep the server busy with."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from cache_backend.server.errors import Unavailable

__all__ = ["Streams"]


class Streams:
    """Counts calls under way, and lets none begin when the server is to stop."""

    def __init__(self, most: int, most_per_client: int) -> None:
        self._most, self._most_per_client = most, most_per_client
        self._by_client: Counter[str] = Counter()
        self._working = 0
        self._stopping = False
        self._changed = threading.Condition()

    @contextmanager
    def call(self, peer: str) -> Iterator[None]:
        """A call is under way while the block runs. ``peer``: gRPC's name, ``ipv4:HOST:PORT`` or ``ipv6:[HOST]:PORT``.

        Raises:
            Unavailable: one too many.
        """
        client = peer.rpartition(":")[0]
        with self._changed:
            if self._by_client.total() >= self._most:
                raise Unavailable(f"{self._most} calls are under way, the limit (--max-streams); try again later")
            if self._by_client[client] >= self._most_per_client:
                raise Unavailable(
                    f"{self._most_per_client} calls of {client} are under way, the limit (--max-streams-per-client); "
                    f"try again later"
                )
            self._by_client[client] += 1
        try:
            yield
        finally:
            with self._changed:
                self._by_client[client] -= 1
                if not self._by_client[client]:
                    del self._by_client[client]

    @contextmanager
    def work(self) -> Iterator[None]:
        """A request is being worked on, and ``drain`` waits for it.

        Raises:
            Unavailable: the server is about to stop.
        """
        with self._changed:
            if self._stopping:
                raise Unavailable("the server is stopping; try again when it is back")
            self._working += 1
        try:
            yield
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify_all()

    @property
    def under_way(self) -> int:
        with self._changed:
            return self._by_client.total()

    @property
    def stopping(self) -> bool:
        return self._stopping

    def drain(self, timeout_s: float) -> bool:
        """Let no request begin, and wait for those that have begun. False: not all ended in time."""
        with self._changed:
            self._stopping = True
            return self._changed.wait_for(lambda: self._working == 0, timeout_s)
