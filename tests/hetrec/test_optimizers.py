"""The embeddings' parameter group: any torch optimizer carries it, and settings given anew win on resume."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, LRScheduler

from hetrec.optimizers import add_embedding_group, apply_overrides, configured, embedding_group

OPTIMIZERS = ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adamax", "NAdam", "Adadelta", "Adafactor"]


class Steps:
    """Keeps the learning rates that reached the rows."""

    def __init__(self) -> None:
        self.lrs: list[float] = []

    def __call__(self, lr: float) -> None:
        self.lrs.append(lr)


def one_step(optimizer: Optimizer, parameter: nn.Parameter) -> None:
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_steps_the_rows_once_a_step(name: str) -> None:
    parameter, steps = nn.Parameter(torch.ones(3)), Steps()
    optimizer = add_embedding_group(getattr(torch.optim, name)([parameter], lr=0.1), 0.5, steps)
    one_step(optimizer, parameter)
    one_step(optimizer, parameter)
    assert steps.lrs == [0.5, 0.5]
    optimizer.load_state_dict(optimizer.state_dict())
    group = embedding_group(optimizer)
    assert group is not None
    assert group["lr"] == 0.5


def test_a_schedule_reaches_the_rows() -> None:
    parameter, steps = nn.Parameter(torch.ones(3)), Steps()
    optimizer = add_embedding_group(SGD([parameter], lr=0.1), 0.5, steps)
    schedule = LambdaLR(optimizer, lambda step: step / 4)
    for _ in range(4):
        one_step(optimizer, parameter)
        schedule.step()
    assert steps.lrs == pytest.approx([0.0, 0.125, 0.25, 0.375])


def test_an_optimizer_that_skips_by_itself_takes_the_rows_along() -> None:
    parameter, steps = nn.Parameter(torch.ones(3)), Steps()
    optimizer: Any = add_embedding_group(SGD([parameter], lr=0.1, fused=True), 0.5, steps)
    optimizer.found_inf = torch.tensor(1.0)  # what torch's GradScaler sets on optimizers that unscale by themselves
    one_step(optimizer, parameter)
    assert steps.lrs == []
    optimizer.found_inf = torch.tensor(0.0)
    one_step(optimizer, parameter)
    assert steps.lrs == [0.5]


def resumed(
    dense_lr: float, rows_lr: float, schedule: type[LRScheduler] | None = None, **settings: float
) -> tuple[list[dict[str, Any]], LRScheduler | None]:
    """The groups after three steps at lr 0.1 and 0.5, a checkpoint, and a resume with the given settings."""

    def make(dense: float, rows: float, **more: float) -> tuple[nn.Parameter, Optimizer, LRScheduler | None]:
        parameter = nn.Parameter(torch.ones(3))
        optimizer = add_embedding_group(SGD([parameter], lr=dense, **more), rows, lambda lr: None)
        how: dict[type[LRScheduler], dict[str, Any]] = {ExponentialLR: {"gamma": 0.5}, CosineAnnealingLR: {"T_max": 10}}
        return parameter, optimizer, schedule(optimizer, **how[schedule]) if schedule else None

    parameter, optimizer, scheduler = make(0.1, 0.5, momentum=0.9)
    then = configured(make(0.1, 0.5, momentum=0.9)[1])
    for _ in range(3):
        one_step(optimizer, parameter)
        if scheduler:
            scheduler.step()
    _, again, new_scheduler = make(dense_lr, rows_lr, **({"momentum": 0.9} | settings))
    now = configured(make(dense_lr, rows_lr, **({"momentum": 0.9} | settings))[1])
    again.load_state_dict(optimizer.state_dict())
    if new_scheduler and scheduler:
        new_scheduler.load_state_dict(scheduler.state_dict())
    apply_overrides(again, [new_scheduler] if new_scheduler else [], then, now)
    return again.param_groups, new_scheduler


def test_settings_given_as_before_keep_their_scheduled_value() -> None:
    groups, _ = resumed(0.1, 0.5, ExponentialLR)
    assert [g["lr"] for g in groups] == pytest.approx([0.1 / 8, 0.5 / 8])


def test_settings_given_anew_win() -> None:
    groups, _ = resumed(0.2, 0.5, momentum=0.5)
    assert [g["lr"] for g in groups] == pytest.approx([0.2, 0.5])
    assert [g["momentum"] for g in groups] == [0.5, 0.5]


@pytest.mark.parametrize("schedule", [ExponentialLR, CosineAnnealingLR])
def test_a_schedule_goes_on_from_its_position_at_the_new_rate(schedule: type[LRScheduler]) -> None:
    unchanged, _ = resumed(0.1, 0.5, schedule)
    changed, scheduler = resumed(0.1, 1.0, schedule)
    assert scheduler is not None
    assert changed[0]["lr"] == pytest.approx(unchanged[0]["lr"])
    assert changed[1]["lr"] == pytest.approx(2 * unchanged[1]["lr"])
    assert scheduler.base_lrs == [0.1, 1.0]
    before = [g["lr"] for g in changed]
    scheduler.optimizer.step()
    scheduler.step()
    ratios = [g["lr"] / lr for g, lr in zip(changed, before, strict=True)]
    assert ratios[0] == pytest.approx(ratios[1])
