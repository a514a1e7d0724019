"""What counts as the user's mistake, and so ends in one line instead of a traceback."""

from __future__ import annotations

import dis
import errno
from pathlib import Path
from types import TracebackType

import pytorch_lightning
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from cache_backend import StoreError

__all__ = ["UserError", "is_users_mistake", "one_line", "users_mistake"]

_ROOT = Path(__file__).resolve().parents[1]
_OURS = tuple(str(_ROOT / room) for room in ("hetrec", "cache_backend", "models", "datamodules"))
_LIGHTNING = str(Path(pytorch_lightning.__file__).parent)
_ADVISERS = tuple(f"{_LIGHTNING}/{room}/" for room in ("callbacks", "tuner"))
# What the machine refuses, wherever it is asked: rights, a read-only or full disk, open files.
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE}
_RAISE = dis.opmap["RAISE_VARARGS"]


class UserError(ValueError):
    """A mistake on the command line. Its message is one line: the value, what was expected, and the remedy."""


def is_users_mistake(error: BaseException) -> bool:
    """Whether ``error`` was worded for the person at the command line.

    The project raises ``ValueError``, ``IndexError`` (a key outside its table) and the ``OSError`` family for callers'
    mistakes and asserts its own invariants. So an error of those types that a ``raise`` statement of ours threw carries
    a message for the user. So does Lightning's ``MisconfigurationException``, its ``ValueError`` (an option of the
    trainer that does not fit the data), and what its callbacks and tuners raise (a metric that nobody logs). The same
    types thrown by anything else (numpy, torch, an unpacking that does not fit) are bugs, ours most likely, and keep
    their traceback. An ``OSError`` by which the machine refuses (a read-only or full disk, too many open files) names
    the file itself. A ``StoreError`` tells of servers that cannot be reached, are not the ones they were, or turned
    this client away.
    """
    if isinstance(error, (UserError, MisconfigurationException, StoreError)):
        return True
    return (
        (isinstance(error, (ValueError, IndexError, OSError)) and _raised_in(_OURS, error))
        or (isinstance(error, OSError) and error.errno in _REFUSED)
        or (isinstance(error, ValueError) and _raised_in(_LIGHTNING, error))
        or (isinstance(error, (RuntimeError, AttributeError)) and _raised_in(_ADVISERS, error))
    )


def users_mistake(error: BaseException) -> BaseException | None:
    """``error``, or what caused it, if that was worded for the person at the command line.

    A constructor's complaint about an option reaches us as the cause of jsonargparse's own error.
    """
    cause: BaseException | None = error
    while cause is not None and not is_users_mistake(cause):
        cause = cause.__cause__
    return cause


def _raised_in(places: str | tuple[str, ...], error: BaseException) -> bool:
    """Whether a ``raise`` statement of a file whose path begins so threw it."""
    traceback: TracebackType | None = error.__traceback__
    if traceback is None:
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    code = traceback.tb_frame.f_code
    return code.co_filename.startswith(places) and code.co_code[traceback.tb_lasti] == _RAISE


def one_line(error: BaseException) -> str:
    """The message of ``error`` without line breaks."""
    return " ".join(str(error).split())
