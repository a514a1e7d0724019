"""The one exception of this package."""

from __future__ import annotations

__all__ = ["DataError"]


class DataError(ValueError):
    """The data, or the way they are described, cannot be used; the message names the value and the remedy."""
