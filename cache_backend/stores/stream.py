"""A DoExchange call that serves many exchanges: to open one takes as long as a small exchange."""

from __future__ import annotations

import atexit
import time
import weakref
from contextlib import suppress
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl

from cache_backend.flight import EXCHANGE, FRAME_SCHEMA, batch_of, frame_of

__all__ = ["ExchangeStream"]


class ExchangeStream:
    """One call. Its deadline is that of everything sent through it, so it serves exchanges only while it is young: each
    of them has at least three quarters of ``timeout_s``, and both ends forget an idle one when that is over.

    One thread may send while another one receives.
    """

    def __init__(self, client: fl.FlightClient, options: fl.FlightCallOptions, timeout_s: float) -> None:
        self._retire_at = time.monotonic() + timeout_s / 4
        self._begun = self._closed = False
        self._writer, self._reader = client.do_exchange(EXCHANGE, options)
        # Arrow prints a warning for each call that is still open when its server, or its process, ends.
        self._at_exit = atexit.register(partial(_close, weakref.ref(self)))

    def __del__(self) -> None:
        if hasattr(self, "_at_exit"):  # it was opened
            self.close()

    @property
    def young(self) -> bool:
        return time.monotonic() < self._retire_at

    def send(self, frame: np.ndarray) -> None:
        """Raises pa.ArrowException where the call has ended; why, ``receive`` tells."""
        if not self._begun:
            self._writer.begin(FRAME_SCHEMA)
            self._begun = True
        self._writer.write_batch(batch_of(frame))

    def receive(self) -> np.ndarray:
        """The next reply.

        Raises:
            fl.FlightError, pa.ArrowException: the server's error, or the connection's.
        """
        try:
            chunk = self._reader.read_chunk()
        except StopIteration:
            raise fl.FlightUnavailableError("the server ended the exchange without a reply") from None
        return frame_of(chunk.data)

    def cancel(self) -> None:
        """End the call at once, also for a thread that is in it. It must be closed nevertheless."""
        self._reader.cancel()

    def close(self) -> None:
        """End the call, in which nobody waits for an answer any more."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        for end in (self._writer.done_writing, self._writer.close):
            with suppress(fl.FlightError, pa.ArrowException, OSError):
                end()


def _close(stream: weakref.ref[ExchangeStream]) -> None:
    if (open_one := stream()) is not None:
        open_one.close()
