"""What a shard refuses, and why. ``service.py`` says how each travels."""

from __future__ import annotations

__all__ = ["LogError", "LogFailed", "StorageError", "Unavailable", "WrongGeneration"]


class WrongGeneration(Exception):
    """The client speaks to a shard that has lost the state it relied on."""


class Unavailable(Exception):
    """Shutting down or overloaded: trying again may help."""


class LogFailed(Unavailable):
    """The log could not be written. Nothing more is acknowledged; the server ends."""


class StorageError(Exception):
    """The data folder cannot be used: in use, of another shard, or damaged."""


class LogError(StorageError):
    """A damaged log; names file and offset."""
