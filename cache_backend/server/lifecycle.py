"""When the server is to end: signals, and the end of the process that started it."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress

__all__ = ["Stop", "stop_with_parent"]

_LOOK_AT_PARENT_S = 1.0


class Stop:
    """Says that the server is to end: a pipe, which signals write to from where the processor takes them.

    Python runs a signal's handler in the main thread, between two of its instructions. A signal that comes just before
    the main thread blocks would be heard when it wakes up, that is never; and had the handler to set a
    ``threading.Event``, it could wait for a lock that the thread it interrupted holds.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)

    def set(self) -> None:
        with suppress(BlockingIOError):  # full: it was said often enough
            os.write(self._write, b"!")

    def wait(self) -> None:
        os.read(self._read, 1)

    def on_signals(self, *signals: signal.Signals) -> None:
        """These signals set it from now on; call it in the main thread."""
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for which in signals:
            signal.signal(which, lambda *_: None)


def stop_with_parent(stop: Stop) -> None:
    """Set ``stop`` when standard input closes, or when the parent process is gone.

    The second is for parents whose other children inherited the pipe and keep it open. Linux's PR_SET_PDEATHSIG would
    not do: it tells of the end of the parent's thread, which may end long before its process.
    """
    parent = os.getppid()

    def watch_stdin() -> None:
        try:
            while os.read(0, 1 << 12):
                pass
        except OSError:
            pass
        stop.set()

    def watch_parent() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_AT_PARENT_S)
        stop.set()

    for watch in (watch_stdin, watch_parent):
        threading.Thread(target=watch, name=watch.__name__, daemon=True).start()
