"""Reads batches ahead of the training loop: the keys of coming batches are known while the current one computes."""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from hetrec.data import Batch

__all__ = ["LookaheadLoader"]

_POLL_S = 0.1  # how often a waiting thread looks whether it should stop
_CLOSE_S = 5.0  # how long closing waits for a wrapped loader that does not answer


class _Reader:
    """A thread that reads ``batches`` into a bounded queue: batches, then one exception or ``None`` for the end."""

    def __init__(self, batches: Iterable[Batch], skip: int, depth: int) -> None:
        self._queue: queue.Queue[Batch | BaseException | None] = queue.Queue(maxsize=max(1, depth))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(batches, skip), name="hetrec-lookahead", daemon=True)
        _readers.add(self)
        self._thread.start()

    def _run(self, batches: Iterable[Batch], skip: int) -> None:
        end: BaseException | None = None
        try:
            iterator = iter(batches)
            for number, batch in enumerate(iterator):
                if self._stop.is_set() or (number >= skip and not self._put(batch)):
                    break
            close = getattr(iterator, "close", None)  # a generator's clean-up runs here, not at some later collection
            if close is not None:
                close()
        except BaseException as error:  # handed to the consumer, whatever it is
            end = error
        self._put(end)

    def _put(self, item: Batch | BaseException | None) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=_POLL_S)
                return True
            except queue.Full:
                continue
        return False

    def get(self) -> Batch | BaseException | None:
        """The next item; ``None`` at the end and after ``close``."""
        while not self._stop.is_set():
            try:
                return self._queue.get(timeout=_POLL_S)
            except queue.Empty:
                continue
        return None

    def close(self, timeout: float | None = None) -> None:
        """Stops reading and waits, at most ``timeout`` seconds, until the thread has let go of the wrapped loader."""
        self._stop.set()
        self._thread.join(timeout)


_readers: weakref.WeakSet[_Reader] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # A daemon thread that still runs native code while the interpreter is torn down can crash it.
    for reader in list(_readers):
        reader.close(_CLOSE_S)


class LookaheadLoader:
    """Wraps any loader of :class:`Batch`; each batch it hands out knows the sparse features of the next ``depth`` ones.

    ``batch.upcoming[0]`` is the very object that the next batch carries as ``sparse_features``: a plan that was made
    for it belongs to that batch and to no other. One background thread reads; the wrapped loader is iterated again in
    every epoch and never re-created, so its workers persist. Only the newest iterator is valid. An error of the wrapped
    loader surfaces in ``next``, after the batches that were read before it.

    ``state_dict`` counts the batches handed out, not those read ahead. A loader with ``state_dict`` and
    ``load_state_dict`` (its state has the entry ``batches``) is told where to continue; with any other loader the first
    batches are read and dropped.

    Args:
        loader: an iterable of batches that can be iterated once per epoch.
        depth: batches to look ahead, at least 0 (0: reads one ahead, ``upcoming`` stays empty).
    """

    def __init__(self, loader: Iterable[Batch], depth: int = 1) -> None:
        if depth < 0:
            raise ValueError(f"lookahead depth is {depth}; it must be 0 or more")
        self.loader: Any = loader
        self.depth = depth
        self._stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._iterations = 0  # the number of iterators made; the last one is the valid one
        self._reader: _Reader | None = None
        self._began: dict[str, Any] | None = None  # where the running iteration began; None: none has begun
        self._handed_out = 0
        self._skip = 0  # for a loader that cannot continue by itself

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        # The reader starts at the first next(): trainers create iterators before they call set_epoch.
        self._iterations += 1
        return self._iterate(self._iterations)

    def _iterate(self, number: int) -> Iterator[Batch]:
        self._check_newest(number)
        self._stop_reading()
        self._began = dict(self.loader.state_dict()) if self._stateful else {"batches": self._skip}
        self._handed_out = self._began["batches"]
        reader = self._reader = _Reader(self.loader, self._skip, self.depth)
        self._skip = 0
        window: deque[Batch] = deque()
        ended, error = False, None
        try:
            while True:
                while not ended and len(window) <= self.depth:
                    item = reader.get()
                    if isinstance(item, Batch):
                        window.append(item)
                    else:
                        ended, error = True, item
                if not window:
                    if error is not None:
                        raise error
                    return
                batch = window.popleft()
                self._handed_out += 1
                yield replace(batch, upcoming=tuple(b.sparse_features for b in window))
                self._check_newest(number)
        finally:
            reader.close(_CLOSE_S)

    def _check_newest(self, number: int) -> None:
        if self._iterations != number:
            raise RuntimeError(
                "this iterator is out of date: the loader was iterated anew, or closed, since it was made"
            )

    # Lightning asks every loader that has a sampler for this one too.
    batch_sampler = None

    @property
    def sampler(self) -> LookaheadLoader:
        """Itself: Lightning calls ``loader.sampler.set_epoch(epoch)`` at the start of every epoch."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Tells the wrapped loader which epoch the next iteration is (nothing happens if it has no ``set_epoch``)."""
        set_epoch = getattr(self.loader, "set_epoch", None)
        if set_epoch is not None:
            self._stop_reading()
            set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position: what the wrapped loader says, with ``batches`` = batches of this epoch handed out so far."""
        if self._began is not None:
            return {**self._began, "batches": self._handed_out}
        return dict(self.loader.state_dict()) if self._stateful else {"batches": self._skip}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration goes on behind the batches that ``state`` counts."""
        self._stop_reading()
        if self._stateful:
            self.loader.load_state_dict(state)
        else:
            self._skip = int(state["batches"])

    def close(self) -> None:
        """Stops reading ahead and ends the current iterator. Safe to call at any time, any number of times."""
        self._iterations += 1
        if self._reader is not None:
            self._reader.close(_CLOSE_S)

    def _stop_reading(self) -> None:
        # The wrapped loader is about to be used by this thread, so the reader must be out of it, however long it takes.
        self._began = None
        if self._reader is not None:
            self._reader.close()
            self._reader = None
