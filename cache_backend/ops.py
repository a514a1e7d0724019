"""The native ops, each bound once. Schemas and shapes: ``csrc/ops/schemas.cpp``."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from cache_backend import _table

__all__ = [
    "bag_grad",
    "bag_lookup",
    "bag_update",
    "bag_weight_grad",
    "cache_answered",
    "cache_commit",
    "cache_cut",
    "cache_plan",
    "cache_release",
    "cache_reveal",
    "cache_spill",
    "cache_unreveal",
    "check_keys",
    "init_rows",
    "row_update",
    "sample_neighbors",
    "unique_rows",
]

torch.ops.load_library(str(Path(_table.__file__).parent / "libhetrec_ops.so"))

check_keys = torch.ops.hetrec.check_keys.default
unique_rows = torch.ops.hetrec.unique_rows.default
cache_plan = torch.ops.hetrec.cache_plan.default
cache_reveal = torch.ops.hetrec.cache_reveal.default
cache_unreveal = torch.ops.hetrec.cache_unreveal.default
cache_spill = torch.ops.hetrec.cache_spill.default
cache_cut = torch.ops.hetrec.cache_cut.default
cache_answered = torch.ops.hetrec.cache_answered.default
cache_commit = torch.ops.hetrec.cache_commit.default
cache_release = torch.ops.hetrec.cache_release.default
init_rows = torch.ops.hetrec.init_rows.default
bag_lookup = torch.ops.hetrec.bag_lookup.default
bag_grad = torch.ops.hetrec.bag_grad.default
bag_weight_grad = torch.ops.hetrec.bag_weight_grad.default
bag_update = torch.ops.hetrec.bag_update.default
row_update = torch.ops.hetrec.row_update.default
sample_neighbors = torch.ops.hetrec.sample_neighbors.default


def _size() -> torch.SymInt:
    """A size that only the data decides."""
    return torch.library.get_ctx().new_dynamic_size()


def _i64(like: Tensor, *shape: int | torch.SymInt) -> Tensor:
    return like.new_empty(shape, dtype=torch.int64)


def _i32(like: Tensor, *shape: int | torch.SymInt) -> Tensor:
    return like.new_empty(shape, dtype=torch.int32)


def _push(keys: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
    n = _size()
    return (
        _i64(keys, n),
        _i32(keys, n),
        _i64(keys, n),
        _i64(keys, n),
        rows.new_empty((n, rows.size(2))),
    )


@torch.library.register_fake("hetrec::check_keys")
def _(keys: Tensor, feature_splits: Tensor, feature_rows: Tensor) -> Tensor:
    return _i64(keys, 1)


@torch.library.register_fake("hetrec::unique_rows")
def _(keys: Tensor, feature_splits: Tensor, feature_tables: Tensor) -> tuple[Tensor, ...]:
    n, unique = keys.numel(), _size()
    return _i64(keys, unique), _i32(keys, unique), _i32(keys, n), _i32(keys, n), _i32(keys, unique + 1)


@torch.library.register_fake("hetrec::cache_plan")
def _(
    tags: Tensor,
    priority: Tensor,
    meta: Tensor,
    rows: Tensor,
    sketch: Tensor,
    window: Tensor,
    keys: Tensor,
    tables: Tensor,
    policy: int,
    tick: int,
    uses: int,
    staleness: Tensor,
    want_checks: bool,
) -> tuple[Tensor, ...]:
    checks = _size()
    return (
        _i64(keys, keys.numel()),
        _i32(keys, _size()),
        _i32(keys, _size()),
        _i32(keys, checks),
        _i64(keys, checks),
        *_push(keys, rows),
        _i64(keys, 5),
    )


@torch.library.register_fake("hetrec::cache_reveal")
def _(tags: Tensor, priority: Tensor, meta: Tensor, window: Tensor, keys: Tensor, tables: Tensor, tick: int) -> Tensor:
    return _i64(keys, 1)


@torch.library.register_fake("hetrec::cache_unreveal")
def _(priority: Tensor, window: Tensor) -> None:
    return None


@torch.library.register_fake("hetrec::cache_spill")
def _(meta: Tensor, slots: Tensor, keys: Tensor, tables: Tensor, capacity: int) -> Tensor:
    return _i64(slots, 1)


@torch.library.register_fake("hetrec::cache_cut")
def _(meta: Tensor, rows: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
    push = _push(slots, rows)
    return (_i32(slots, push[0].size(0)), *push)


@torch.library.register_fake("hetrec::cache_answered")
def _(meta: Tensor, slots: Tensor, which: Tensor) -> None:
    return None


@torch.library.register_fake("hetrec::cache_commit")
def _(
    meta: Tensor,
    rows: Tensor,
    slots: Tensor,
    inserted: int,
    reply_rows: Tensor,
    reply_clocks: Tensor,
    fresh: Tensor,
    init_seeds: Tensor,
    init_values: Tensor,
    dim: int,
) -> None:
    return None


@torch.library.register_fake("hetrec::cache_release")
def _(meta: Tensor, priority: Tensor, slots: Tensor) -> None:
    return None


@torch.library.register_fake("hetrec::init_rows")
def _(
    rows: Tensor, fresh: Tensor, keys: Tensor, tables: Tensor, init_seeds: Tensor, init_values: Tensor, dim: int
) -> None:
    return None


@torch.library.register_fake("hetrec::bag_lookup")
def _(
    rows: Tensor,
    slots: Tensor,
    inverse: Tensor,
    bag_of: Tensor | None,
    bag_offsets: Tensor,
    weights: Tensor | None,
    feature_mean: Tensor,
    dim: int,
) -> Tensor:
    features = feature_mean.numel()
    return rows.new_empty(((bag_offsets.numel() - 1) // features, features * dim))


@torch.library.register_fake("hetrec::bag_grad")
def _(
    grad: Tensor,
    order: Tensor,
    splits: Tensor,
    bag_of: Tensor | None,
    bag_offsets: Tensor,
    weights: Tensor | None,
    feature_mean: Tensor,
    dim: int,
    scale: float,
) -> Tensor:
    return grad.new_empty((splits.numel() - 1, dim))


@torch.library.register_fake("hetrec::bag_weight_grad")
def _(
    rows: Tensor,
    slots: Tensor,
    inverse: Tensor,
    bag_of: Tensor | None,
    bag_offsets: Tensor,
    feature_mean: Tensor,
    grad: Tensor,
    dim: int,
) -> Tensor:
    return rows.new_empty((inverse.numel(),))


@torch.library.register_fake("hetrec::bag_update")
def _(
    rows: Tensor,
    meta: Tensor,
    priority: Tensor,
    slots: Tensor,
    grad: Tensor,
    order: Tensor,
    splits: Tensor,
    bag_of: Tensor | None,
    bag_offsets: Tensor,
    weights: Tensor | None,
    feature_mean: Tensor,
    dim: int,
    scale: float,
    optimizer: int,
    lr: float,
    settings: Tensor,
) -> Tensor:
    return _i64(slots, _size())


@torch.library.register_fake("hetrec::row_update")
def _(
    rows: Tensor,
    meta: Tensor,
    slots: Tensor,
    grads: Tensor,
    dim: int,
    optimizer: int,
    lr: float,
    settings: Tensor,
    pending: bool,
) -> Tensor:
    return _i64(slots, _size())


@torch.library.register_fake("hetrec::sample_neighbors")
def _(
    colptr: Tensor, row: Tensor, seeds: Tensor, fanouts: list[int], seed: int, epoch: int, batch: int
) -> tuple[Tensor, ...]:
    hops = len(fanouts)
    return _i64(seeds, _size()), _i64(seeds, 2, _size()), _i64(seeds, hops + 1), _i64(seeds, hops)
