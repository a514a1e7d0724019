"""Recommendation and graph models whose embedding tables outgrow a GPU or a machine."""

from hetrec.data import Batch, FeatureSpec, SparseFeature, TableSpec
from hetrec.embedding import HetEmbeddingCollection
from hetrec.embedding_bag import HetEmbeddingBagCollection

__all__ = [
    "Batch",
    "FeatureSpec",
    "HetEmbeddingBagCollection",
    "HetEmbeddingCollection",
    "SparseFeature",
    "TableSpec",
]
