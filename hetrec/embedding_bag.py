"""Pooled embeddings whose rows live on a store, behind a bounded cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from hetrec.collection import HetCollection

__all__ = ["HetEmbeddingBagCollection"]


class HetEmbeddingBagCollection(HetCollection, EmbeddingBagCollectionInterface):
    """Pooled embeddings over a store, as TorchRec's ``EmbeddingBagCollection`` computes them (see ``HetCollection``).

    Args:
        tables: TorchRec configs. ``num_embeddings`` 0: a table without size, every int64 is a key; such a config must
            give ``weight_init_min`` and ``weight_init_max``. Rows begin uniform in that range (TorchRec's default
            where a table has a size and no range). Pooling sum or mean; a mean divides by the bag's length, also
            where bags are weighted.
        is_weighted: whether bags carry weights (the KeyedJaggedTensor's).
        device: as TorchRec's programs give it, ``meta`` included; the rows live on the store whatever it is.

    Raises:
        ValueError: a table is named twice, or has no feature.
    """

    def __init__(
        self, tables: Sequence[EmbeddingBagConfig], is_weighted: bool = False, device: torch.device | None = None
    ) -> None:
        super().__init__(tables, is_weighted)
        self._device = device if device is not None else torch.device("cpu")

    @property
    def device(self) -> torch.device:
        return self._device

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self._tables

    def is_weighted(self) -> bool:
        return self._weighted

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled rows; keys are the features' names in the order of the tables that hold them (``feature@table``
        where a feature reads several), values float32 (B, sum of dims)."""
        return self.output(self.lookup(features))

    def output(self, pooled: list[torch.Tensor]) -> KeyedTensor:
        """What ``forward`` makes of a ``lookup``."""
        if len(pooled) > 1:
            # Back from groups of equal width to the order of the tables.
            columns = {
                group.cache.dim: iter(part.split(group.cache.dim, dim=1))
                for part, group in zip(pooled, self.stream.groups, strict=True)
            }
            pooled = [torch.cat([next(columns[dim]) for dim in self._output_dims], dim=1)]
        return KeyedTensor(self._output_names, self._output_dims, pooled[0])

    def _means(self, readers: Sequence[EmbeddingBagConfig]) -> list[bool]:
        return [table.pooling == PoolingType.MEAN for table in readers]
