"""How the ranks of a run agree that they are one: for steps that they take together (``cache.consistency=bsp``)."""

from __future__ import annotations

import secrets

from torch import distributed

from cache_backend.bsp import RankGroup

__all__ = ["ranks_of_this_run"]


def ranks_of_this_run(world_size: int) -> RankGroup:
    """A name that nobody used before, the same on all ranks; they call this together.

    Raises:
        ValueError: ``torch.distributed`` does not have these ranks.
    """
    if world_size == 1:
        return RankGroup(secrets.randbits(63), 0, 1)
    there = distributed.get_world_size() if distributed.is_initialized() else 1
    if there != world_size:
        raise ValueError(
            f"cache.consistency=bsp steps {world_size} ranks together, but torch.distributed has {there}: initialise "
            f"its process group first, with all of them"
        )
    names = [secrets.randbits(63)]
    distributed.broadcast_object_list(names)  # the first rank's is everyone's
    return RankGroup(names[0], distributed.get_rank(), world_size)
