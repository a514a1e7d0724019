"""How this package starts processes."""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.context import ForkServerContext

__all__ = ["process_context"]

# A child runs the top of the main program again. What a training program imports there takes seconds, so the server
# imports it once for all of them; only what this process has imported too.
_PRELOAD = [
    "pytorch_lightning",
    "torchrec.sparse.jagged_tensor",
    "datamodules.workers",
    "datamodules.criteo_convert",
    "datamodules.graph_reader",
]


def process_context() -> ForkServerContext:
    """Processes are forked from a clean server process.

    Forked from the training process, a child would inherit the locks of its threads (read-ahead, native code, RPC) in
    whatever state they are.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([name for name in _PRELOAD if name in sys.modules])
    return context
