"""A Lightning checkpoint and the embedding snapshot beside it, as one.

``NAME.ckpt`` holds the dense half; ``NAME.embeddings/`` beside it holds one snapshot of the rows, which the ``.ckpt``
names together with the checksum of its manifest. The order of the writes keeps a whole pair on disk at any moment:

1. the new snapshot, under a name that is not in use (``NAME.embeddings/step-120``), whole or not at all;
2. the new ``.ckpt`` under a temporary name, then renamed over the old one: from here on the new pair counts;
3. the snapshots that the old ``.ckpt`` named go.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_fabric.utilities.cloud_io import _is_local_file_protocol
from pytorch_lightning.plugins.io import AsyncCheckpointIO, CheckpointIO

from cache_backend.disk import room_for
from cache_backend.snapshot import MANIFEST

__all__ = ["RESTORE_FROM", "SNAPSHOT", "EmbeddingCheckpointIO", "snapshot_folder"]

SNAPSHOT = "embedding_snapshot"  # in the .ckpt: {"path": relative to the .ckpt, "manifest_sha256": hex}
RESTORE_FROM = "embedding_snapshot_path"  # only in a loaded checkpoint: where the checked snapshot lies


def snapshot_folder(checkpoint: str | Path) -> Path:
    """The folder beside ``NAME.ckpt`` that holds its snapshot: ``NAME.embeddings``."""
    path = Path(checkpoint)
    return path.with_name(f"{path.name.removesuffix('.ckpt')}.embeddings")


class EmbeddingCheckpointIO(CheckpointIO):
    """Saves, loads and removes both halves of a checkpoint together.

    Args:
        dense: writes and reads the ``.ckpt`` file.
        snapshot: writes a snapshot folder of the (flushed) store at a path, whole or not at all.

    Raises:
        ValueError: ``dense`` writes in the background, so nobody would know when the old snapshot may go.
    """

    def __init__(self, dense: CheckpointIO, snapshot: Callable[[Path], None]) -> None:
        super().__init__()
        if isinstance(dense, AsyncCheckpointIO):
            raise ValueError(
                "AsyncCheckpointIO cannot keep a checkpoint and its embedding snapshot together: remove it"
            )
        self.dense = dense
        self._snapshot = snapshot

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        if "global_step" not in checkpoint:
            # Not a checkpoint: processes that Lightning spawned send their weights home through here.
            self.dense.save_checkpoint(checkpoint, path, storage_options)
            return
        if not _is_local_file_protocol(path):
            raise ValueError(
                f"cannot save a checkpoint at {path}: embedding snapshots are written to local folders only"
            )
        folder = snapshot_folder(path)
        folder.mkdir(parents=True, exist_ok=True)
        snapshot = _unused(folder / f"step-{checkpoint['global_step']}")
        temporary = f"{os.fspath(path)}.tmp"
        try:
            with room_for(path, "what was saved before is still there; make room, then go on from it"):
                self._snapshot(snapshot)
                entry = {"path": f"{folder.name}/{snapshot.name}", "manifest_sha256": _manifest_checksum(snapshot)}
                self.dense.save_checkpoint({**checkpoint, SNAPSHOT: entry}, temporary, storage_options)
        except BaseException:  # also Ctrl-C
            with suppress(FileNotFoundError):
                os.remove(temporary)
            shutil.rmtree(snapshot, ignore_errors=True)
            with suppress(OSError):
                folder.rmdir()  # if it was made just now
            raise
        os.replace(temporary, path)

        for other in folder.iterdir():
            if other.is_dir() and other != snapshot:
                shutil.rmtree(other)

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The ``.ckpt``'s contents, plus under ``RESTORE_FROM`` where its snapshot lies.

        Raises:
            FileNotFoundError: the ``.ckpt`` or its snapshot is absent.
            ValueError: the ``.ckpt`` cannot be read or names no snapshot, or the snapshot is not the one it was saved
                with.
        """
        try:
            checkpoint = self.dense.load_checkpoint(path, *args, **kwargs)
        except (OSError, MemoryError):
            raise
        except Exception as error:  # of what torch.load throws at a file that is none of its own, no list is complete
            why, _, _ = str(error).strip().partition(". ")
            raise ValueError(
                f"cannot read checkpoint {path}: it is cut short, damaged or of another program "
                f"({type(error).__name__}{why and f': {why}'}); use another one, or start afresh without ckpt_path"
            ) from error
        entry = checkpoint.get(SNAPSHOT) if isinstance(checkpoint, dict) else None
        if entry is None:
            raise ValueError(f"{path} names no embedding snapshot: it was not saved by a hetrec task")
        snapshot = Path(os.path.realpath(path)).parent / entry["path"]
        if not (snapshot / MANIFEST).is_file():
            raise FileNotFoundError(
                f"checkpoint {path} belongs to the embedding snapshot {snapshot}, which is absent or without "
                f"{MANIFEST}: keep the .ckpt file and the .embeddings folder together"
            )
        found = _manifest_checksum(snapshot)
        if found != entry["manifest_sha256"]:
            raise ValueError(
                f"embedding snapshot {snapshot} is not the one that checkpoint {path} was saved with: "
                f"its {MANIFEST} has SHA-256 {found[:12]}…, the checkpoint expects {entry['manifest_sha256'][:12]}…"
            )
        return {**checkpoint, RESTORE_FROM: str(snapshot)}

    def remove_checkpoint(self, path: str | Path) -> None:
        is_link = os.path.islink(path)  # "last.ckpt" may be a link to another checkpoint, whose snapshot stays
        self.dense.remove_checkpoint(path)
        if not is_link:
            shutil.rmtree(snapshot_folder(path), ignore_errors=True)


def _unused(path: Path) -> Path:
    """``path``, or with the first number behind it that makes it new."""
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}.{number}")
    return candidate


def _manifest_checksum(snapshot: Path) -> str:
    return hashlib.sha256((snapshot / MANIFEST).read_bytes()).hexdigest()
