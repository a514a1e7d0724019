"""One torch optimizer drives both halves of a model: the dense parameters, and, by a group of its own, the rows.

The group holds no parameters. It carries the rows' learning rate, so schedulers, resume and learning-rate monitors
treat it as any other, and each completed ``optimizer.step()`` steps the rows with it. A step that the gradient scaler
skips never reaches them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

__all__ = ["EMBEDDING_GROUP", "add_embedding_group", "apply_overrides", "configured", "embedding_group"]

EMBEDDING_GROUP = "embeddings"


def embedding_group(optimizer: Optimizer) -> dict[str, Any] | None:
    """The parameter group that drives the embedding rows, or None."""
    return next((g for g in optimizer.param_groups if g.get("name") == EMBEDDING_GROUP), None)


def add_embedding_group(optimizer: Optimizer, lr: float, step: Callable[[float], None]) -> Optimizer:
    """Makes every completed step of ``optimizer`` call ``step`` with the group's learning rate of that moment.

    Call it before a scheduler is built on the optimizer: schedulers note the groups there are at that moment.

    Args:
        lr: the rows' (initial) learning rate.
        step: steps the embedding rows.
    """
    optimizer.add_param_group({"params": [], "name": EMBEDDING_GROUP, "lr": lr})

    def step_rows(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # An optimizer that unscales by itself (fused Adam on a GPU) also skips by itself, told so by this attribute.
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and bool(found_inf):
            return
        group = embedding_group(optimizer)
        assert group is not None
        step(float(group["lr"]))

    optimizer.register_step_post_hook(step_rows)
    return optimizer


def configured(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The settings of each group as given by the user: call it before a schedule or a checkpoint changes them."""
    return [{k: v for k, v in group.items() if k not in ("params", "name")} for group in optimizer.param_groups]


def apply_overrides(
    optimizer: Optimizer,
    schedulers: Sequence[LRScheduler],
    then: list[dict[str, Any]],
    now: list[dict[str, Any]],
) -> None:
    """Lets settings that differ from the checkpoint's run win over those that the checkpoint brought back.

    ``optimizer.load_state_dict`` restores the learning rate and its kin with the state. A setting that is given as it
    was then keeps its restored (perhaps scheduled) value; one that is given differently takes the new one, and a
    schedule goes on from its restored position at the new base learning rate.

    Args:
        then: ``configured`` of the run that wrote the checkpoint.
        now: ``configured`` of this run.

    Raises:
        ValueError: the checkpoint's optimizer was one of another kind, whose state means nothing to this one.
    """
    if then[0].keys() != now[0].keys():
        theirs, ours = ([k for k in a if k not in b] for a, b in ((then[0], now[0]), (now[0], then[0])))
        raise ValueError(
            f"{type(optimizer).__name__} cannot go on from the state of another optimizer: the checkpoint's has the "
            f"settings {', '.join(theirs) or 'none'}, and this one {', '.join(ours) or 'none'}, which the other lacks. "
            "Use the optimizer of the run that saved it"
        )
    for index, (group, old, new) in enumerate(zip(optimizer.param_groups, then, now, strict=True)):
        group.update({k: v for k, v in new.items() if k != "lr" and old.get(k) != v})
        if old["lr"] == new["lr"]:
            continue
        group["lr"] = group["lr"] * new["lr"] / old["lr"] if old["lr"] else new["lr"]
        for scheduler in schedulers:
            if hasattr(scheduler, "base_lrs"):
                scheduler.base_lrs[index] = new["lr"]
