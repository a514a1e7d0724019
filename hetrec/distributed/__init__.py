"""The collections under TorchRec's ``DistributedModelParallel`` and its pipelines."""

from hetrec.distributed.planning import plan
from hetrec.distributed.sharders import HetEmbeddingBagCollectionSharder, HetEmbeddingCollectionSharder

__all__ = ["HetEmbeddingBagCollectionSharder", "HetEmbeddingCollectionSharder", "plan"]
