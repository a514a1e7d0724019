"""``data=criteo``: the Criteo click logs, as published (text) or as Parquet."""

from __future__ import annotations

from os.path import expanduser
from pathlib import Path
from typing import Any, Literal

from datamodules.atomic import read_manifest
from datamodules.base import HetDataModule, Role
from datamodules.columns import DenseColumn, SparseColumn
from datamodules.criteo_convert import convert
from datamodules.criteo_csv import convert_csv, has_csv_header
from datamodules.criteo_layout import CATEGORICAL, INTEGERS, LABEL, MISSING
from datamodules.errors import DataError
from datamodules.files import ParquetFiles, list_parquet, natural_key
from datamodules.progress import say
from datamodules.reader import Columns
from datamodules.synthetic import synthetic_folder
from datamodules.synthetic_rows import SyntheticRows, write_synthetic
from datamodules.table_convert import copy_folder
from hetrec.data import FeatureSpec, SparseFeature, TableSpec

__all__ = ["CriteoDataModule"]

DEFAULT_PATH = "data/criteo"
_TEXT_SUFFIXES = ("", ".tsv", ".txt", ".csv")
_STAND_IN = SyntheticRows(rows=200_000, scale=0.01, skew=1.1, seed=0)


class CriteoDataModule(HetDataModule):
    """Criteo Kaggle and Terabyte: a label, 13 integers ``I1 .. I13``, 26 categories ``C1 .. C26``, a table each.

    * Integers enter as ``log(1 + max(x, 0))``; missing ones as 0. (HET takes ``log(x + 1)``, which is not finite for
      the -1 and less that the second column holds.)
    * Categories are the 32-bit hexadecimal numbers of the file, as int64 keys, without a vocabulary. Missing is key -1,
      which no category has. The tables have no size; ``expected_rows`` says how many distinct keys were counted.
    * Text converts once to Parquet, beside the source or in ``cache_dir``. The copy is made anew if the source changes.
    * A file of 39 columns has no labels: it can be predicted, not trained or tested on.
    * If ``path`` is the default and nothing is there, a generated set of 200,000 rows takes its place (and says so).

    Args:
        path: a text file (``.gz`` or not), a folder of them, a Parquet file or a folder of those. Parquet, and CSV with
            a header, have the columns ``label``, ``I1 .. I13`` (raw integers) and ``C1 .. C26`` (integers, in Parquet,
            or hexadecimal strings).
        val_path: the same, for validation.
        test_path: the same, for testing.
        cache_dir: where converted copies are kept; None: at ``<path>.parquet``.

    The others are those of :class:`datamodules.base.HetDataModule`.
    """

    def __init__(
        self,
        path: str = DEFAULT_PATH,
        val_path: str | None = None,
        test_path: str | None = None,
        cache_dir: str | None = None,
        val_fraction: float = 0.1,
        test_fraction: float = 0.1,
        split: Literal["hash", "order"] = "hash",
        batch_size: int | None = None,
        num_workers: int = 0,
        lookahead: int = 1,
        shuffle: bool = True,
        shuffle_buffer: int = 65536,
        seed: int = 0,
    ) -> None:
        super().__init__(
            path=path,
            val_path=val_path,
            test_path=test_path,
            val_fraction=val_fraction,
            test_fraction=test_fraction,
            split=split,
            batch_size=batch_size,
            num_workers=num_workers,
            lookahead=lookahead,
            shuffle=shuffle,
            shuffle_buffer=shuffle_buffer,
            seed=seed,
        )
        self.cache_dir = cache_dir and expanduser(cache_dir)

    @property
    def spec(self) -> FeatureSpec:
        """The tables' ``expected_rows`` are known once the data were converted, so from ``setup`` on at the latest."""
        distinct = self._distinct()
        return FeatureSpec(
            dense=INTEGERS,
            sparse=tuple(SparseFeature(name, name) for name in CATEGORICAL),
            tables=tuple(TableSpec(name, expected_rows=distinct.get(name)) for name in CATEGORICAL),
            label=LABEL,
        )

    def columns(self, labelled: bool) -> Columns:
        return Columns(
            dense=tuple(DenseColumn(name, log=True) for name in INTEGERS),
            sparse=tuple(SparseColumn(name, missing=MISSING, hexadecimal=True) for name in CATEGORICAL),
            label=LABEL if labelled else None,
        )

    def prepare_data(self) -> None:
        """Converts what is text, or makes the stand-in."""
        for role in ("path", "val_path", "test_path"):
            if getattr(self, role) is not None:
                self._parquet(role)

    def open_files(self, role: Role) -> ParquetFiles:
        files = ParquetFiles.open(self._parquet(role), f"data.{role}")
        wanted = [*INTEGERS, *CATEGORICAL]
        absent = [name for name in wanted if name not in files.columns]
        if absent:
            raise DataError(
                f"data.{role}={getattr(self, role)!r} lacks the Criteo columns {', '.join(absent)}; expected label, "
                f"I1 .. I13, C1 .. C26. For other columns use data=table"
            )
        return files

    def missing_label_message(self, file: str, role: Role) -> str:
        return (
            f"data.{role}={getattr(self, role)!r} has no label (a Criteo test file has 39 columns, without it): it can "
            f"be used for predict only. Train and test on labelled files, with 40 columns"
        )

    def _parquet(self, role: Role) -> Path:
        """The Parquet file or folder behind a path, made if need be."""
        path = Path(getattr(self, role))
        if self._is_absent(role):
            return self._stand_in()
        sources = self._text_sources(role)
        if not sources:
            return path
        folder = self._copy_folder(path)
        if has_csv_header(sources[0]):
            convert_csv(path, sources, folder)
        else:
            convert(sources, folder)
        return folder

    def _stand_in(self) -> Path:
        """The generated set that takes the place of the default path."""
        folder = self._stand_in_folder()
        if not self._announced and read_manifest(folder) is None:
            say(
                f"There is nothing at {self.path}: training on a generated Criteo-shaped set instead (200,000 rows, "
                f"made once, kept in {folder}). For the real data put Kaggle's train.txt or the Terabyte day_* files "
                f"there, or set data.path."
            )
        elif not self._announced:
            say(f"There is nothing at {self.path}: training on the generated Criteo-shaped set in {folder}.")
        manifest = write_synthetic(_STAND_IN, folder)
        if not self._announced:
            say(f"The best reachable AUC on it is {manifest['best_auc']:.4f}.")
        self._announced = True
        return folder

    def _is_absent(self, role: Role) -> bool:
        """Whether the default path has nothing to offer.

        Raises:
            DataError: another path has nothing to offer.
        """
        path = Path(getattr(self, role))
        if path.is_file() or (path.is_dir() and (list_parquet(path) or _text_files(path))):
            return False
        if role == "path" and self.path == DEFAULT_PATH:
            return True
        what = "holds no text and no Parquet file" if path.exists() else "does not exist"
        raise DataError(
            f"data.{role}={str(path)!r} {what}; give a Criteo text file (Kaggle's train.txt, Terabyte's day_0, "
            f"also .gz), a Parquet file, or a folder of either"
        )

    def _text_sources(self, role: Role) -> list[Path]:
        path = Path(getattr(self, role))
        if path.is_file():
            return [] if path.suffix in (".parquet", ".pq") else [path]
        texts, parquet = _text_files(path), list_parquet(path)
        if texts and parquet:
            raise DataError(
                f"data.{role}={str(path)!r} holds text ({texts[0].name}) and Parquet ({parquet[0].name}); "
                f"set it to one of them"
            )
        return texts

    def _copy_folder(self, path: Path) -> Path:
        return copy_folder(path, self.cache_dir)

    def _stand_in_folder(self) -> Path:
        return synthetic_folder(Path(DEFAULT_PATH).parent / "synthetic", _STAND_IN)

    def _distinct(self) -> dict[str, Any]:
        path = Path(self.path)
        for folder in (self._copy_folder(path), path):
            manifest = read_manifest(folder)
            if manifest is not None and "distinct" in manifest:
                counts: dict[str, int] = manifest["distinct"]
                return counts
        if self.path == DEFAULT_PATH and not path.exists():
            return dict(zip(CATEGORICAL, (min(n + 1, _STAND_IN.rows) for n in _STAND_IN.cardinalities), strict=True))
        return {}


def _text_files(folder: Path) -> list[Path]:
    """The text files of a folder, day_2 before day_10; what is hidden or a readme is not data."""
    found = [
        p
        for p in folder.iterdir()
        if p.is_file()
        and not p.name.startswith((".", "_"))
        and not p.name.lower().startswith(("readme", "license"))
        and (p.with_suffix("") if p.suffix == ".gz" else p).suffix in _TEXT_SUFFIXES
    ]
    return sorted(found, key=natural_key)
