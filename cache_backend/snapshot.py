"""Snapshots of a store: a folder of Parquet files and a manifest, written whole or not at all.

Rows are ordered by virtual bucket, so a snapshot can be dealt out to any number of shards. Columns: ``bucket`` int32,
``table`` string, ``key`` int64, ``clock`` int64, ``weight`` and (where the optimizer has one) ``state``, fixed-size
lists of float32. The manifest comes last and carries row counts and SHA-256 checksums; a folder without one is not a
snapshot.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cache_backend._table import EmbeddingTable
from cache_backend.store import TableSchema
from cache_backend.stored import bucket_runs

__all__ = [
    "Snapshot",
    "SnapshotError",
    "new_snapshot",
    "read_snapshot",
    "write_manifest",
    "write_rows_files",
    "write_snapshot",
]

FORMAT = 2
MANIFEST = "manifest.json"
_ROWS_PER_GROUP = 1 << 16


class SnapshotError(ValueError):
    """A snapshot that is absent, incomplete or altered."""


@dataclass
class Part:
    """A bounded run of rows of one format. buckets int32, keys and clocks int64, each (n,); rows float32
    (n, dim + state_dim)."""

    dim: int
    state_dim: int
    buckets: np.ndarray
    tables: pa.Array
    keys: np.ndarray
    clocks: np.ndarray
    rows: np.ndarray

    def table_ids(self, ids: Mapping[str, int]) -> np.ndarray:
        names = self.tables.dictionary.to_pylist()
        by_index = np.array([ids[name] for name in names], np.int32)
        return by_index[self.tables.indices.to_numpy(zero_copy_only=False)]


@dataclass
class Snapshot:
    """A snapshot whose manifest and checksums have been verified."""

    path: Path
    schemas: list[TableSchema]
    files: list[str]

    def parts(self) -> Iterator[Part]:
        for name in self.files:
            with pq.ParquetFile(self.path / name) as file:
                dim = file.schema_arrow.field("weight").type.list_size
                has_state = "state" in file.schema_arrow.names
                state_dim = file.schema_arrow.field("state").type.list_size if has_state else 0
                for batch in file.iter_batches(_ROWS_PER_GROUP):
                    rows = np.empty((batch.num_rows, dim + state_dim), np.float32)
                    rows[:, :dim] = batch.column("weight").flatten().to_numpy().reshape(-1, dim)
                    if state_dim:
                        rows[:, dim:] = batch.column("state").flatten().to_numpy().reshape(-1, state_dim)
                    table = batch.column("table")
                    if not isinstance(table, pa.DictionaryArray):
                        table = table.dictionary_encode()
                    integers = (batch.column(name).to_numpy() for name in ("bucket", "key", "clock"))
                    buckets, keys, clocks = integers
                    yield Part(dim, state_dim, buckets, table, keys, clocks, rows)


def write_snapshot(
    path: Path, schemas: Sequence[TableSchema], groups: Mapping[tuple[int, int], EmbeddingTable]
) -> None:
    """Write all rows to the new folder ``path``.

    Raises:
        FileExistsError: ``path`` exists; snapshots are never overwritten.
    """
    with new_snapshot(path) as folder:
        write_manifest(folder, schemas, write_rows_files(folder, "rows", schemas, groups))


@contextmanager
def new_snapshot(path: Path) -> Iterator[Path]:
    """A folder under a temporary name that becomes ``path`` when the block ends well, and nothing when it does not.

    Raises:
        FileExistsError: ``path`` exists; snapshots are never overwritten.
    """
    if path.exists():
        raise FileExistsError(f"{path} exists, and snapshots are never overwritten: remove it or choose another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
    try:
        building.chmod(0o755)  # mkdtemp makes it private
        yield building
        _fsync_folder(building)
        building.rename(path)
        _fsync_folder(path.parent)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def write_rows_files(
    folder: Path,
    prefix: str,
    schemas: Sequence[TableSchema],
    groups: Mapping[tuple[int, int], EmbeddingTable],
) -> dict[str, dict[str, Any]]:
    """One file a row format, ``PREFIX-DIMxSTATE.parquet``; returns what the manifest says of them."""
    files = {}
    for (dim, state_dim), table in groups.items():
        name = f"{prefix}-{dim}x{state_dim}.parquet"
        rows = _write_rows(folder / name, [schema.name for schema in schemas], table)
        files[name] = {"rows": rows, "sha256": _sha256(folder / name)}
    return files


def write_manifest(folder: Path, schemas: Sequence[TableSchema], files: Mapping[str, Mapping[str, Any]]) -> None:
    """The last file of a snapshot: what tables there are, and each file's row count and checksum."""
    manifest = {"format": FORMAT, "tables": [asdict(schema) for schema in schemas], "files": files}
    with open(folder / MANIFEST, "w") as f:
        json.dump(manifest, f, indent=1)
        f.flush()
        os.fsync(f.fileno())


def read_snapshot(path: Path) -> Snapshot:
    """Open a snapshot after verifying it.

    Raises:
        SnapshotError: naming what is absent or does not match.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except FileNotFoundError:
        raise SnapshotError(f"no embedding snapshot at {path}: {MANIFEST} is absent") from None
    except json.JSONDecodeError as e:
        raise SnapshotError(f"{path / MANIFEST} is not a manifest: {e}") from None
    if manifest.get("format") != FORMAT:
        raise SnapshotError(f"{path} has snapshot format {manifest.get('format')!r}; this version reads {FORMAT}")
    for name, expected in manifest["files"].items():
        if not (path / name).exists():
            raise SnapshotError(f"snapshot {path} is incomplete: {name} is absent")
        if _sha256(path / name) != expected["sha256"]:
            raise SnapshotError(f"snapshot {path} was altered: {name} does not match its checksum in {MANIFEST}")
        rows = pq.read_metadata(path / name).num_rows
        if rows != expected["rows"]:
            raise SnapshotError(f"snapshot {path}: {name} holds {rows} rows, {MANIFEST} says {expected['rows']}")
    return Snapshot(path, [TableSchema(**schema) for schema in manifest["tables"]], list(manifest["files"]))


def _write_rows(file: Path, names: Sequence[str], table: EmbeddingTable) -> int:
    dim, state_dim = table.dim, table.state_dim
    fields = [
        ("bucket", pa.int32()),
        ("table", pa.dictionary(pa.int32(), pa.string())),
        ("key", pa.int64()),
        ("clock", pa.int64()),
        ("weight", pa.list_(pa.float32(), dim)),
    ]
    if state_dim:
        fields.append(("state", pa.list_(pa.float32(), state_dim)))
    schema = pa.schema(fields)
    written = 0
    # Weights do not compress; without dictionaries and with plain pages this runs at the disk's speed.
    with pq.ParquetWriter(file, schema, compression="none", use_dictionary=["table"]) as writer:
        for first, last in bucket_runs(table, _ROWS_PER_GROUP):
            sizes = [table.bucket_size(b) for b in range(first, last)]
            n = sum(sizes)
            tables, keys = np.empty(n, np.int32), np.empty(n, np.int64)
            clocks, rows = np.empty(n, np.int64), np.empty((n, dim + state_dim), np.float32)
            at = 0
            for bucket, size in zip(range(first, last), sizes, strict=True):
                part = slice(at, at + size)
                table.export_bucket(bucket, tables[part], keys[part], clocks[part], rows[part])
                at += size
            buckets = np.repeat(np.arange(first, last, dtype=np.int32), sizes)
            columns = [
                pa.array(buckets),
                pa.DictionaryArray.from_arrays(pa.array(tables), pa.array(names, pa.string())),
                pa.array(keys),
                pa.array(clocks),
                pa.FixedSizeListArray.from_arrays(rows[:, :dim].ravel(), dim),
            ]
            if state_dim:
                columns.append(pa.FixedSizeListArray.from_arrays(rows[:, dim:].ravel(), state_dim))
            writer.write_batch(pa.record_batch(columns, schema=schema))
            written += n
    with open(file, "rb+") as f:
        os.fsync(f.fileno())
    return written


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
