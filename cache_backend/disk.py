"""A full disk, told with the file that found no room."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["disk_is_full", "room_for"]

# No room on the disk, in a quota, for a file of that size.
_REASONS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def disk_is_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in _REASONS


@contextmanager
def room_for(path: str | Path, remedy: str = "make room, then run again") -> Iterator[None]:
    """Around what writes ``path``: names it where the disk is full, which the system's error does not.

    Raises:
        OSError: the disk is full; the message is for the user.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _REASONS:
            raise
        raise OSError(f"cannot write {path}: {os.strerror(error.errno)}; {remedy}") from error
