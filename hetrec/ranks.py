"""The ranks of one machine as one program: one prints, and they end together, however one of them ends.

Lightning runs the command line again for every further rank. Left alone, ranks outlive a killed first one, each prints
the error that all of them met, and where one fails the others are killed with a signal that hides why.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed
from lightning_fabric.utilities.distributed import _set_num_threads_if_needed
from pytorch_lightning import Trainer
from pytorch_lightning.strategies.launchers import _SubprocessScriptLauncher

from hetrec.termination import end_together

__all__ = [
    "TERMINATED",
    "another_failed",
    "end_others",
    "interrupted_once",
    "join_first_rank",
    "launch_with_care",
    "started_by_first_rank",
    "tell_error",
]

#: Set for the ranks that the first one starts: its process id, and a folder for what they have to say at their end.
_FIRST_RANK = "HETREC_FIRST_RANK"
TERMINATED = 143  # the exit code after SIGTERM
_LOOK_S = 0.2
_SETTLE_S = 2.0  # between the end of one rank and the errors of the others that follow from it
_FLUSH_S = 10.0  # for a rank that was interrupted to push what its cache holds back
_END_S = 30.0  # for the other ranks to end after the first one has

_started: RankLauncher | None = None


class RankLauncher(_SubprocessScriptLauncher):
    """Starts the other ranks of this machine as Lightning does, and looks after them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._over = threading.Event()

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        global _started
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self.folder = Path(tempfile.mkdtemp(prefix="hetrec-ranks-"))
            atexit.register(shutil.rmtree, self.folder, ignore_errors=True)
            os.environ[_FIRST_RANK] = f"{os.getpid()}:{self.folder}"
            self._call_children_scripts()
            _started = self
            threading.Thread(target=self._watch, name="hetrec-ranks", daemon=True).start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)

    def kill(self, signum: Any) -> None:
        if signum == signal.SIGKILL:  # after Ctrl-C: this rank has pushed what it had, the others may still be at it
            self._over.set()
            if self.procs:
                self._interrupt()
        else:
            super().kill(signum)

    def finish(self) -> None:
        """Waits for the other ranks, which are about to end as this one is."""
        self._wait(_END_S)
        self.end()

    def end(self) -> None:
        """Ends the other ranks."""
        self._over.set()
        super().kill(signal.SIGKILL)
        self._wait(_END_S)

    def _interrupt(self) -> None:
        super().kill(signal.SIGINT)  # the terminal's goes to every rank, a signal to this process does not
        if not self._wait(_SETTLE_S):
            # A rank that waits for this one in a collective operation hears of it once the connection is closed, which
            # takes that nothing here refers to it. In a thread: where this rank's own half of an operation is under
            # way, it waits for the others.
            _, _, interrupted = sys.exc_info()
            traceback.clear_frames(interrupted)
            gc.collect()
            threading.Thread(target=_leave_process_group, daemon=True).start()
            self._wait(_FLUSH_S)
        self.end()

    def failure(self) -> str | None:
        """What ended another rank, if one has failed."""
        for rank, process in enumerate(self.procs, start=1):
            if process.poll() not in (None, 0, TERMINATED):
                told = self.folder / f"rank{rank}"
                if told.exists():
                    return f"rank {rank}: {told.read_text()}"
                how = f"exit code {process.returncode}" if process.returncode > 0 else f"signal {-process.returncode}"
                return f"rank {rank} (process {process.pid}) ended with {how}"
        return None

    def _wait(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while any(process.poll() is None for process in self.procs):
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        return True

    def _watch(self) -> None:
        """Ends the run where a rank failed and this one does not notice: it may wait for the other for ever."""
        while (failure := self.failure()) is None:
            if self._over.wait(_LOOK_S):
                return
        if self._over.wait(2 * _SETTLE_S):
            return
        print(f"error: {failure}", file=sys.stderr, flush=True)
        self.end()
        shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(1)


def launch_with_care(trainer: Trainer) -> None:
    """Where the trainer starts other ranks by running the command line again, looks after them."""
    end_together(trainer)
    launcher = trainer.strategy.launcher
    if type(launcher) is _SubprocessScriptLauncher:
        trainer.strategy._launcher = RankLauncher(
            launcher.cluster_environment, launcher.num_processes, launcher.num_nodes
        )


def started_by_first_rank() -> bool:
    return _FIRST_RANK in os.environ and os.environ.get("LOCAL_RANK", "0") != "0"


@contextmanager
def interrupted_once() -> Iterator[None]:
    """Inside, Ctrl-C is heard once: the terminal and the first rank both tell, and the impatient press twice, and the
    second time must not disturb what the first one has set off."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or handler == signal.SIG_IGN:
        yield
        return
    interrupted = False  # a flag, since Lightning puts this handler back when it has shut the run down

    def interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if not interrupted:
            interrupted = True
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def join_first_rank() -> None:
    """In a rank that the first one started: end when that one does, also where it was killed."""
    if started_by_first_rank():
        threading.Thread(target=_end_with_first_rank, name="hetrec-first-rank", daemon=True).start()


def another_failed() -> str | None:
    """After an error of this rank: what ended another one, of which the error is only the consequence.

    Waits a moment for it. In a rank that the first one started: empty if the first one has ended.
    """
    deadline = time.monotonic() + _SETTLE_S
    while time.monotonic() < deadline:
        if started_by_first_rank() and not _first_rank_lives():
            return ""
        if _started is not None and (failure := _started.failure()) is not None:
            return failure
        if not started_by_first_rank() and _started is None:
            return None
        time.sleep(0.05)
    return None


def tell_error(line: str) -> None:
    """Prints an error; a rank that the first one started leaves it to that one."""
    if started_by_first_rank():
        _, _, folder = os.environ[_FIRST_RANK].partition(":")
        (Path(folder) / f"rank{os.environ['LOCAL_RANK']}").write_text(line)
    else:
        print(f"error: {line}", file=sys.stderr)


def end_others(failed: bool) -> None:
    """Ends the ranks that this one started: at once where it failed, otherwise (done, or terminated) when they are.

    Raises:
        ChildProcessError: this rank is done, and another one has failed.
    """
    if _started is None:
        return
    if failed:
        _started.end()
        return
    _started.finish()
    if (failure := _started.failure()) is not None:
        raise ChildProcessError(failure)


def _first_rank_lives() -> bool:
    pid, _, _ = os.environ[_FIRST_RANK].partition(":")
    return os.getppid() == int(pid)


def _end_with_first_rank() -> None:
    while _first_rank_lives():
        time.sleep(_LOOK_S)
    _, _, folder = os.environ[_FIRST_RANK].partition(":")
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _leave_process_group() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
