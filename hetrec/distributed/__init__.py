"""The collections under TorchRec's ``DistributedModelParallel`` and its pipelines."""

from hetrec.distributed.planning import plan
from hetrec.distributed.sharders import HetEmbeddingBagCollectionSharder, HetEmbeddingCollectionSharder
from hetrec.distributed.state_dict import merge_state_dicts

__all__ = ["HetEmbeddingBagCollectionSharder", "HetEmbeddingCollectionSharder", "merge_state_dicts", "plan"]
