"""A graph on disk: NumPy arrays in a folder, written in bounded memory and memory-mapped to read.

| file | dtype, shape | |
|---|---|---|
| ``colptr.npy`` | int64 (N + 1) | where the in-neighbours of every node begin in ``row`` |
| ``row.npy`` | int64 (E) | in-neighbours, node after node, ascending |
| ``labels.npy`` | int64 (N) | class, or -1 |
| ``split.npy`` | uint8 (N) | where the data bring a split: 1 train, 2 validation, 3 test, 0 none of them |
| ``dense.npy`` | float32 (N, D) | where there are dense columns |
| ``NAME.colptr.npy``, ``NAME.row.npy`` | as above | the nodes' keys of the categorical column NAME |

Nodes are numbered 0 .. N - 1. Self loops are dropped and an edge that occurs several times counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from datamodules.atomic import read_manifest
from datamodules.errors import DataError
from datamodules.progress import progress_bar

__all__ = ["SPLITS", "Graph", "GraphSource", "Relation", "write_graph"]

FORMAT = 1
SPLITS = {"train": 1, "val": 2, "test": 3}

Int64 = npt.NDArray[np.int64]

_MOST_SPARSE_CLASSES = 1000  # that may be more than there are nodes
_PARTITION_NODES = 1 << 16
_MOST_PARTITIONS = 256


@dataclass
class Relation:
    """Pairs (key, node), in chunks: for edges the key is the neighbour, the edge's source.

    Attributes:
        pairs: int64 arrays of equal length.
        keys: keys are ``0 .. keys - 1``.
        total: how many pairs, where that is known.
        what: what a pair is called in messages.
        file: where the pairs come from, for messages.
    """

    pairs: Iterable[tuple[Int64, Int64]]
    keys: int
    total: int | None = None
    what: str = "edges"
    file: Path | None = None


@dataclass
class GraphSource:
    """A graph as some format has it, to be written.

    Attributes:
        nodes: how many, N.
        edges: from neighbour to node.
        labels: chunks of the nodes' classes, int64; -1: none.
        classes: how many.
        split: uint8 (N), or None where the data bring no split.
        width: number of dense columns.
        dense: chunks of their rows, float32 (n, width).
        columns: the categorical columns.
    """

    nodes: int
    edges: Relation
    labels: Iterable[Int64]
    classes: int
    split: npt.NDArray[np.uint8] | None = None
    width: int = 0
    dense: Iterable[npt.NDArray[np.float32]] = ()
    columns: dict[str, Relation] = field(default_factory=dict)


@dataclass(frozen=True)
class Graph:
    """A graph that ``write_graph`` wrote. Arrays are mapped on first use, in every process for itself."""

    folder: Path
    nodes: int
    edges: int
    classes: int
    width: int
    columns: dict[str, int]
    has_split: bool

    @classmethod
    def open(cls, folder: Path) -> Graph:
        manifest = read_manifest(folder)
        assert manifest is not None
        names = ("nodes", "edges", "classes", "width", "columns", "has_split")
        return cls(folder, **{name: manifest[name] for name in names})

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in self.__dataclass_fields__}

    @cached_property
    def colptr(self) -> Int64:
        return self._array("colptr")

    @cached_property
    def row(self) -> Int64:
        return self._array("row")

    @cached_property
    def labels(self) -> Int64:
        return self._array("labels")

    @cached_property
    def split(self) -> npt.NDArray[np.uint8]:
        return self._array("split")

    @cached_property
    def dense(self) -> npt.NDArray[np.float32]:
        return self._array("dense") if self.width else np.zeros((self.nodes, 0), dtype=np.float32)

    @cached_property
    def bags(self) -> dict[str, tuple[Int64, Int64]]:
        """Of every categorical column: where the nodes' keys begin, (N + 1), and the keys."""
        return {name: (self._array(f"{name}.colptr"), self._array(f"{name}.row")) for name in self.columns}

    def _array(self, name: str) -> npt.NDArray[Any]:
        # "c": pages are shared with all who map the file, and torch, which has no read-only tensors, has no complaint.
        array: npt.NDArray[Any] = np.load(self.folder / f"{name}.npy", mmap_mode="c")
        return array.view(np.ndarray)


def write_graph(source: GraphSource, work: Path, both_ways: bool) -> dict[str, Any]:
    """Writes the files of a graph into an empty folder.

    Args:
        both_ways: whether every edge is taken in both directions.

    Returns:
        What ``Graph.open`` needs, and how many ``self_loops`` and ``duplicates`` were left out.

    Raises:
        DataError: a node, key or class is out of range, or a dense value is infinite.
    """
    with ExitStack() as stack:
        bar = stack.enter_context(progress_bar("pairs"))

        def csc(relation: Relation, prefix: str, loops: bool, both_ways: bool) -> _Counts:
            task = bar.add_task(relation.what, total=relation.total)
            counts = _write_csc(
                relation, source.nodes, work, prefix, loops, both_ways, lambda n: bar.update(task, advance=n)
            )
            bar.update(task, total=counts.read, completed=counts.read)
            return counts

        counts = csc(source.edges, "", loops=False, both_ways=both_ways)
        for name, relation in source.columns.items():
            csc(relation, f"{name}.", loops=True, both_ways=False)
    if source.classes > max(_MOST_SPARSE_CLASSES, source.nodes):
        raise DataError(
            f"there is a class {source.classes - 1} among {source.nodes:,} nodes; classes are numbered from 0 without "
            f"large gaps, since a model has an output for each. Number them, or give their names as strings"
        )
    labelled = _write_rows(work / "labels.npy", source.labels, np.dtype(np.int64), ())
    assert labelled == source.nodes
    if source.split is not None:
        _write_rows(work / "split.npy", [source.split], np.dtype(np.uint8), ())
    if source.width:
        rows = _write_rows(work / "dense.npy", _finite(source.dense), np.dtype(np.float32), (source.width,))
        if rows != source.nodes:
            raise DataError(f"there are {rows:,} rows of dense values for {source.nodes:,} nodes; expected one a node")
    return {
        "nodes": source.nodes,
        "edges": counts.written,
        "self_loops": counts.loops,
        "duplicates": counts.duplicates,
        "classes": source.classes,
        "width": source.width,
        "columns": {name: relation.keys for name, relation in source.columns.items()},
        "has_split": source.split is not None,
    }


@dataclass
class _Counts:
    """Pairs read; then, of the directed pairs: loops left out, repetitions left out, written."""

    read: int = 0
    loops: int = 0
    duplicates: int = 0
    written: int = 0


class _Rows:
    """A .npy file that grows by rows: its header is written again at the end, when their number is known."""

    def __init__(self, path: Path, dtype: np.dtype[Any], shape: tuple[int, ...] = ()) -> None:
        self._file = open(path, "wb")  # noqa: SIM115 (closed by close)
        self._dtype, self._shape = dtype, shape
        self.rows = 0
        self._write_header()
        self._begin = self._file.tell()

    def _write_header(self) -> None:
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": (self.rows, *self._shape)}
        np.lib.format.write_array_header_1_0(self._file, header)

    def append(self, rows: npt.NDArray[Any]) -> None:
        assert rows.dtype == self._dtype
        assert rows.shape[1:] == self._shape
        self._file.write(np.ascontiguousarray(rows).data)
        self.rows += len(rows)

    def close(self) -> None:
        self._file.seek(0)
        self._write_header()
        assert self._file.tell() == self._begin  # NumPy leaves room for a first dimension of any size
        self._file.close()


def _write_rows(path: Path, chunks: Iterable[npt.NDArray[Any]], dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    rows = _Rows(path, dtype, shape)
    for chunk in chunks:
        rows.append(chunk)
    rows.close()
    return rows.rows


def _write_csc(
    relation: Relation,
    nodes: int,
    work: Path,
    prefix: str,
    loops: bool,
    both_ways: bool,
    advance: Callable[[int], None],
) -> _Counts:
    """Sorts pairs by node and key: spilled by ranges of nodes first, so that one range at a time is in memory."""
    counts = _Counts()
    partitions = min(_MOST_PARTITIONS, max(1, -(-nodes // _PARTITION_NODES)))
    span = max(1, -(-nodes // partitions))
    if span * max(1, relation.keys) >= 2**63:
        raise DataError(f"{relation.keys:,} keys times {nodes:,} nodes are too many {relation.what} to sort")
    spilled = [work / f".spill-{p}" for p in range(partitions)]
    with ExitStack() as stack:
        files = [stack.enter_context(open(path, "wb")) for path in spilled]
        for keys, ids in relation.pairs:
            _check_range(keys, relation.keys, relation)
            _check_range(ids, nodes, relation)
            counts.read += len(keys)
            if not loops:
                kept = keys != ids
                counts.loops += len(keys) - int(np.count_nonzero(kept))
                keys, ids = keys[kept], ids[kept]
            if both_ways:
                keys, ids = np.concatenate([keys, ids]), np.concatenate([ids, keys])
            for partition, packed in _partitioned(keys, ids, relation.keys, span):
                files[partition].write(packed.data)
            advance(len(keys) // (1 + both_ways))
    colptr = _Rows(work / f"{prefix}colptr.npy", np.dtype(np.int64))
    row = _Rows(work / f"{prefix}row.npy", np.dtype(np.int64))
    colptr.append(np.zeros(1, dtype=np.int64))
    for partition, path in enumerate(spilled):
        packed = np.fromfile(path, dtype=np.int64)
        path.unlink()
        packed.sort()
        first = np.ones(len(packed), dtype=bool)
        np.not_equal(packed[1:], packed[:-1], out=first[1:])
        counts.duplicates += len(packed) - int(np.count_nonzero(first))
        ids, keys = np.divmod(packed[first], max(1, relation.keys))
        here = min(span, nodes - partition * span)
        colptr.append(row.rows + np.cumsum(np.bincount(ids, minlength=max(0, here)), dtype=np.int64))
        row.append(keys)
    colptr.close()
    row.close()
    counts.written = row.rows
    return counts


def _partitioned(keys: Int64, ids: Int64, key_count: int, span: int) -> Iterator[tuple[int, Int64]]:
    """The pairs of each range of nodes, as (node within the range) * key_count + key."""
    if not len(ids):
        return
    partition, within = np.divmod(ids, span)
    packed = within * key_count + keys
    order = np.argsort(partition, kind="stable")
    present, begins = np.unique(partition[order], return_index=True)
    ends = [*begins[1:], len(order)]
    for p, begin, end in zip(present, begins, ends, strict=True):
        yield int(p), packed[order[begin:end]]


def _check_range(values: Int64, count: int, relation: Relation) -> None:
    if len(values) and not 0 <= int(values.min()) <= int(values.max()) < count:
        wrong = values[(values < 0) | (values >= count)][0]
        file = f"{relation.file}: " if relation.file else ""
        raise DataError(f"{file}{relation.what} name {wrong}; expected 0 .. {count - 1}")


def _finite(chunks: Iterable[npt.NDArray[np.float32]]) -> Iterator[npt.NDArray[np.float32]]:
    """Dense values as they enter a model: missing ones (NaN) as 0, as in rows."""
    first = 0
    for rows in chunks:
        infinite = np.flatnonzero(np.isinf(rows).any(axis=1))
        if len(infinite):
            raise DataError(f"node {first + infinite[0]} has an infinite dense value; replace it by a finite one")
        yield np.nan_to_num(rows)
        first += len(rows)
