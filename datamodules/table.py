"""``data=table``: bring your own table, in whatever format it is."""

from __future__ import annotations

from os.path import expanduser
from pathlib import Path
from typing import Any, Literal

from datamodules.atomic import read_manifest
from datamodules.base import Role
from datamodules.errors import DataError
from datamodules.files import ParquetFiles
from datamodules.parquet import ParquetDataModule
from datamodules.table_convert import TableOptions, convert_table, copy_folder
from datamodules.table_sources import table_sources

__all__ = ["TableDataModule"]


class TableDataModule(ParquetDataModule):
    """Parquet, CSV, TSV, JSON lines or Arrow IPC (Feather) with a label column; text also packed (gzip, zstd).

    What is not Parquet converts once to Parquet, beside the source or in ``cache_dir``; the copy is made anew if the
    source changes. The types are those that hold all values of all files: int64, uint64, float64, else strings. Ids
    with leading zeros stay strings.

    Text has a header, or ``columns``. A header may be RecBole's (``user_id:token``, ``price:float``,
    ``tags:token_seq``). Values may be quoted; an empty one is missing.

    Args:
        path: a file, or a folder that is searched with its subfolders.
        columns: the names of the columns of text without a header, in their order. A first line of these names is a
            header all the same.
        separator: between two values of text; None: tab, comma, semicolon, bar or ``::``, as the first lines tell.
        types: the type of a column, where its values do not tell: ``string`` for numbers that are names, as codes and
            postcodes are; ``integer`` or ``float``, where another value is an error. Arrow and Parquet keep theirs.
        cache_dir: where converted copies are kept; None: at ``<path>.parquet``.

    The others are those of :class:`datamodules.parquet.ParquetDataModule`.
    """

    def __init__(
        self,
        path: str,
        columns: list[str] | None = None,
        separator: str | None = None,
        types: dict[str, Literal["string", "integer", "float"]] | None = None,
        cache_dir: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(path, **options)
        if separator is not None and (not separator or set(separator) & set('"\r\n')):
            raise DataError(f"data.separator={separator!r}; expected one or more characters, no quotes or line ends")
        self.table_options = TableOptions(columns, separator, self.label, dict(types or {}))
        self.cache_dir = cache_dir and expanduser(cache_dir)

    def prepare_data(self) -> None:
        """Converts what is not Parquet; then as in the base class."""
        for role in self._roles():
            self._parquet(role)
        super().prepare_data()

    def open_files(self, role: Role) -> ParquetFiles:
        return ParquetFiles.open(self._parquet(role), f"data.{role}")

    def _parquet(self, role: Role) -> Path:
        """The Parquet file or folder behind a path, made if need be."""
        path = Path(getattr(self, role))
        sources = table_sources(path)
        if not sources:
            return path
        known = None
        if role != "path":  # a column has the type that it has in the training rows, where that holds its values
            manifest = read_manifest(self._parquet("path"))
            known = manifest and manifest.get("evidence")
        final = copy_folder(path, self.cache_dir)
        convert_table(path, sources, final, self.table_options, known)
        return final
