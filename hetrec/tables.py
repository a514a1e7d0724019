"""From a FeatureSpec to the tables of an embedding collection."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType

from hetrec.data import FeatureSpec, TableSpec

__all__ = ["embedding_bag_tables", "embedding_tables"]


def embedding_bag_tables(spec: FeatureSpec, width: int, row_init: float) -> list[EmbeddingBagConfig]:
    """One config for each table that a feature reads, in the order of ``spec.tables``.

    Args:
        width: columns of every row, > 0.
        row_init: a row starts with weights drawn uniformly from [-row_init, row_init].

    Returns:
        Configs with ``num_embeddings`` 0 where the table has no size (every int64 is a key).

    Raises:
        ValueError: the spec has no sparse feature, or the width or the range is not positive.
    """
    return [
        EmbeddingBagConfig(**common, pooling=PoolingType.MEAN if table.pooling == "mean" else PoolingType.SUM)
        for table, common in _common(spec, width, row_init)
    ]


def embedding_tables(spec: FeatureSpec, width: int, row_init: float) -> list[EmbeddingConfig]:
    """The same for an unpooled collection."""
    return [EmbeddingConfig(**common) for _, common in _common(spec, width, row_init)]


def _common(spec: FeatureSpec, width: int, row_init: float) -> Iterator[tuple[TableSpec, dict[str, Any]]]:
    if not spec.sparse:
        raise ValueError("the data has no sparse features: an embedding model needs at least one categorical column")
    if width < 1:
        raise ValueError(f"rows of {width} columns; give a width of at least 1")
    if row_init < 0:
        raise ValueError(f"row_init is {row_init}; give the half-width of the uniform range, 0 or more")
    readers = {table.name: [f.name for f in spec.sparse if f.table == table.name] for table in spec.tables}
    for table in spec.tables:
        if readers[table.name]:
            yield (
                table,
                {
                    "name": table.name,
                    "embedding_dim": width,
                    "num_embeddings": table.num_embeddings or 0,
                    "feature_names": readers[table.name],
                    "weight_init_min": -row_init,
                    "weight_init_max": row_init,
                },
            )
