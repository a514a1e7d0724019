"""What each column of a table is used as, and why: for people to look at before a run."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timezone

from rich.table import Table
from rich.text import Text

from datamodules.columns import SparseColumn
from datamodules.errors import DataError
from datamodules.files import Column, ParquetFiles
from datamodules.labels import LabelRule
from datamodules.profile import FEWEST, ColumnProfile, TableProfile
from datamodules.progress import console, say
from hetrec.data import FeatureSpec

__all__ = ["USELESS", "Profiles", "likely_labels", "print_columns"]

#: Why a column tells nothing, in a word and in more.
USELESS = {
    "identifier": "nearly every row has a value of its own, so none can be learned",
    "constant": "one value in every row",
}

_LABELS = ("label", "click", "clicked", "is_click", "is_clicked", "clk", "is_attributed", "target", "y", "rating")
_SHOWN = 60  # columns; a table of more is cut
_GIVEN_AWAY = 0.999
_KINDS = {"integer": "integers", "float": "numbers", "string": "strings", "null": "no value at all"}


def likely_labels(columns: Iterable[str]) -> list[str]:
    """Those that are usual names of a label, whatever their case, the likeliest first."""
    usual = [name for name in columns if name.lower() in _LABELS]
    return sorted(usual, key=lambda name: _LABELS.index(name.lower()))


class Profiles:
    """The profiles of a table's columns, each taken when it is first asked for."""

    def __init__(self, files: ParquetFiles) -> None:
        self.table = TableProfile(files)
        self._known: dict[str, ColumnProfile | None] = {}

    def of(self, column: Column) -> ColumnProfile | None:
        """None where the column is of a type that is no feature, or a value of it cannot be read."""
        if column.name not in self._known:
            reader = _as_feature(column)
            try:
                self._known[column.name] = (
                    None
                    if reader is None
                    else self.table.sparse(reader)
                    if isinstance(reader, SparseColumn)
                    else self.table.dense(reader)
                )
            except DataError:  # said when the column is read for training
                self._known[column.name] = None
        return self._known[column.name]

    def useless(self, column: Column) -> str | None:
        """Why a model learns nothing from the column that it could use on other rows, a key of ``USELESS``; or None."""
        if self.table.rows < FEWEST:
            return None
        profile = self.of(column)
        if profile is not None and profile.identifier:
            return "identifier"
        if profile is not None and profile.constant:
            return "constant"
        return None

    def auc(self, column: Column, label: str, rule: LabelRule) -> float:
        """See :meth:`TableProfile.auc`; NaN where it cannot be had."""
        reader = _as_feature(column)
        try:
            return float("nan") if reader is None else self.table.auc(reader, label, rule)
        except DataError:
            return float("nan")


def _as_feature(column: Column) -> SparseColumn | str | None:
    if column.kind == "float":
        return column.name
    if column.kind in ("other", "list<float>"):
        return None
    return SparseColumn(column.name, ragged=column.kind.startswith("list"))


def print_columns(
    files: ParquetFiles, profiles: Profiles, spec: FeatureSpec, whys: dict[str, str], rule: LabelRule
) -> None:
    """Prints a table of all columns, and lines about those that deserve a second look."""
    table, rows = Table(title_justify="left"), profiles.table.rows
    table.title = f"columns, from {'all' if profiles.table.is_whole else 'the first'} {rows:,} rows"
    for header in ("column", "type", "role", "distinct", "missing", "why"):
        table.add_column(header, justify="right" if header in ("distinct", "missing") else "left", overflow="fold")
    columns = list(files.columns.values())
    for column in columns[:_SHOWN]:
        profile = profiles.of(column)
        numbers = ["", ""] if profile is None else [f"{profile.distinct:,}", f"{profile.missing:,}"]
        role = _role(column.name, column, spec)
        why = whys.get(column.name) or ("" if role == "label" else _why(column, role))
        table.add_row(*(Text(cell) for cell in (column.name, column.dtype, role, *numbers, why)))
    console().print(table)
    if len(columns) > _SHOWN:
        say(f"and {len(columns) - _SHOWN} more columns")
    features = [files.columns[name] for name in (*spec.dense, *spec.sparse_names) if name in files.columns]
    for column in features:
        auc = profiles.auc(column, spec.label, rule)
        if auc > _GIVEN_AWAY:
            say(
                f"{column.name} alone tells clicks apart (AUC {auc:.4f}): is it known before the click? If not, "
                f"data.ignore=[{column.name}]"
            )
    for column in columns:
        if column.name != spec.label and _is_time(column):
            say(
                f"{column.name} is a time: a model is best judged on rows later than those it learned from; with the "
                f"rows in order of time that is data.split=order"
            )


def _role(name: str, column: Column, spec: FeatureSpec) -> str:
    if name == spec.label:
        return "label"
    if name in spec.dense:
        return "dense"
    if name in spec.sparse_names:
        return "list" if column.kind.startswith("list") else "categorical"
    return "weights" if name in {feature.weight for feature in spec.sparse} else "ignored"


def _why(column: Column, role: str) -> str:
    if role != "ignored":
        return f"lists of {column.kind[5:-1]}s" if column.kind.startswith("list") else _KINDS[column.kind]
    return "no feature has this type" if _as_feature(column) is None else "not named"


def _is_time(column: Column) -> bool:
    """Whether a column is a date or time: by its type, or as integers, seconds or milliseconds of 2000 to 2050."""
    if column.dtype.startswith(("timestamp", "date", "time")):
        return True
    if column.smallest is None or column.largest is None or column.smallest == column.largest:
        return False
    first, last = (int(datetime(year, 1, 1, tzinfo=timezone.utc).timestamp()) for year in (2000, 2050))
    return any(first * unit <= column.smallest and column.largest <= last * unit for unit in (1, 1000))
