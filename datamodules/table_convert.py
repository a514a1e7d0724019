"""Tables in other formats to Parquet: once, in bounded memory, and never half done."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from datamodules.atomic import make_once
from datamodules.errors import DataError
from datamodules.progress import progress_bar, say
from datamodules.table_arrow import ArrowTable
from datamodules.table_json import JsonTable
from datamodules.table_layout import sniff
from datamodules.table_sources import Progress, format_of
from datamodules.table_text import TextTable
from datamodules.table_types import Evidence

__all__ = ["TableOptions", "convert_table", "copy_folder"]

_FORMAT = 1
_ROW_GROUP = 32768


@dataclass(frozen=True)
class TableOptions:
    """How text is read.

    Attributes:
        columns: the names of the columns of files without a header.
        separator: between two values; None: found.
        label: the label column's name, which tells a header from a row.
        types: ``string``, ``integer`` or ``float`` of columns, where neither a header nor their values shall tell.
    """

    columns: list[str] | None = None
    separator: str | None = None
    label: str = "label"
    types: dict[str, str] = field(default_factory=dict)


def copy_folder(path: Path, cache_dir: str | None) -> Path:
    """Where the converted copy of ``path`` is kept: beside it, or in ``cache_dir``."""
    if cache_dir is None:
        return path.with_name(f"{path.name}.parquet")
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    return Path(cache_dir) / f"{path.name}-{digest}"


def convert_table(
    root: Path,
    sources: list[Path],
    final: Path,
    options: TableOptions,
    known: dict[str, list[Any]] | None = None,
) -> dict[str, Any]:
    """Writes the rows of every source to a Parquet file of its own in the folder ``final``; once, unless one changed.

    A column has one type in all files: the narrowest of int64, uint64, float64 and string that holds all of its values.
    Ids with leading zeros, or beyond 64 bits, are strings. Arrow files keep their types.

    Args:
        root: the file, or the folder whose subfolders the copy repeats.
        sources: the files to convert, at or below ``root``.
        final: the folder to make.
        options: how text is read.
        known: ``evidence`` of another conversion's manifest, whose types shall hold here too.

    Returns:
        The manifest: ``rows`` and ``evidence``, what is known of each column.

    Raises:
        DataError: a source cannot be read; the message has file, line, column and value where these are known.
    """
    states = [(str(s.resolve()), s.stat()) for s in sources]
    parameters = {
        "format": _FORMAT,
        "sources": [{"path": p, "bytes": s.st_size, "modified_ns": s.st_mtime_ns} for p, s in states],
        "options": {"columns": options.columns, "separator": options.separator, "types": options.types},
        "known": known or {},
    }

    def write(work: Path) -> dict[str, Any]:
        tables = {source: _open(source, options) for source in sources}
        passes = sum(s.stat().st_size * (1 if isinstance(t, ArrowTable) else 2) for s, t in tables.items())
        with progress_bar("bytes") as bar:
            task = bar.add_task(f"converting {root.name}", total=passes)

            def progress(count: int) -> None:
                bar.update(task, advance=count)

            seen = {name: Evidence.from_json(content) for name, content in (known or {}).items()}
            names: dict[Path, list[str]] = {}
            for source, table in tables.items():
                with _naming(source):
                    names[source] = _survey(table, seen, progress)
            _declare(seen, options.types, root)
            types = {name: evidence.arrow_type(name) for name, evidence in seen.items()}
            _say_left_out([name for name in types if types[name] is None])
            rows = 0
            for source, table in tables.items():
                relative = source.relative_to(root) if source != root else Path(source.name)
                target = work / f"{relative}.parquet"
                own = {name: dtype for name in names[source] if (dtype := types[name]) is not None}
                with _naming(source):
                    if isinstance(table, ArrowTable):
                        rows += _write(table.batches(progress), table.schema, target)
                    else:
                        rows += _write(table.batches(own, progress), pa.schema(list(own.items())), target)
        return {"rows": rows, "evidence": {name: evidence.to_json() for name, evidence in seen.items()}}

    return make_once(final, parameters, "data.cache_dir", write)


def _open(source: Path, options: TableOptions) -> TextTable | JsonTable | ArrowTable:
    kind = format_of(source)
    if kind == "arrow":
        return ArrowTable(source)
    if kind == "json":
        return JsonTable(source)
    layout = sniff(source, options.separator, options.columns, options.label)
    lists = {name for name, what in layout.declared.items() if what.endswith("_seq")}
    layout.declared.update({name: what for name, what in options.types.items() if name not in lists})
    return TextTable(source, layout)


@contextmanager
def _naming(source: Path) -> Iterator[None]:
    """Makes what Arrow cannot do with a file a message about it."""
    try:
        yield
    except pa.ArrowException as error:
        raise DataError(f"{source} cannot become Parquet: {error}. Mend that column, or leave it out") from error


def _survey(table: TextTable | JsonTable | ArrowTable, seen: dict[str, Evidence], progress: Progress) -> list[str]:
    """Adds what a file tells of its columns; returns their names."""
    found = {} if isinstance(table, ArrowTable) else table.evidence(progress)
    for name, evidence in found.items():
        seen.setdefault(name, Evidence()).add(evidence)
    return list(found)


def _declare(seen: dict[str, Evidence], types: dict[str, str], root: Path) -> None:
    unknown = [name for name in types if name not in seen]
    if unknown:
        raise DataError(f"data.types names {', '.join(unknown)}; {root} has: {', '.join(seen)}")
    for name, what in types.items():
        seen[name].declare(name, what)


def _say_left_out(names: list[str]) -> None:
    if names:
        what = ", ".join(dict.fromkeys(names))
        say(f"columns of nested objects are left out: {what}. To use a field, write it as a column of its own")


def _write(batches: Iterable[pa.RecordBatch], schema: pa.Schema, target: Path) -> int:
    """Writes the batches in row groups of one size; returns the number of rows."""
    target.parent.mkdir(parents=True, exist_ok=True)
    waiting: list[pa.RecordBatch] = []
    with pq.ParquetWriter(target, schema, compression="zstd") as writer:
        for batch in batches:
            waiting.append(batch)
            if sum(len(b) for b in waiting) >= _ROW_GROUP:
                table = pa.Table.from_batches(waiting)
                whole = len(table) // _ROW_GROUP * _ROW_GROUP
                writer.write_table(table.slice(0, whole), row_group_size=_ROW_GROUP)
                waiting = table.slice(whole).to_batches()
        if waiting:
            writer.write_table(pa.Table.from_batches(waiting), row_group_size=_ROW_GROUP)
    with open(target, "rb+") as file:
        os.fsync(file.fileno())
    return int(pq.read_metadata(target).num_rows)
