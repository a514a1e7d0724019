"""Criteo text files to Parquet: in parallel, resumable, and never half done.

Every source is cut into parts of about 64 MB. A part is written under a temporary name, renamed when it is whole, and
kept: a conversion that was killed goes on with the parts that are missing. All this happens in a hidden folder that
gets its real name last.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from datamodules.atomic import exclusive, publish, read_manifest, write_json
from datamodules.criteo_layout import CATEGORICAL
from datamodules.criteo_sniff import LONGEST_ROW, TextLayout, open_text, sniff
from datamodules.criteo_tsv import RowError, parse_block, read_blocks, schema
from datamodules.errors import DataError
from datamodules.keys import mix64
from datamodules.processes import process_context
from datamodules.progress import progress_bar

__all__ = ["convert"]

PART_BYTES = 64 << 20
_MOST_PARTS = 4096
ROW_GROUP = 32768
_FORMAT = 1
_SMALLEST_HASHES = 1024  # kept per column: distinct counts are exact up to here, then within about 3 %
_FILLER = np.uint64(2**64 - 1)
_PLAN = "_plan.json"


@dataclass(frozen=True)
class _Part:
    """The rows that begin in the bytes ``start .. stop`` of a source, and the file they go to."""

    source: str
    start: int
    stop: int | None
    layout: TextLayout
    target: str

    @property
    def sketch(self) -> Path:
        return Path(self.target).with_suffix(".npy")


def convert(
    sources: list[Path], final: Path, processes: int | None = None, part_bytes: int = PART_BYTES
) -> dict[str, Any]:
    """Writes the rows of ``sources``, in this order, to the folder ``final`` as Parquet; once, unless a source changed.

    Args:
        sources: text files, ``.gz`` or plain.
        final: the folder to make.
        processes: how many work at a time; None: as many as there are processors.
        part_bytes: the least size of a part.

    Returns:
        The manifest: the sources, ``labelled``, ``rows``, and per categorical column the number of ``distinct`` keys
        (missing included; exact up to 1,023, else within about 3 %).

    Raises:
        DataError: a source is malformed (the message has its name and the line), sources with and without labels are
            mixed, or ``final`` cannot be written.
    """
    layouts = [sniff(source) for source in sources]
    if len({layout.labelled for layout in layouts}) > 1:
        without = next(s for s, layout in zip(sources, layouts, strict=True) if not layout.labelled)
        raise DataError(
            f"{without} has 39 columns, no label (a Criteo test file), and lies beside files that have 40; set "
            f"data.path to the labelled file, or to a folder that holds only those"
        )
    states = [(str(s.resolve()), s.stat()) for s in sources]
    plan = {
        "format": _FORMAT,
        "labelled": layouts[0].labelled,
        "part_bytes": max(part_bytes, sum(s.st_size for _, s in states) // _MOST_PARTS),
        "sources": [{"path": p, "bytes": s.st_size, "modified_ns": s.st_mtime_ns} for p, s in states],
    }
    manifest = read_manifest(final)
    if manifest is not None and manifest.get("plan") == plan:
        return manifest  # without a lock: it may lie where nothing can be written
    work = final.with_name(f".{final.name}.partial")
    with exclusive(final, "data.cache_dir"), _swept_on_mistake(work):
        manifest = read_manifest(final)
        if manifest is not None and manifest.get("plan") == plan:
            return manifest
        if manifest is None and final.exists():
            raise DataError(f"{final} exists and was not made by this conversion; move it, or set data.cache_dir")
        _resume_or_clear(work, plan)
        parts = _parts(plan, layouts, work)
        processes = processes or len(os.sched_getaffinity(0))
        small = sum(s.st_size for _, s in states) < part_bytes  # processes would cost more than they save
        _run(parts, 1 if small else processes, f"converting {sources[0].name}")
        _check_unchanged(plan)
        manifest = {
            "plan": plan,
            "labelled": plan["labelled"],
            "rows": sum(pq.read_metadata(p.target).num_rows for p in parts),
            "distinct": dict(zip(CATEGORICAL, _merge_sketches(parts), strict=True)),
        }
        for extra in [*work.glob("*.npy"), *work.glob(".*"), work / _PLAN]:
            extra.unlink()
        publish(work, final, manifest)
    return manifest


@contextlib.contextmanager
def _swept_on_mistake(work: Path) -> Iterator[None]:
    """Where a source must change, nothing that was made of the sources is used again."""
    try:
        yield
    except DataError:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _check_unchanged(plan: dict[str, Any]) -> None:
    for source in plan["sources"]:
        try:
            state = os.stat(source["path"])
            same = (state.st_size, state.st_mtime_ns) == (source["bytes"], source["modified_ns"])
        except FileNotFoundError:
            same = False
        if not same:
            raise DataError(f"{source['path']} changed while it was converted; run again once it is complete")


def _resume_or_clear(work: Path, plan: dict[str, Any]) -> None:
    try:
        same = json.loads((work / _PLAN).read_text()) == plan
    except (FileNotFoundError, json.JSONDecodeError):
        same = False
    if not same:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        write_json(work / _PLAN, plan)


def _parts(plan: dict[str, Any], layouts: list[TextLayout], work: Path) -> list[_Part]:
    parts: list[_Part] = []
    for source, layout in zip(plan["sources"], layouts, strict=True):
        # What is compressed cannot be entered in the middle.
        cuts = [0] if layout.compressed else list(range(0, max(1, source["bytes"]), plan["part_bytes"]))
        for start, stop in zip(cuts, [*cuts[1:], None if layout.compressed else source["bytes"]], strict=True):
            target = str(work / f"part-{len(parts):05d}.parquet")
            parts.append(_Part(source["path"], start, stop, layout, target))
    return parts


def _run(parts: list[_Part], processes: int, description: str) -> None:
    def size(part: _Part) -> int:
        return (os.path.getsize(part.source) if part.stop is None else part.stop) - part.start

    missing = [p for p in parts if not Path(p.target).exists()]
    total = sum(size(p) for p in parts)
    with progress_bar("bytes") as bar:
        task = bar.add_task(description, total=total, completed=total - sum(size(p) for p in missing))
        if min(processes, len(missing)) <= 1:
            for part in missing:
                _convert_part(part, lambda count: bar.update(task, advance=count))
        else:
            _run_in_processes(missing, processes, lambda count: bar.update(task, advance=count))
        bar.update(task, completed=total)  # parts end with a row, so their sizes are not the bytes read to the last one


def _run_in_processes(parts: list[_Part], processes: int, progress: Callable[[int], None]) -> None:
    context = process_context()
    read, stop = context.Value("q", 0), context.Event()
    told = 0
    with ProcessPoolExecutor(min(processes, len(parts)), context, _start_worker, (read, stop)) as pool:
        pending = {pool.submit(_convert_in_worker, part) for part in parts}
        try:
            while pending:
                finished, pending = wait(pending, timeout=0.2, return_when=FIRST_EXCEPTION)
                now = read.value
                progress(now - told)
                told = now
                for future in finished:
                    future.result()
        except BaseException:
            stop.set()  # a part may be a compressed file of many gigabytes
            pool.shutdown(wait=True, cancel_futures=True)
            raise


_bytes_read: Synchronized[int] | None = None
_stop: Event | None = None


class _Stopped(Exception):
    """The parent wants no more."""


def _start_worker(counter: Synchronized[int], stop: Event) -> None:
    global _bytes_read, _stop
    _bytes_read, _stop = counter, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow_parent() -> None:
        # A worker whose parent was killed would wait for work for ever.
        parent.join()
        os._exit(1)

    threading.Thread(target=follow_parent, daemon=True).start()


def _convert_in_worker(part: _Part) -> None:
    def count(number: int) -> None:
        assert _bytes_read is not None
        assert _stop is not None
        if _stop.is_set():
            raise _Stopped
        with _bytes_read.get_lock():
            _bytes_read.value += number

    _convert_part(part, count)


def _convert_part(part: _Part, progress: Callable[[int], None]) -> None:
    """Writes one part: its sketch first, then its rows; the rows' file is the sign that both are whole."""
    target = Path(part.target)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    with _cleared_on_error(temporary):
        sketch = _write_rows(part, temporary, progress)
        hashes = io.BytesIO()
        np.save(hashes, sketch.hashes())  # to a file, a full disk would be an error without a reason
        part.sketch.write_bytes(hashes.getvalue())
        temporary.replace(target)


def _write_rows(part: _Part, target: Path, progress: Callable[[int], None]) -> _Sketch:
    source, layout = Path(part.source), part.layout
    sketch = _Sketch()
    lines_read = 0
    waiting: list[pa.RecordBatch] = []
    with pq.ParquetWriter(target, schema(layout.labelled), compression="zstd") as writer:
        try:
            for block in read_blocks(source, part.start, part.stop, layout.begin, progress):
                batch = parse_block(block, layout.labelled)
                lines_read += block.count(b"\n")
                sketch.add(batch)
                waiting.append(batch)
                if sum(b.num_rows for b in waiting) >= ROW_GROUP:
                    table = pa.Table.from_batches(waiting)
                    whole = table.num_rows // ROW_GROUP * ROW_GROUP
                    writer.write_table(table.slice(0, whole), row_group_size=ROW_GROUP)
                    waiting = table.slice(whole).to_batches()
        except RowError as error:
            line = _lines_before(part) + lines_read + error.row + 1
            raise DataError(f"{source}, line {line}: {error}") from None
        if any(b.num_rows for b in waiting):
            writer.write_table(pa.Table.from_batches(waiting), row_group_size=ROW_GROUP)
    with open(target, "rb+") as file:
        os.fsync(file.fileno())
    return sketch


@contextlib.contextmanager
def _cleared_on_error(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _lines_before(part: _Part) -> int:
    """Lines that end before the first row of a part."""
    if part.start <= part.layout.begin:
        return int(part.layout.header)
    lines, left = 0, part.start - 1
    with open_text(Path(part.source)) as (_, text):
        while left > 0:
            chunk = text.read(min(left, 1 << 24))
            lines += chunk.count(b"\n")
            left -= len(chunk)
        return lines + (1 if text.readline(LONGEST_ROW) else 0)


class _Sketch:
    """The smallest hashes of every column's distinct keys: their spacing tells how many there are."""

    def __init__(self) -> None:
        self._hashes = [np.empty(0, dtype=np.uint64) for _ in CATEGORICAL]

    def add(self, batch: pa.RecordBatch) -> None:
        for i, name in enumerate(CATEGORICAL):
            self.add_hashes(i, mix64(np.unique(batch[name].to_numpy()).view(np.uint64)))

    def add_hashes(self, column: int, hashes: npt.NDArray[np.uint64]) -> None:
        self._hashes[column] = np.unique(np.concatenate([self._hashes[column], hashes]))[:_SMALLEST_HASHES]

    def hashes(self) -> npt.NDArray[np.uint64]:
        """(26, 1024), filled up with the largest number."""
        filled = np.full((len(self._hashes), _SMALLEST_HASHES), _FILLER)
        for row, hashes in zip(filled, self._hashes, strict=True):
            row[: len(hashes)] = hashes
        return filled

    def distinct(self, column: int) -> int:
        hashes = self._hashes[column]
        if len(hashes) < _SMALLEST_HASHES:
            return len(hashes)
        return round((len(hashes) - 1) / (float(hashes[-1]) / 2.0**64))


def _merge_sketches(parts: list[_Part]) -> list[int]:
    merged = _Sketch()
    for part in parts:
        for column, hashes in enumerate(np.load(part.sketch)):
            merged.add_hashes(column, hashes[hashes != _FILLER])
    return [merged.distinct(i) for i in range(len(CATEGORICAL))]
