"""A sharding plan for models in which some tables live on the store and others in TorchRec's hands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ModuleSharder, ParameterSharding, ShardingPlan

from hetrec.collection import HetCollection
from hetrec.distributed.sharders import HetSharder

__all__ = ["plan"]


def plan(
    model: nn.Module,
    sharders: Sequence[ModuleSharder[Any]],
    planner: EmbeddingShardingPlanner | None = None,
    device: torch.device | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> ShardingPlan:
    """The plan that ``DistributedModelParallel(model, plan=..., sharders=sharders)`` takes.

    Modules of our types go to the store, all others are planned by TorchRec with their own sharders: its planner knows
    a closed list of kernels, and would cost a table on the store at its full size.

    Args:
        sharders: ours and TorchRec's.
        planner: for the others; by default TorchRec's, for ``device`` and the ranks of ``process_group``.
        device: where the others live; by default the CPU.
        process_group: by default all ranks, if torch.distributed is initialised.

    Raises:
        ValueError: the model holds a collection of ours that no sharder is for.
    """
    ours = {sharder.module_type for sharder in sharders if isinstance(sharder, HetSharder)}
    others = [sharder for sharder in sharders if not isinstance(sharder, HetSharder)]
    on_store: dict[str, EmbeddingModuleShardingPlan] = {}
    for name, module in model.named_modules():
        if not isinstance(module, HetCollection):
            continue
        if type(module) not in ours:
            raise ValueError(
                f"{name or 'the model'} is a {type(module).__name__}, and none of the sharders is for that type; "
                f"add a {type(module).__name__}Sharder(store)"
            )
        on_store[name] = EmbeddingModuleShardingPlan(
            # An empty plan would be falsy, and the module silently stay as it is.
            {table: ParameterSharding("data_parallel", "fused", ranks=[]) for table in module.table_names()}
        )
    group = process_group if process_group is not None else dist.group.WORLD
    if others:
        ranks = dist.get_world_size(group) if group is not None else 1
        if planner is None:
            compute_device = "cpu" if device is None else device.type
            planner = EmbeddingShardingPlanner(
                topology=Topology(
                    world_size=ranks, local_world_size=get_local_size(ranks), compute_device=compute_device
                )
            )
        planned = planner.plan(model, others) if group is None else planner.collective_plan(model, others, group)
        on_store = {**planned.plan, **on_store}
    return ShardingPlan(on_store)
