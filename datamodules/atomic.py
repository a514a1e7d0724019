"""Folders that are either whole or absent: made under a temporary name, renamed last; one maker at a time."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cache_backend.disk import room_for
from datamodules.errors import DataError
from datamodules.progress import say

__all__ = ["MANIFEST", "exclusive", "make_once", "publish", "read_manifest", "write_json"]

MANIFEST = "_manifest.json"


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a file that is either whole or as it was before."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """What ``publish`` wrote; None where there is no finished folder."""
    try:
        with open(folder / MANIFEST) as file:
            content: dict[str, Any] = json.load(file)
            return content
    except (FileNotFoundError, NotADirectoryError):
        return None


def publish(work: Path, final: Path, manifest: dict[str, Any]) -> None:
    """Makes a finished working folder visible as ``final``, with its manifest; an older ``final`` is replaced."""
    write_json(work / MANIFEST, manifest)
    old = final.with_name(f".{final.name}.old")
    if old.exists():
        shutil.rmtree(old)
    if final.exists():
        final.rename(old)
    work.rename(final)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def exclusive(final: Path, option: str) -> Iterator[None]:
    """Holds the right to make ``final``; other processes of this machine wait. A killed holder loses it.

    Raises:
        DataError: the folder beside it cannot be written; ``option`` is what to set instead.
        OSError: the disk is full, with a message for the user.
    """
    lock = final.with_name(f".{final.name}.lock")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        file = open(lock, "w")  # noqa: SIM115 (held until the end)
    except OSError as error:
        raise DataError(
            f"cannot write {str(final)!r}: {error.strerror}. Set {option} to a folder that can be written"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that is writing {final}")
            fcntl.flock(file, fcntl.LOCK_EX)
        with room_for(final, f"make room, or set {option} to a folder on another disk; then run again"):
            yield


def make_once(
    folder: Path, parameters: dict[str, Any], option: str, write: Callable[[Path], dict[str, Any]]
) -> dict[str, Any]:
    """Makes a folder, unless one of the same parameters is there already.

    Args:
        folder: its final place.
        parameters: what it depends on, as JSON.
        option: what to set for another place.
        write: fills an empty working folder, and returns what to say of it.

    Returns:
        The manifest: the parameters, and what ``write`` returned.

    Raises:
        DataError: the place cannot be written, or holds other files.
    """
    manifest = read_manifest(folder)
    if manifest is not None and manifest.get("parameters") == parameters:
        return manifest  # without a lock: it may lie where nothing can be written
    with exclusive(folder, option):
        manifest = read_manifest(folder)
        if manifest is not None and manifest.get("parameters") == parameters:
            return manifest
        if manifest is None and folder.exists() and any(folder.iterdir()):
            raise DataError(f"{folder} holds files that were not made here; set {option} to an empty or new folder")
        work = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(work, ignore_errors=True)
        try:
            work.mkdir()
            manifest = {"parameters": parameters, **write(work)}
            publish(work, folder, manifest)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)  # nothing of it is used again
            raise
    return manifest
