"""How this package starts processes."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

__all__ = ["process_context"]

# Imports of the children that take seconds: the server has them once for all; only what this process has imported too.
_PRELOAD = [
    "pytorch_lightning",
    "torchrec.sparse.jagged_tensor",
    "datamodules.workers",
    "datamodules.criteo_convert",
    "datamodules.graph_reader",
]


def process_context(sent: Any = None) -> ForkServerContext:
    """Processes are forked from a clean server process.

    Forked from the training process, a child would inherit the locks of its threads (read-ahead, native code, RPC) in
    whatever state they are.

    Args:
        sent: what the processes are given. Where it is of a class of the main program, they run that program's top
            again, as Python's own do, and it must keep its work behind ``if __name__ == "__main__"``. Otherwise they do
            not, and a plain script may use them.
    """
    context = ForkServerContext() if b"__main__" in pickle.dumps(sent) else _WithoutMain()
    context.set_forkserver_preload([name for name in _PRELOAD if name in sys.modules])
    return context


class _Process(ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        with _main_is_no_file():
            return ForkServerProcess._Popen(process_obj)


class _WithoutMain(ForkServerContext):
    Process = _Process


@contextmanager
def _main_is_no_file() -> Iterator[None]:
    """A child runs the main program again where that has a file or a name; in a notebook it has neither."""
    main = vars(sys.modules["__main__"])
    kept: dict[str, Any] = {name: main[name] for name in ("__file__", "__spec__") if name in main}
    main.pop("__file__", None)
    main["__spec__"] = None
    try:
        yield
    finally:
        main.update(kept)
