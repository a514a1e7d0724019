"""Graphs as two tables: edges, and the classes of nodes (the layout of the MUSAE page networks)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from datamodules.errors import DataError
from datamodules.graph_csv import column_chunks, integers
from datamodules.graph_format import GraphSource, Relation

__all__ = ["GraphTables", "find_table", "read_tables"]

Int64 = npt.NDArray[np.int64]

_SUFFIXES = (".csv", ".csv.gz", ".parquet", ".pq")
_SPARSEST = 1000  # node ids per line of the files, beyond which they are no positions


@dataclass(frozen=True)
class GraphTables:
    """Which files and columns: of the edges their two ends, of the nodes their id and class."""

    edges: Path
    targets: Path
    source: str
    target: str
    node: str
    label: str


def find_table(folder: Path, name: str) -> Path | None:
    """The file ``name``, or ``name`` with the suffix of a table, in a folder."""
    for path in (folder / name, *(folder / f"{name}{suffix}" for suffix in _SUFFIXES)):
        if path.is_file():
            return path
    return None


def read_tables(tables: GraphTables) -> GraphSource:
    """A graph whose nodes are 0 .. the largest id in either file.

    Classes are integers from 0, or strings, which are numbered in their order. A node that has no line in ``targets``,
    or whose class is missing or negative, has none.

    Raises:
        DataError: a file or column is absent, ids are no numbers 0 .. N - 1, or a node has two classes.
    """
    ids, labels, classes = _read_labels(tables)
    largest, count = int(ids.max(initial=-1)), 0
    for sources, targets in _read_edges(tables):
        largest = max(largest, int(sources.max(initial=-1)), int(targets.max(initial=-1)))
        count += len(sources)
    if largest < 0:
        raise DataError(f"{tables.edges} and {tables.targets} hold no node; expected lines below the first")
    if largest > _SPARSEST * (len(ids) + count):
        raise DataError(
            f"{tables.edges} and {tables.targets} name node {largest} in {len(ids) + count:,} lines; nodes must be "
            f"numbered from 0 without large gaps, since each has a place in arrays. Number them first"
        )
    by_node = np.full(largest + 1, -1, dtype=np.int64)
    by_node[ids] = labels
    return GraphSource(
        nodes=largest + 1,
        edges=Relation(_read_edges(tables), keys=largest + 1, total=count, file=tables.edges),
        labels=[by_node],
        classes=classes,
    )


def _read_edges(tables: GraphTables) -> Iterator[tuple[Int64, Int64]]:
    for batch in column_chunks(tables.edges, (tables.source, tables.target)):
        ends = [integers(batch[name], name, tables.edges) for name in (tables.source, tables.target)]
        for end in ends:
            _check_ids(end, tables.edges)
        yield ends[0], ends[1]


def _check_ids(ids: Int64, path: Path) -> None:
    if len(ids) and int(ids.min()) < 0:
        raise DataError(f"{path} names node {ids.min()}; nodes are numbered from 0")


def _read_labels(tables: GraphTables) -> tuple[Int64, Int64, int]:
    """Ids, classes (-1: none) and the number of classes."""
    path, batches = tables.targets, list(column_chunks(tables.targets, (tables.node, tables.label)))
    if not batches:
        raise DataError(f"{path} has no lines below the first; expected the class of every node that has one")
    table = pa.Table.from_batches(batches)
    ids = integers(table[tables.node].combine_chunks(), tables.node, path)
    _check_ids(ids, path)
    values, counts = np.unique(ids, return_counts=True)
    if len(values) < len(ids):
        raise DataError(f"{path} names node {values[counts > 1][0]} more than once; expected one class a node")
    labels = _classes(table[tables.label].combine_chunks(), tables.label, path)
    return ids, labels, int(labels.max(initial=-1)) + 1


def _classes(column: pa.Array, name: str, path: Path) -> Int64:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        known = pc.fill_null(column, "")  # a CSV file has empty fields where nothing is known
        names = [n for n in np.unique(known.to_numpy(zero_copy_only=False)).tolist() if n]
        return np.asarray(pc.fill_null(pc.index_in(known, pa.array(names, column.type)), -1), dtype=np.int64)
    if pa.types.is_floating(column.type):  # integers with missing values often became floats
        column = pc.if_else(pc.is_nan(column), None, column)
    try:
        return np.maximum(np.asarray(pc.fill_null(pc.cast(column, pa.int64()), -1), dtype=np.int64), -1)
    except pa.ArrowException as error:
        raise DataError(f"{path}: column {name!r} holds no classes: {error}; expected integers or strings") from error
