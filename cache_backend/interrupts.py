"""Ctrl-C must not fall between taking pending deltas out of a cache and keeping them where they are found again."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["uninterrupted"]


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Inside, Ctrl-C waits until the block ends. For blocks that end soon: they must not wait for anybody.

    Python calls the handler after whichever native call was running, before its result is stored.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield  # other threads are not interrupted
        return
    came = False

    def remember(signum: int, frame: object) -> None:
        nonlocal came
        came = True

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)
