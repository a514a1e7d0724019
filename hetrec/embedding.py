"""Embeddings one by one whose rows live on a store, behind a bounded cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollectionInterface
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from hetrec.collection import HetCollection

__all__ = ["HetEmbeddingCollection"]


class HetEmbeddingCollection(HetCollection, EmbeddingCollectionInterface):
    """Unpooled embeddings over a store, as TorchRec's ``EmbeddingCollection`` computes them (see ``HetCollection``).

    Args:
        tables: TorchRec configs, all of one width; sizes and initial rows as in ``HetEmbeddingBagCollection``.
        device: as TorchRec's programs give it, ``meta`` included; the rows live on the store whatever it is.
        need_indices: whether the output carries the keys, as its weights.

    Raises:
        ValueError: a table is named twice, has no feature, or another width.
    """

    def __init__(
        self, tables: Sequence[EmbeddingConfig], device: torch.device | None = None, need_indices: bool = False
    ) -> None:
        super().__init__(tables, is_weighted=False)
        dims = {table.name: table.embedding_dim for table in tables}
        if len(set(dims.values())) > 1:
            raise ValueError(f"the tables of an unpooled collection must have one width, got {dims}")
        self._need_indices = need_indices
        self._device = device if device is not None else torch.device("cpu")

    @property
    def device(self) -> torch.device:
        return self._device

    def embedding_configs(self) -> list[EmbeddingConfig]:
        return self._tables

    def need_indices(self) -> bool:
        return self._need_indices

    def embedding_dim(self) -> int:
        return self._output_dims[0]

    def embedding_names_by_table(self) -> list[list[str]]:
        return self._names_by_table

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Rows by the features' names (``feature@table`` where a feature reads several tables): values float32 (keys of
        the feature, dim), lengths those of the feature."""
        return self.output(features, self.lookup(features))

    def output(self, features: KeyedJaggedTensor, found: list[torch.Tensor]) -> dict[str, JaggedTensor]:
        """What ``forward`` makes of a ``lookup``."""
        (rows,) = found
        jagged = [features[name] for table in self._tables for name in table.feature_names]
        parts = rows.split([part.values().numel() for part in jagged])
        return {
            name: JaggedTensor(part, lengths=keys.lengths(), weights=keys.values() if self._need_indices else None)
            for name, part, keys in zip(self._output_names, parts, jagged, strict=True)
        }

    def _means(self, readers: Sequence[EmbeddingConfig]) -> None:
        return None
