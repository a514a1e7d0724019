"""Arrow IPC, also known as Feather, as record batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from datamodules.errors import DataError
from datamodules.table_sources import Progress

__all__ = ["ArrowTable"]


class ArrowTable:
    """An IPC file or stream. It is mapped into memory, and read once: its types are known."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def schema(self) -> pa.Schema:
        with self._open() as reader:
            return reader.schema

    def batches(self, progress: Progress) -> Iterator[pa.RecordBatch]:
        """The rows, in their order, with the file's columns."""
        with self._open() as reader:
            if isinstance(reader, pa.RecordBatchFileReader):
                yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
            else:
                yield from reader
        progress(self.path.stat().st_size)

    @contextmanager
    def _open(self) -> Iterator[pa.RecordBatchFileReader | pa.RecordBatchStreamReader]:
        try:
            with pa.memory_map(str(self.path)) as file:
                is_file = file.read(6) == b"ARROW1"
                file.seek(0)
                yield pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{self.path} cannot be read as Arrow IPC: {error}. Write it again") from error
