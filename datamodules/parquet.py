"""``data=parquet``: bring your own Parquet files."""

from __future__ import annotations

from functools import cached_property
from typing import Literal, get_args

from datamodules.base import HetDataModule, Role
from datamodules.columns import DenseColumn, Kind, SparseColumn
from datamodules.errors import DataError
from datamodules.files import Column, ParquetFiles, widen
from datamodules.keys import MISSING_KEY
from datamodules.progress import say
from datamodules.reader import Columns
from hetrec.data import FeatureSpec, SparseFeature, TableSpec

__all__ = ["ParquetDataModule"]

Pooling = Literal["sum", "mean"]

_KEYS = ("integer", "string", "list<integer>", "list<string>", "list<null>")


class ParquetDataModule(HetDataModule):
    """Any Parquet files with a label column, numeric dense columns and categorical sparse columns.

    Columns that are not named are found from the schema: floats are dense; integers, booleans, strings, dictionaries
    and lists of integers or strings are sparse. What is named ``label``, or as the weights of another column, is
    neither. Columns of other types (timestamps, structs, lists of floats) are left out, and a line says so. Where
    ``dense`` or ``sparse`` is given, exactly those columns are used; an empty list means none.

    Keys, without a vocabulary (see :mod:`datamodules.keys`): an integer is its own key, uint64 by its bits; a string is
    hashed; a missing value, and a missing list, is a key of its own. A list is a bag of keys, pooled by the table. In a
    table with a size n the keys are ``0 .. n - 1``, strings are hashed into that range, and missing is row n, which the
    table has in addition. Missing dense values are 0.

    Files may differ: a column may be missing (all its values are), all null, a dictionary here and plain there, and
    integers of any width. Integers and strings, or lists and single values, in one column are an error. Hive folders
    (``day=3/``) give columns too: integers if all values are, else strings. A column that a file itself holds wins over
    its folder's name.

    Args:
        path: a Parquet file or a folder of them, searched with its subfolders.
        val_path: the same, for validation.
        test_path: the same, for testing.
        label: the label column: numbers from 0 to 1, or booleans.
        dense: the dense columns, or None to find them.
        sparse: the sparse columns, or None to find them.
        weights: the column of bag weights of a sparse column, as in ``{"tags": "tag_weights"}``.
        tables: the table of a sparse column, where that is not one of its own. Columns with one table share its rows.
        sizes: the number of keys of a table, where it has a size.
        pooling: ``sum`` or ``mean``, per table; not named is ``sum``.

    The others are those of :class:`datamodules.base.HetDataModule`.
    """

    def __init__(
        self,
        path: str,
        val_path: str | None = None,
        test_path: str | None = None,
        label: str = "label",
        dense: list[str] | None = None,
        sparse: list[str] | None = None,
        weights: dict[str, str] | None = None,
        tables: dict[str, str] | None = None,
        sizes: dict[str, int] | None = None,
        pooling: dict[str, Pooling] | None = None,
        val_fraction: float = 0.1,
        test_fraction: float = 0.1,
        split: Literal["hash", "order"] = "hash",
        batch_size: int = 2048,
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
        self.label = label
        self.dense = dense
        self.sparse = sparse
        self.weights = weights or {}
        self.tables = tables or {}
        self.sizes = sizes or {}
        self.pooling = pooling or {}

    @cached_property
    def spec(self) -> FeatureSpec:
        """From the files' footers. ``expected_rows`` of a table without a size: the span of its integers, at most the
        number of rows."""
        files = self._open("path")
        dense, sparse = self._dense(files), self._sparse(files)
        named = dict.fromkeys(self.tables.get(name, name) for name in sparse)
        self._check_names(named, sparse)
        return FeatureSpec(
            dense=tuple(dense),
            sparse=tuple(SparseFeature(n, self.tables.get(n, n), self.weights.get(n)) for n in sparse),
            tables=tuple(
                TableSpec(
                    name,
                    num_embeddings=self.sizes[name] + 1 if name in self.sizes else None,
                    pooling=self.pooling.get(name, "sum"),
                    expected_rows=None
                    if name in self.sizes
                    else _expected_rows(
                        [files.columns.get(n) for n in sparse if self.tables.get(n, n) == name], files.rows
                    ),
                )
                for name in named
            ),
            label=self.label,
        )

    def columns(self, labelled: bool) -> Columns:
        spec = self.spec
        return Columns(
            dense=tuple(DenseColumn(name) for name in spec.dense),
            sparse=tuple(
                SparseColumn(
                    name=f.name,
                    ragged=self._is_ragged(f.name),
                    weight=f.weight,
                    size=self.sizes.get(f.table),
                    missing=MISSING_KEY,
                )
                for f in spec.sparse
            ),
            label=self.label if labelled else None,
        )

    def open_files(self, role: Role) -> ParquetFiles:
        return ParquetFiles.open(getattr(self, role), f"data.{role}")

    def setup(self, stage: str | None = None) -> None:
        """As in the base class; also checks the columns of ``val_path`` and ``test_path`` against those of ``path``."""
        for feature in self.spec.sparse:
            self._check_agree(feature.name)
        super().setup(stage)

    def _check_agree(self, name: str) -> None:
        """The three paths must hold one kind of keys: an integer and the hash of its digits are two keys."""
        kind: Kind = "null"
        for role in self._roles():
            files = self._open(role)
            self._check_sparse(name, files)
            column = files.columns.get(name)
            both = widen(kind, column.kind) if column is not None else kind
            if both is None:
                raise DataError(
                    f"column {name!r} is {column and column.kind} in data.{role}={getattr(self, role)!r} and {kind} in "
                    f"the paths before; write the files with one type"
                )
            kind = both

    def _roles(self) -> list[Role]:
        return [role for role in get_args(Role) if getattr(self, role) is not None]

    def _is_ragged(self, name: str) -> bool:
        held = (self._open(role).columns.get(name) for role in self._roles())
        return any(column is not None and column.kind.startswith("list") for column in held)

    def _dense(self, files: ParquetFiles) -> list[str]:
        if self.dense is not None:
            self._check_exist(self.dense, files, "data.dense")
            return self.dense
        taken = {self.label, *(self.sparse or ()), *self.weights.values()}
        return [c.name for c in files.columns.values() if c.kind == "float" and c.name not in taken]

    def _sparse(self, files: ParquetFiles) -> list[str]:
        taken = {self.label, *(self.dense or ()), *self.weights.values()}
        if self.sparse is not None:
            self._check_exist(self.sparse, files, "data.sparse")
            found = self.sparse
        else:
            found = [c.name for c in files.columns.values() if c.kind in (*_KEYS, "null") and c.name not in taken]
            left = [
                c.name for c in files.columns.values() if c.kind in ("other", "list<float>") and c.name not in taken
            ]
            if left:
                say(f"columns of types that are no features are left out: {', '.join(left)}")
        for name in found:
            self._check_sparse(name, files)
        return found

    def _check_exist(self, names: list[str], files: ParquetFiles, option: str) -> None:
        unknown = [name for name in names if name not in files.columns]
        if unknown:
            raise DataError(f"{option} names {', '.join(unknown)}; {self.path!r} has: {', '.join(files.columns)}")

    def _check_sparse(self, name: str, files: ParquetFiles) -> None:
        column = files.columns.get(name)
        if column is not None and column.kind not in (*_KEYS, "null"):
            what = f"a float in {column.float_in}" if column.float_in else f"{column.dtype} in {column.file}"
            raise DataError(
                f"column {name!r} cannot be a sparse feature: it is {what}; expected "
                f"integers, strings or lists of them. Cast it (integers with missing values often became floats), or "
                f"name it under data.dense"
            )

    def _check_names(self, tables: dict[str, None], sparse: list[str]) -> None:
        """Every name in an option must mean something."""
        for option, names, known in (
            ("data.tables", self.tables, sparse),
            ("data.weights", self.weights, sparse),
            ("data.sizes", self.sizes, list(tables)),
            ("data.pooling", self.pooling, list(tables)),
        ):
            unknown = [name for name in names if name not in known]
            if unknown:
                what = "sparse columns" if known is sparse else "tables"
                raise DataError(f"{option} names {', '.join(unknown)}; the {what} are: {', '.join(known)}")
        for table, size in self.sizes.items():
            if size < 1:
                raise DataError(f"data.sizes gives table {table!r} {size} keys; expected 1 or more")
        files = self._open("path")
        self._check_exist(list(self.weights.values()), files, "data.weights")


def _expected_rows(columns: list[Column | None], rows: int) -> int | None:
    """About how many distinct keys the columns of one table hold, as far as the footers tell."""
    spans = []
    for column in columns:
        if column is None or column.smallest is None or column.largest is None:
            return None if column is not None and column.kind.startswith("list") else rows
        spans.append((column.smallest, column.largest))
    span = max(high for _, high in spans) - min(low for low, _ in spans) + 1
    return min(span, rows * len(columns))
