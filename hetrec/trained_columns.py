"""The columns that a checkpoint was trained with, for data modules that find theirs by looking at the rows."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from hetrec.data import FeatureSpec

__all__ = ["remember_columns", "use_trained_columns"]

COLUMNS = "columns"  # in the .ckpt: {"dense": names, "sparse": names}


def remember_columns(checkpoint: dict[str, Any], spec: FeatureSpec) -> None:
    """Writes the names of the spec's columns into a checkpoint."""
    checkpoint[COLUMNS] = {"dense": list(spec.dense), "sparse": spec.sparse_names}


def use_trained_columns(options: dict[str, Any], checkpoint: Path) -> None:
    """Sets ``dense`` and ``sparse`` of a data module's options, where they are there and None.

    Other rows may look as if they had other columns, or have them in another order: in a hundred rows every user has an
    own one.
    """
    columns: dict[str, list[str]] = {}
    with suppress(Exception):  # whoever loads the checkpoint says what is wrong with it
        columns = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True).get(COLUMNS, {})
    for option, names in columns.items():
        if option in options and options[option] is None:
            options[option] = names
