"""Lookups as autograd functions: pooled rows, and gradients for rows and for bag weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cache_backend import ops
from cache_backend.cache import Bags
from hetrec.batch_stream import BatchStream
from hetrec.cached_batch import CachedBatch, Gradient, Graph

__all__ = ["CachedLookup", "Pooled"]


class Pooled(torch.autograd.Function):
    """Pools rows, float32 (U, dim or more); inverse int32 (N,): position -> row. Differentiable with respect to the
    bags' weights, float32 (N,) or None, as ``torch.nn.functional.embedding_bag`` is."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor | None, rows: Tensor, inverse: Tensor, bags: Bags, dim: int) -> Tensor:
        bags = bags if weights is None else bags._replace(weights=weights.detach())
        ctx.found, ctx.bags, ctx.dim = (rows, inverse), bags, dim
        return ops.bag_lookup(rows, _every(rows), inverse, *bags, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        rows, inverse = ctx.found
        return _weight_gradient(rows, inverse, ctx.bags, grad, ctx.dim), None, None, None, None


class CachedLookup(torch.autograd.Function):
    """The lookup of group i of a batch. The rows' gradient goes nowhere in autograd: it stays with the batch until the
    step. That of the bags' weights is of the rows as they were at the lookup."""

    @staticmethod
    def forward(
        ctx: Any,
        leaf: Tensor,
        weights: Tensor | None,
        graph: Graph,
        stream: BatchStream,
        batch: CachedBatch,
        i: int,
        bags: Bags,
    ) -> Tensor:
        cache, plan = stream.groups[i].cache, batch.plans[i]
        ctx.graph, ctx.stream, ctx.batch, ctx.i = graph, stream, batch, i
        ctx.bags = bags if weights is None else bags._replace(weights=weights.detach())
        ctx.dim = cache.dim
        ctx.found = None
        if ctx.needs_input_grad[1]:
            rows = cache.weights_of(plan)
            ctx.found = rows, plan.rows.inverse
            return ops.bag_lookup(rows, _every(rows), plan.rows.inverse, *ctx.bags, cache.dim)
        return cache.lookup(plan, ctx.bags)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad = grad.detach().float().contiguous()  # a graph of its own (create_graph) would lead back here
        of_weights = None
        if ctx.found is not None:
            rows, inverse = ctx.found
            of_weights = _weight_gradient(rows, inverse, ctx.bags, grad, ctx.dim)
        ctx.stream.gradient_arrived(ctx.batch, ctx.i, Gradient(grad, ctx.bags))
        return None, of_weights, None, None, None, None, None


def _every(rows: Tensor) -> Tensor:
    return torch.arange(rows.size(0))


def _weight_gradient(rows: Tensor, inverse: Tensor, bags: Bags, grad: Tensor, dim: int) -> Tensor:
    gradient: Tensor = ops.bag_weight_grad(
        rows, _every(rows), inverse, bags.bag_of, bags.offsets, bags.mean, grad.float().contiguous(), dim
    )
    return gradient
