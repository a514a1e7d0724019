"""The end of a server can be asked for at any moment."""

from __future__ import annotations

import subprocess
import sys

ONE_BY_ONE = """
import os, random, signal
from cache_backend.server.lifecycle import Stop

random.seed(0)
for _ in range(400):
    stop = Stop()
    stop.on_signals(signal.SIGALRM)
    signal.setitimer(signal.ITIMER_REAL, 1e-6 + random.random() * 3e-5)
    stop.wait()
os._exit(0)
"""


def test_a_signal_on_the_way_into_the_wait_is_heard() -> None:
    """At random moments around the beginning of the wait; with handlers in Python some are never heard."""
    assert subprocess.run([sys.executable, "-c", ONE_BY_ONE], timeout=60, check=False).returncode == 0
