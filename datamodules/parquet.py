"""Parquet files of your own; ``data=table`` makes them of other formats."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any, Literal, get_args

from pytorch_lightning.trainer.states import TrainerFn

from datamodules.base import HetDataModule, Role
from datamodules.columns import DenseColumn, Kind, SparseColumn
from datamodules.errors import DataError
from datamodules.files import Column, ParquetFiles, widen
from datamodules.keys import MISSING_KEY
from datamodules.labels import LabelRule
from datamodules.progress import say
from datamodules.reader import Columns
from datamodules.roles import USELESS, Profiles, likely_labels, print_columns
from datamodules.whole_numbers import whole_float_columns
from hetrec.data import FeatureSpec, Normalization, SparseFeature, TableSpec

__all__ = ["ParquetDataModule"]

Pooling = Literal["sum", "mean"]

_KEYS = ("integer", "string", "list<integer>", "list<string>", "list<null>")


class ParquetDataModule(HetDataModule):
    """Any Parquet files with a label column, numeric dense columns and categorical sparse columns.

    Columns that are not named are found from the schema: floats are dense; integers, booleans, strings, dictionaries
    and lists of integers or strings are sparse. What is named ``label``, or as the weights of another column, is
    neither. Columns of other types (timestamps, structs, lists of floats) and the index of a pandas table are left
    out, and a line says so. So are identifiers, of which nearly every row has its own, and constant columns, in tables
    of 200 rows or more. Where ``dense`` or ``sparse`` is given, exactly those columns are used; an empty list means
    none. A fit begins with a table of all columns and their roles.

    Keys, without a vocabulary (see :mod:`datamodules.keys`): an integer is its own key, uint64 by its bits; a string is
    hashed; a missing value, and a missing list, is a key of its own. A list is a bag of keys, pooled by the table. In a
    table with a size n the keys are ``0 .. n - 1``, strings are hashed into that range, and missing is row n, which the
    table has in addition. A float column that ``sparse`` names holds integers, as ids with
    gaps do in pandas; NaN is missing there too.

    Files may differ: a column may be missing (all its values are, and a line says so), all null, a dictionary here and
    plain there, and integers of any width. Integers and strings, or lists and single values, in one column are an
    error. Hive folders
    (``day=3/``) give columns too: integers if all values are, else strings. A column that a file itself holds wins over
    its folder's name.

    Args:
        path: a Parquet file or a folder of them, searched with its subfolders.
        val_path: the same, for validation.
        test_path: the same, for testing.
        label: the label column: numbers from 0 to 1, booleans, or strings of either (``"0"``, ``"true"``).
        negative_label: the label that means 0; -1 where labels are -1 and 1.
        label_threshold: the least label that counts as 1, as 4 of a rating from 1 to 5; those below are 0. None: labels
            are from 0 to 1.
        null_label: what a missing label counts as, from 0 to 1. None: a missing label is an error.
        dense: the dense columns, or None to find them.
        sparse: the sparse columns, or None to find them.
        ignore: columns that are no features, whatever they look like.
        weights: the column of bag weights of a sparse column, as in ``{"tags": "tag_weights"}``.
        tables: the table of a sparse column, where that is not one of its own. Columns with one table share its rows.
        sizes: the number of keys of a table, where it has a size.
        pooling: ``sum`` or ``mean``, per table; not named is ``sum``.
        normalize: how the model normalises dense columns (:class:`hetrec.dense_normalizer.DenseNormalizer`), for all
            of them, or for some by name; those not named are ``auto``. With ``none`` for all, batches hold them as
            float32, missing values as 0, and an infinite value is an error.

    The others are those of :class:`datamodules.base.HetDataModule`.
    """

    def __init__(
        self,
        path: str,
        val_path: str | None = None,
        test_path: str | None = None,
        label: str = "label",
        negative_label: float = 0.0,
        null_label: float | None = None,
        label_threshold: float | None = None,
        dense: list[str] | None = None,
        sparse: list[str] | None = None,
        ignore: list[str] | None = None,
        weights: dict[str, str] | None = None,
        tables: dict[str, str] | None = None,
        sizes: dict[str, int] | None = None,
        pooling: dict[str, Pooling] | None = None,
        normalize: Normalization | dict[str, Normalization] = "auto",
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
        if negative_label == 1:
            raise DataError("data.negative_label=1; expected another number, 1 is the label of a click")
        if null_label is not None and not 0 <= null_label <= 1:
            raise DataError(f"data.null_label={null_label}; expected a label from 0 to 1, or null")
        if negative_label != 0 and label_threshold is not None:
            raise DataError("data.negative_label and data.label_threshold exclude each other; give one")
        self.label = label
        self.label_rule = LabelRule(negative_label, null_label, label_threshold)
        self.dense = dense
        self.sparse = sparse
        self.ignore = ignore or []
        self.weights = weights or {}
        self.tables = tables or {}
        self.sizes = sizes or {}
        self.pooling = pooling or {}
        self.normalize = normalize
        self.useless: dict[str, str] = {}  # columns that tell nothing, and why
        self._told: set[Role] = set()  # setup is called for every stage; what it found is said once

    @cached_property
    def spec(self) -> FeatureSpec:
        """From the files' footers. ``expected_rows`` of a table without a size: the span of its integers, at most the
        number of rows."""
        files = self._open("path")
        self._check_ignored(files)
        dense, sparse = self._dense(files), self._sparse(files)
        self._say_useless(files, dense, sparse)
        whole = whole_float_columns(files, dense) if self.dense is None else []
        if whole:
            say(
                f"dense columns of whole numbers: {', '.join(whole)}. Where these are ids (integers with gaps often "
                f"became floats), make them keys: data.sparse=[{','.join([*sparse, *whole])}]"
            )
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
            normalize=self._normalize(dense),
        )

    def _normalize(self, dense: list[str]) -> tuple[Normalization, ...]:
        """How each dense column is normalised; empty where none is."""
        methods: dict[str, Normalization]
        if isinstance(self.normalize, str):
            methods = dict.fromkeys(dense, self.normalize)
        else:
            unknown = [name for name in self.normalize if name not in dense]
            if unknown:
                raise DataError(
                    f"data.normalize names {', '.join(unknown)}; the dense columns are: {', '.join(dense) or 'none'}"
                )
            methods = {name: self.normalize.get(name, "auto") for name in dense}
        for name, method in methods.items():
            if method not in get_args(Normalization):
                raise DataError(
                    f"data.normalize gives {name} {method!r}; expected one of {', '.join(get_args(Normalization))}"
                )
        return () if set(methods.values()) <= {"none"} else tuple(methods.values())

    def columns(self, labelled: bool) -> Columns:
        spec = self.spec
        return Columns(
            dense=tuple(DenseColumn(name, raw=bool(spec.normalize)) for name in spec.dense),
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
            label_rule=self.label_rule,
        )

    def open_files(self, role: Role) -> ParquetFiles:
        return ParquetFiles.open(getattr(self, role), f"data.{role}")

    def setup(self, stage: str | None = None) -> None:
        """As in the base class; also checks the columns of ``val_path`` and ``test_path`` against those of ``path``."""
        for feature in self.spec.sparse:
            self._check_agree(feature.name)
        for role in self._roles():
            self._say_absent(role)
        super().setup(stage)

    def _say_absent(self, role: Role) -> None:
        """Says which columns some files do not hold, once."""
        if role in self._told:
            return
        self._told.add(role)
        files = self._open(role)
        by_holders: dict[frozenset[str], list[str]] = {}
        for name in self.columns(labelled=False).names:
            by_holders.setdefault(frozenset(files.holders(name)), []).append(name)
        for holders, names in by_holders.items():
            absent = [path for path in files.paths if path not in holders]
            if absent:
                say(
                    f"{', '.join(names)}: no such column in {len(absent)} of {len(files.paths)} files of data.{role} "
                    f"({absent[0]}{', ...' if len(absent) > 1 else ''}); the values count as missing there"
                )

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

    def state_dict(self) -> dict[str, Any]:
        """The kinds of keys, for a checkpoint."""
        return {"key_kinds": self._key_kinds()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """
        Raises:
            DataError: a column holds another kind of keys than the rows that the checkpoint was trained on.
        """
        trained = state_dict.get("key_kinds", {})
        for name, kind in self._key_kinds().items():
            if kind != trained.get(name, kind) and "null" not in (kind, trained[name]):
                raise DataError(
                    f"column {name!r} is {kind} in data.path={self.path!r}, and was {trained[name]} where the "
                    f"checkpoint was trained: no key would be the same. Write it with that type (in text files: "
                    f"data.types)"
                )

    def _key_kinds(self) -> dict[str, str]:
        """Of each sparse column: string or integer, of lists too; null where all is missing."""
        columns = self._open("path").columns
        kinds = {name: columns[name].kind for name in self.spec.sparse_names if name in columns}
        plain = {name: kind.removeprefix("list<").removesuffix(">") for name, kind in kinds.items()}
        return {name: "integer" if kind == "float" else kind for name, kind in plain.items()}

    def _roles(self) -> list[Role]:
        return [role for role in get_args(Role) if getattr(self, role) is not None]

    def _is_ragged(self, name: str) -> bool:
        held = (self._open(role).columns.get(name) for role in self._roles())
        return any(column is not None and column.kind.startswith("list") for column in held)

    def _dense(self, files: ParquetFiles) -> list[str]:
        if self.dense is not None:
            self._check_exist(self.dense, files, "data.dense")
            return self.dense
        return self._telling(files, [c.name for c in self._free(files, self.sparse) if c.kind == "float"])

    def _sparse(self, files: ParquetFiles) -> list[str]:
        if self.sparse is not None:
            self._check_exist(self.sparse, files, "data.sparse")
            found = self.sparse
        else:
            free = self._free(files, self.dense)
            found = self._telling(files, [c.name for c in free if c.kind in (*_KEYS, "null")])
            self._say_left_out(files, [c for c in free if c.kind in ("other", "list<float>")])
        for name in found:
            self._check_sparse(name, files)
        return found

    def _free(self, files: ParquetFiles, named: list[str] | None) -> list[Column]:
        """The columns that may be found to be features: those that no option names, and not the index of a table."""
        taken = {self.label, *(named or ()), *self.weights.values(), *self.ignore}
        return [c for c in files.columns.values() if c.name not in taken and not c.is_index]

    def _telling(self, files: ParquetFiles, found: list[str]) -> list[str]:
        """Those of the columns that may tell something, and that no option describes; all where none would be left."""
        described = {*self.tables, *self.sizes, *self.pooling, *self.weights}
        whys = {name: self.profiles.useless(files.columns[name]) for name in found if name not in described}
        useless = {name: why for name, why in whys.items() if why is not None}
        if len(useless) == len(found):
            return found
        self.useless |= useless
        return [name for name in found if name not in useless]

    def _say_useless(self, files: ParquetFiles, dense: list[str], sparse: list[str]) -> None:
        for why in dict.fromkeys(self.useless.values()):
            names = [name for name, other in self.useless.items() if other == why]
            option, used = ("dense", dense) if files.columns[names[0]].kind == "float" else ("sparse", sparse)
            say(
                f"left out: {', '.join(names)}: {USELESS[why]}. To use one all the same, name the columns: "
                f"data.{option}=[{','.join([*used, names[0]])}]"
            )

    def _check_ignored(self, files: ParquetFiles) -> None:
        self._check_exist(self.ignore, files, "data.ignore")
        twice = [name for name in self.ignore if name in {self.label, *(self.dense or ()), *(self.sparse or ())}]
        if twice:
            raise DataError(f"data.ignore names {', '.join(twice)}, and so does data.label, data.dense or data.sparse")

    @cached_property
    def profiles(self) -> Profiles:
        """What is known of the columns of ``path``."""
        return Profiles(self._open("path"))

    def prepare_data(self) -> None:
        """Before a fit: prints the columns with their roles."""
        fitting = self.trainer is not None and self.trainer.state.fn == TrainerFn.FITTING
        files = self._open("path")
        if fitting and not self._announced and self.label in files.columns:
            self._announced = True
            print_columns(files, self.profiles, self.spec, self._whys(), self.label_rule)

    def _whys(self) -> dict[str, str]:
        """Why columns have their roles, where it is not their type."""
        named = [*(self.dense or ()), *(self.sparse or ())]
        weights = {weight: f"the weights of {name}" for name, weight in self.weights.items()}
        index = {c.name: "pandas' index" for c in self._open("path").columns.values() if c.is_index}
        ignored = dict.fromkeys(self.ignore, "data.ignore")
        return self.useless | index | ignored | dict.fromkeys(named, "named") | weights

    def missing_label_message(self, file: str, role: Role) -> str:
        others = likely_labels(self._open(role).columns)
        message = super().missing_label_message(file, role)
        return f"{message}. It may be data.label={others[0]}" if others else message

    def _say_left_out(self, files: ParquetFiles, others: list[Column]) -> None:
        if others:
            what = ", ".join(f"{c.name} ({re.split('[<[(]', c.dtype)[0]})" for c in others)
            say(
                f"columns of types that are no features are left out: {what}. To use one, write it as numbers or "
                f"strings: a date as its days or weekday"
            )
        taken = {self.label, *(self.dense or ()), *self.weights.values(), *self.ignore}
        index = [c.name for c in files.columns.values() if c.is_index and c.name not in taken]
        if index:
            say(f"pandas' index is left out: {', '.join(index)}. To use it, name it among data.sparse=[...]")

    def _check_exist(self, names: list[str], files: ParquetFiles, option: str) -> None:
        unknown = [name for name in names if name not in files.columns]
        if unknown:
            raise DataError(f"{option} names {', '.join(unknown)}; {self.path!r} has: {', '.join(files.columns)}")

    def _check_sparse(self, name: str, files: ParquetFiles) -> None:
        column = files.columns.get(name)
        if column is not None and column.kind == "other":
            raise DataError(
                f"column {name!r} cannot be a sparse feature: it is {column.dtype} in {column.file}; expected "
                f"integers, strings or lists of them. Write it as one of these (a date as its days, or as a string)"
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
