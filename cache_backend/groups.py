"""The native tables behind a store: all tables whose rows have one format share one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cache_backend._table import EmbeddingTable
from cache_backend.config import OPTIMIZERS
from cache_backend.store import TableSchema

__all__ = ["Format", "declare", "new_groups", "tables_by_format"]

#: (dim, state_dim): rows of one format live in one native table.
Format = tuple[int, int]


def declare(groups: dict[Format, EmbeddingTable], table: int, schema: TableSchema) -> None:
    """Make the table with this id known, with a native table for its format where there is none."""
    row_format = schema.dim, schema.state_dim
    if row_format not in groups:
        groups[row_format] = EmbeddingTable(*row_format)
    groups[row_format].declare(
        table, schema.seed, schema.init_low, schema.init_high, schema.init_state, OPTIMIZERS[schema.optimizer]
    )


def new_groups(schemas: dict[int, TableSchema]) -> dict[Format, EmbeddingTable]:
    """Empty tables for these schemas, by table id."""
    groups: dict[Format, EmbeddingTable] = {}
    for table, schema in schemas.items():
        declare(groups, table, schema)
    return groups


def tables_by_format(schemas: Mapping[int, TableSchema], tables: Sequence[int]) -> dict[Format, list[int]]:
    """These ids, by the format of their tables' rows.

    Raises:
        ValueError: there is no such table.
    """
    found: dict[Format, list[int]] = {}
    for table in tables:
        if table not in schemas:
            raise ValueError(f"table id {table} was not opened; open() it first")
        found.setdefault((schemas[table].dim, schemas[table].state_dim), []).append(table)
    return found
