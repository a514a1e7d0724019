"""Recommendation and graph models whose embedding tables outgrow a GPU or a machine."""

from hetrec.data import Batch, FeatureSpec, GraphBatch, GraphSpec, SparseFeature, TableSpec
from hetrec.distributed import HetEmbeddingBagCollectionSharder, HetEmbeddingCollectionSharder, merge_state_dicts, plan
from hetrec.embedding import HetEmbeddingCollection
from hetrec.embedding_bag import HetEmbeddingBagCollection

__all__ = [
    "Batch",
    "FeatureSpec",
    "GraphBatch",
    "GraphSpec",
    "HetEmbeddingBagCollection",
    "HetEmbeddingBagCollectionSharder",
    "HetEmbeddingCollection",
    "HetEmbeddingCollectionSharder",
    "SparseFeature",
    "TableSpec",
    "merge_state_dicts",
    "plan",
]
