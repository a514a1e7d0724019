"""When the server is to end: signals, and the end of the process that started it."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

__all__ = ["stop_on_signals", "stop_with_parent"]

_LOOK_AT_PARENT_S = 1.0


def stop_on_signals(stop: threading.Event) -> None:
    """SIGTERM and SIGINT set ``stop``."""

    def handler(signum: int, frame: FrameType | None) -> None:
        stop.set()

    for which in (signal.SIGTERM, signal.SIGINT):
        signal.signal(which, handler)


def stop_with_parent(stop: threading.Event) -> None:
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
