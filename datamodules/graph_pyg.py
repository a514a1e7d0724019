"""Graphs that PyG saved: one ``Data`` object in a ``.pt`` file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from datamodules.errors import DataError
from datamodules.graph_format import SPLITS, GraphSource, Relation

__all__ = ["read_pyg"]

_MASKS = {"train_mask": "train", "val_mask": "val", "test_mask": "test"}


def read_pyg(path: Path) -> GraphSource:
    """The graph of a ``.pt`` file: a ``Data``, its ``to_dict()``, or what ``InMemoryDataset.save`` writes of one graph.

    ``edge_index`` (2, E) and ``y`` (N) are needed; ``x`` (N, D) becomes dense columns, ``train_mask``, ``val_mask`` and
    ``test_mask`` the split: (N) booleans, of (N, splits) the first column, or the numbers of the nodes. A negative or
    missing ``y`` is no class.

    The file is unpickled with ``weights_only=True``: tensors and PyG's own containers, no other code.

    Raises:
        DataError: the file holds something else.
    """
    data = _load(path)
    edge_index, y = _tensor(data, "edge_index", path), _tensor(data, "y", path)
    if edge_index is None or y is None:
        raise DataError(
            f"{path} has {', '.join(map(str, data)) or 'nothing'}; expected edge_index and y, and maybe x and masks"
        )
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise DataError(f"{path}: edge_index has the shape {tuple(edge_index.shape)}; expected (2, E)")
    y = y.squeeze(1) if y.dim() == 2 and y.shape[1] == 1 else y
    if y.dim() != 1:
        raise DataError(f"{path}: y has the shape {tuple(y.shape)}; expected one class a node, (N)")
    known = torch.where(y >= 0, y, torch.full_like(y, -1))  # also NaN, which is not >= 0
    labels = _whole(known, "y", path, "classes are integers from 0")
    x = _tensor(data, "x", path)
    nodes = len(labels)
    if x is not None and (x.dim() != 2 or len(x) != nodes):
        raise DataError(f"{path}: x has the shape {tuple(x.shape)}; expected ({nodes}, D), as y has {nodes} nodes")
    source, target = _whole(edge_index, "edge_index", path, "nodes are numbered from 0").contiguous().numpy()
    return GraphSource(
        nodes=nodes,
        edges=Relation([(source, target)], keys=nodes, total=len(source), file=path),
        labels=[labels.numpy()],
        classes=int(labels.max().item()) + 1 if nodes else 0,
        split=_split(data, nodes, path),
        width=0 if x is None else x.shape[1],
        dense=[] if x is None else [x.float().contiguous().numpy()],
    )


def _load(path: Path) -> dict[str, Any]:
    # Here: it takes seconds to import, and only these files need it.
    from torch_geometric.data.data import Data, DataEdgeAttr, DataTensorAttr
    from torch_geometric.data.storage import GlobalStorage

    try:
        with torch.serialization.safe_globals([DataEdgeAttr, DataTensorAttr, GlobalStorage]):  # PyG allows the others
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle raises whatever its bytes lead to
        foreign = re.search(r"GLOBAL (\S+)", str(error))
        told = f"it holds a {foreign[1]}" if foreign else (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(
            f"{path} cannot be read as a PyG file: {told}. Only tensors and PyG's own containers are unpickled: save "
            f"the graph as torch_geometric.data.Data, or its to_dict()"
        ) from error
    if isinstance(content, tuple) and content:  # InMemoryDataset: data, slices, class
        slices = content[1] if len(content) > 1 else None
        if isinstance(slices, dict) and any(len(bounds) > 2 for bounds in slices.values()):
            raise DataError(f"{path} holds several graphs; expected one")
        content = content[0]
    if isinstance(content, Data):
        content = content.to_dict()
    if not isinstance(content, dict):
        raise DataError(f"{path} holds a {type(content).__name__}; expected a torch_geometric.data.Data")
    return content


def _tensor(data: dict[str, Any], name: str, path: Path) -> Tensor | None:
    value = data.get(name)
    if value is not None and not isinstance(value, Tensor):
        raise DataError(f"{path}: {name} is a {type(value).__name__}; expected a tensor")
    return value


def _whole(values: Tensor, name: str, path: Path, expected: str) -> Tensor:
    """Integers, also where they are stored as floats."""
    whole = values.long()
    wrong = values[whole != values] if values.is_floating_point() else values[:0]
    if len(wrong):
        raise DataError(f"{path}: {name} holds {wrong[0].item()}; {expected}")
    return whole


def _split(data: dict[str, Any], nodes: int, path: Path) -> npt.NDArray[np.uint8] | None:
    if not any(data.get(name) is not None for name in _MASKS):
        return None
    split = np.zeros(nodes, dtype=np.uint8)
    for name, part in _MASKS.items():
        mask = _tensor(data, name, path)
        if mask is None:
            continue
        chosen = _chosen(mask, nodes, name, path)
        twice = np.flatnonzero(chosen & (split > 0))
        if len(twice):
            raise DataError(f"{path}: node {twice[0]} is in {name} and in another mask; expected one at most")
        split[chosen] = SPLITS[part]
    return split


def _chosen(mask: Tensor, nodes: int, name: str, path: Path) -> npt.NDArray[np.bool_]:
    """The nodes of a part, (N): of booleans, or of what has as many values and only 0 and 1; else of node numbers."""
    mask = mask[:, 0] if mask.dim() == 2 else mask
    if mask.shape == (nodes,) and bool(((mask == 0) | (mask == 1)).all()):
        return np.asarray(mask.bool().numpy())
    if mask.dim() != 1 or mask.dtype == torch.bool or mask.is_floating_point():
        raise DataError(
            f"{path}: {name} has the shape {tuple(mask.shape)} and the type {mask.dtype}; expected ({nodes},) "
            f"booleans, or the numbers of the nodes"
        )
    members = mask.long().numpy()
    if len(members) and not 0 <= members.min() <= members.max() < nodes:
        wrong = members[(members < 0) | (members >= nodes)][0]
        raise DataError(f"{path}: {name} names node {wrong}; expected 0 .. {nodes - 1}")
    chosen = np.zeros(nodes, dtype=bool)
    chosen[members] = True
    return chosen
