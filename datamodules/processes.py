"""How this package starts processes."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

__all__ = ["process_context"]


def process_context() -> ForkServerContext:
    """Processes are forked from a clean server process.

    Forked from the training process, a child would inherit the locks of its threads (read-ahead, native code, RPC) in
    whatever state they are. The server imports what the children need, once.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["__main__", "torch.utils.data", "datamodules.workers", "datamodules.criteo_convert"]
    )
    return context
