"""Exchanges with the store in the background, answered in the order in which they were sent."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from cache_backend.store import EmbeddingStore, ExchangeReply, ExchangeRequest, StoreError

__all__ = ["Exchanges", "Replies"]

Replies = Future[list[ExchangeReply]]


class Exchanges:
    """One thread that talks to the store.

    A request relies on the pushes of those before it, so after one that failed none is sent before ``recover``.
    """

    def __init__(self, store: EmbeddingStore) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hetrec-exchange")
        self._broken = threading.Event()

    def submit(self, requests: Sequence[ExchangeRequest], answered: list[ExchangeReply]) -> Replies:
        """Send requests one after the other, behind all that were submitted before.

        Args:
            answered: the replies that have come, of the first requests, which are not sent; further ones join it. After
                a failure it says where to go on: a store promises to apply once what failed, not what it answered.
        """
        return self._thread.submit(self._exchange, list(requests), answered)

    def recover(self, under_way: Iterable[Replies]) -> None:
        """Wait until everything under way has ended, one way or the other, and send again from now on."""
        wait(under_way)
        self._broken.clear()

    def shutdown(self, wait: bool = True) -> None:
        """End the thread once it has sent what was submitted; ``wait`` until then."""
        self._thread.shutdown(wait)

    def _exchange(self, requests: list[ExchangeRequest], answered: list[ExchangeReply]) -> list[ExchangeReply]:
        if self._broken.is_set():
            raise StoreError("an exchange before this one failed")
        try:
            for request in requests[len(answered) :]:
                answered.append(self._store.exchange(request))
        except BaseException:
            self._broken.set()
            raise
        return answered
