"""The rows of tables as plain tensors of a state dict, a share on every rank.

A table's share is ``NAME.keys`` int64 (n,), ascending; ``NAME.weight`` float32 (n, D); ``NAME.state`` float32 (n, S),
what its optimizer keeps with each row, absent where that is nothing (SGD); ``NAME.clock`` int64 (n,). Only rows that
somebody has trained are in it: all others follow from the table's seed.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cache_backend.store import MAX_CLOCK, EmbeddingStore, StoredRows
from hetrec.collection import StoredTable

__all__ = ["assign_share", "merge_state_dicts", "part_names", "read_share", "write_shares"]

_ROWS_AT_A_TIME = 1 << 16
_PARTS = ("keys", "weight", "state", "clock")


def part_names(table: StoredTable) -> list[str]:
    """What the share of a table consists of."""
    return [part for part in _PARTS if part != "state" or table.state_dim]


def write_shares(
    store: EmbeddingStore,
    tables: Sequence[StoredTable],
    part: int,
    parts: int,
    into: MutableMapping[str, Any],
    prefix: str,
) -> None:
    """Put this part of every table's rows into a state dict, as ``PREFIX.TABLE.…``."""
    pieces: dict[int, list[StoredRows]] = {table.id: [] for table in tables}
    for rows in store.export(list(pieces), part, parts):
        for table in np.unique(rows.tables).tolist():
            of = rows.tables == table
            pieces[table].append(
                StoredRows(rows.dim, rows.state_dim, rows.tables[of], rows.keys[of], rows.clocks[of], rows.rows[of])
            )
    for table in tables:
        found = pieces.pop(table.id)
        keys = np.concatenate([np.empty(0, np.int64), *(piece.keys for piece in found)])
        order = np.argsort(keys)
        clocks = np.concatenate([np.empty(0, np.int64), *(piece.clocks for piece in found)])[order]
        width = table.dim + table.state_dim
        values = np.concatenate([np.empty((0, width), np.float32), *(piece.rows for piece in found)])[order]
        share = {
            "keys": keys[order],
            "weight": np.ascontiguousarray(values[:, : table.dim]),
            "state": np.ascontiguousarray(values[:, table.dim :]),
            "clock": clocks,
        }
        for name in part_names(table):
            into[f"{prefix}.{table.name}.{name}"] = torch.from_numpy(share[name])


def read_share(
    table: StoredTable, state_dict: Mapping[str, Any], prefix: str, missing: list[str], errors: list[str]
) -> dict[str, Tensor] | None:
    """A table's share of a state dict, checked; None, with the reason in ``missing`` or ``errors``, where it is not
    there or does not fit."""
    names = {part: f"{prefix}.{table.name}.{part}" for part in part_names(table)}
    if absent := [name for name in names.values() if name not in state_dict]:
        missing += absent
        return None
    share = {part: state_dict[name] for part, name in names.items()}
    if wrong := [name for part, name in names.items() if not isinstance(share[part], Tensor)]:
        errors.append(f"{', '.join(wrong)}: tensors are expected")
        return None
    n = len(share["keys"]) if share["keys"].dim() else 0
    shapes = {"keys": (n,), "weight": (n, table.dim), "state": (n, table.state_dim), "clock": (n,)}
    found = []
    for part, tensor in share.items():
        if tuple(tensor.shape) != shapes[part]:
            found.append(
                f"size mismatch for {names[part]}: copying rows of shape {tuple(tensor.shape)}, the table here has "
                f"{shapes[part]} ({n} keys)"
            )
        elif tensor.is_floating_point() != (part in ("weight", "state")):
            found.append(
                f"{names[part]} has dtype {tensor.dtype}; weight and state are floats, keys and clock are integers"
            )
    if not found:
        share = {part: _plain(tensor) for part, tensor in share.items()}
        found = _wrong_values(table, share["keys"], share["clock"], names)
    errors += found
    return None if found else share


def _plain(tensor: Tensor) -> Tensor:
    dtype = torch.float32 if tensor.is_floating_point() else torch.int64
    return tensor.detach().to("cpu", dtype).contiguous()


def _wrong_values(table: StoredTable, keys: Tensor, clocks: Tensor, names: Mapping[str, str]) -> list[str]:
    found = []
    ascending = keys.sort().values
    twice = ascending[1:][ascending[1:] == ascending[:-1]]
    if twice.numel():
        found.append(f"{names['keys']} has key {int(twice[0])} more than once")
    if table.size and keys.numel() and not 0 <= int(ascending[0]) <= int(ascending[-1]) < table.size:
        outside = ascending[0] if int(ascending[0]) < 0 else ascending[-1]
        found.append(f"{names['keys']} has key {int(outside)}, the table has {table.size} rows (keys from 0)")
    if clocks.numel() and not 0 <= int(clocks.min()) <= int(clocks.max()) <= MAX_CLOCK:
        found.append(
            f"{names['clock']} reaches from {int(clocks.min())} to {int(clocks.max())}; clocks are 0 to 2^48 - 1"
        )
    return found


def assign_share(store: EmbeddingStore, table: StoredTable, share: Mapping[str, Tensor]) -> None:
    """Set the rows of a share that was read."""
    parts = [share[name] for name in ("weight", "state") if name in share]
    for start in range(0, len(share["keys"]), _ROWS_AT_A_TIME):
        some = slice(start, start + _ROWS_AT_A_TIME)
        keys, clocks = share["keys"][some].numpy(), share["clock"][some].numpy()
        rows = torch.cat([part[some] for part in parts], dim=1).numpy()
        store.assign(StoredRows(table.dim, table.state_dim, np.full(len(keys), table.id, np.int32), keys, clocks, rows))


def merge_state_dicts(state_dicts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The shares that several ranks saved, as one: to load them on another number of ranks.

    Rows are put together; everything else, which is the same on all ranks, is the first one's. On ``ranks`` ranks, from
    any number of ``files``, each rank loads::

        model.load_state_dict(merge_state_dicts([torch.load(f) for f in files[rank % len(files) :: ranks]]))

    Raises:
        ValueError: none is given.
    """
    if not state_dicts:
        raise ValueError("merge_state_dicts needs at least one state dict")
    first = state_dicts[0]
    merged = dict(first)
    for name in first:
        table, _, part = name.rpartition(".")
        if part in _PARTS and f"{table}.keys" in first and f"{table}.clock" in first:
            merged[name] = torch.cat([state_dict[name] for state_dict in state_dicts])
    return merged
