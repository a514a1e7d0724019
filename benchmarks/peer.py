"""The peer: a network over TorchRec's own sharded ``EmbeddingBagCollection``, under ``TrainPipelineSparseDist``."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingType
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from hetrec.data import Batch
from hetrec.tables import embedding_bag_tables
from models.deepfm import DeepFM

__all__ = ["pipeline"]


class _Trained(nn.Module):
    """DeepFM whose pooled rows come from TorchRec's collection; returns what the pipeline wants."""

    def __init__(self, network: DeepFM) -> None:
        super().__init__()
        self.rows = EmbeddingBagCollection(
            tables=embedding_bag_tables(network.spec, network.row_width, 0.01), device=torch.device("meta")
        )
        self.shape = (len(network.spec.sparse), network.row_width)
        network.lookup = lambda pooled: pooled  # type: ignore[method-assign,assignment]
        self.network = network

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        pooled = self.rows(batch.sparse_features).values().unflatten(1, self.shape)
        logits = self.network(batch.dense_features, pooled)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, logits.detach()


def pipeline(
    network: DeepFM, plan: str, batch: int, bits_per_s: float, lr: float, eps: float
) -> tuple[TrainPipelineSparseDist, dict[str, str]]:
    """The pipeline, and how each table is sharded.

    Args:
        plan: ``planner`` or ``table_wise``.
        batch: rows a host and step.
        bits_per_s: of the links, for the planner.
    """
    model = _Trained(network)
    apply_optimizer_in_backward(RowWiseAdagrad, model.rows.parameters(), {"lr": lr, "eps": eps})
    world, cpu = dist.get_world_size(), torch.device("cpu")
    bytes_per_ms = bits_per_s / 8 / 1e3
    topology = Topology(
        world_size=world,
        local_world_size=1,
        compute_device="cpu",
        intra_host_bw=bytes_per_ms,
        inter_host_bw=bytes_per_ms,
    )
    constraints = None
    if plan == "table_wise":
        only = ParameterConstraints(sharding_types=[ShardingType.TABLE_WISE.value])
        constraints = {table.name: only for table in model.rows.embedding_bag_configs()}
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=batch, constraints=constraints)
    sharder = EmbeddingBagCollectionSharder()
    group = dist.group.WORLD
    assert group is not None
    chosen = planner.collective_plan(model, [sharder], group)
    sharded = DistributedModelParallel(model, device=cpu, plan=chosen, sharders=[sharder])
    dense = KeyedOptimizerWrapper(
        {name: p for name, p in sharded.named_parameters() if "embedding_bags" not in name},
        lambda parameters: torch.optim.Adagrad(parameters, lr=lr),
    )
    optimizer = CombinedOptimizer([sharded.fused_optimizer, dense])
    tables = chosen.plan["rows"]
    return TrainPipelineSparseDist(sharded, optimizer, cpu), {
        name: f"{how.sharding_type} {how.ranks}" for name, how in tables.items()
    }
