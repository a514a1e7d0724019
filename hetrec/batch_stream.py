"""The batches of an open collection, on their way through its caches (``hetrec.cached_batch``: the life of one)."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cache_backend import ops
from cache_backend.cache import WINDOW, Cache
from cache_backend.config import EmbeddingOptimizer
from cache_backend.interrupts import uninterrupted
from cache_backend.stats import CacheStats
from cache_backend.store import EmbeddingStore
from hetrec.cached_batch import CachedBatch, Gradient, State
from hetrec.exchanges import Exchanges
from hetrec.features import FeatureGroup, check_features, same_bags

__all__ = ["BatchStream", "Group"]


@dataclass
class Group:
    """Tables of one width share a cache."""

    features: FeatureGroup
    cache: Cache


class BatchStream:
    """Plans batches, exchanges their rows with the store in the background, and steps them.

    Args:
        groups: the caches and the features that read them.
        table_names: by table id, for messages.
        weighted: whether bags have weights.
        scale: gradients are multiplied by it.
        synchronous: ``cache.consistency`` is bsp.
        prefetch_depth: coming batches that ``begin`` plans.
    """

    def __init__(
        self,
        store: EmbeddingStore,
        groups: Sequence[Group],
        optimizer: EmbeddingOptimizer,
        table_names: dict[int, str],
        weighted: bool,
        scale: float,
        synchronous: bool,
        prefetch_depth: int,
    ) -> None:
        self.is_open = True
        self.groups = list(groups)
        self.store = store
        self.ahead: deque[CachedBatch] = deque()  # planned, not yet begun, in the order in which they will be
        self._begun: list[CachedBatch] = []  # since the last step; the last one is the current batch
        self._in_view: deque[CachedBatch] = deque()  # revealed to the caches, not yet planned: those that follow
        self._coming: KeyedJaggedTensor | None = None  # the batch after the current one, where it is known
        self._optimizer = optimizer
        self._table_names = table_names
        self._weighted = weighted
        self._scale = scale
        self._synchronous = synchronous
        self._prefetch_depth = prefetch_depth
        self._looks_ahead = any(group.cache.looks_ahead for group in groups)
        self._exchanges = Exchanges(store)
        self._lr_in_backward: Callable[[], float] | None = None
        self._wait_s = 0.0
        self._steps = 0
        self._warned = False
        self._dirty = False  # whether there may be updates that were not pushed

    def __del__(self) -> None:
        if not getattr(self, "is_open", False):
            return
        self._exchanges.shutdown(wait=False)
        if self._dirty:  # looking at tensors while they are collected as garbage can abort the process
            warnings.warn(
                "an open embedding collection was freed, and with it the updates since the last flush that the cache "
                "had not pushed to the store: close() it first",
                ResourceWarning,
                stacklevel=2,
            )

    def current(self, features: KeyedJaggedTensor) -> CachedBatch:
        """The batch that was begun last, if it is this one (weighted bags: or holds the same bags under other weights);
        else this one is begun."""
        if self._begun:
            last = self._begun[-1]
            if last.features is features or (self._weighted and same_bags(last.features, features)):
                return last
        self.begin(features)
        return self._begun[-1]

    def begin(self, features: KeyedJaggedTensor, upcoming: Sequence[KeyedJaggedTensor] = ()) -> None:
        if self._lr_in_backward is not None:
            self.discard()  # what no gradient reached
        self._release_abandoned()
        self._give_back_ahead(until=features)
        self._look_ahead([features, *upcoming])
        if not self.ahead:
            self.ahead.append(self._plan(features))
        batch = self.ahead[0]
        self._commit(batch)
        self._settle(batch)
        self._begun.append(self.ahead.popleft())
        self._coming = upcoming[0] if upcoming else None
        for i, coming in enumerate(upcoming[: self._prefetch_depth]):
            if i == len(self.ahead):
                self.ahead.append(self._plan(coming))
            elif self.ahead[i].features is not coming:
                break

    def prefetch(self, features: KeyedJaggedTensor) -> None:
        if not self._synchronous and not any(batch.features is features for batch in self.ahead):
            self.ahead.append(self._plan(features))

    def step(self, lr: float) -> None:
        self._steps += 1
        begun, self._begun = self._begun, []
        left_out = [self._step_group(i, begun, lr) for i in range(len(self.groups))]
        for batch in begun:
            batch.enter(State.STEPPED)
        if self._synchronous and self._coming is not None and not self.ahead:
            # Not earlier: the request carries this step's gradients, and its answer is of after the step.
            self.ahead.append(self._plan(self._coming))
        self._report(left_out)

    def step_in_backward(self, lr: Callable[[], float]) -> None:
        self._lr_in_backward = lr

    def discard(self) -> None:
        begun, self._begun = self._begun, []
        for batch in begun:
            self._release(batch)

    def flush(self) -> None:
        for batch in self.ahead:
            self._commit(batch)
        for group in self.groups:
            group.cache.flush()
        self.store.flush()
        self._dirty = False

    def reset(self) -> None:
        self._exchanges.recover(batch.replies for batch in self.ahead if batch.replies is not None)
        self._forget()
        for group in self.groups:
            group.cache.reset()
        self._dirty = False

    def stats(self) -> CacheStats:
        total = sum((group.cache.stats for group in self.groups), CacheStats())
        total.steps = self.groups[0].cache.stats.steps
        total.wait_s = self._wait_s
        return total

    def close(self) -> None:
        """Flush and end. Closing twice is fine."""
        if not self.is_open:
            return
        try:
            self.discard()
            self.flush()
        finally:
            self.is_open = False
            self._exchanges.shutdown()
            self._forget()
            self.groups = []

    def gradient_arrived(self, batch: CachedBatch, i: int, gradient: Gradient) -> None:
        """Of group i of a batch, from backward."""
        if i in batch.stepped:
            raise RuntimeError("a batch whose gradients were applied in backward went through backward again")
        if batch.state is State.STEPPED:
            raise RuntimeError(
                "backward of a batch whose step was taken: its gradient has no step to go to. Run backward before the "
                "step"
            )
        if batch not in self._begun:
            raise RuntimeError(
                "backward of a batch that was given up, because another was begun or rows were loaded since its forward"
            )
        batch.gradients[i].append(gradient)
        if self._lr_in_backward is None:
            return
        self._steps += not batch.stepped
        left_out = self._step_group(i, [batch], self._lr_in_backward())
        batch.stepped.add(i)
        if len(batch.stepped) == len(self.groups):
            self._begun.remove(batch)
            batch.enter(State.STEPPED)
        self._report([left_out])

    def _forget(self) -> None:
        self._begun.clear()
        self.ahead.clear()
        self._in_view.clear()
        self._coming = None

    def _look_ahead(self, stream: Sequence[KeyedJaggedTensor]) -> None:
        """Reveal to the caches, each once, the batches of ``stream`` that come after those that will be planned now."""
        if not self._looks_ahead:
            return
        coming = stream[len(self.ahead) :][:WINDOW]
        if any(known.features is not features for known, features in zip(self._in_view, coming, strict=False)):
            self._lose_view()
        if len(stream) <= 1 + self._prefetch_depth and not self._in_view:
            return  # all of them are planned at once: there is nothing beyond to know
        for features in coming[len(self._in_view) :]:
            batch = self.view(features)
            self._in_view.append(batch)
            for group, rows in zip(self.groups, batch.rows, strict=True):
                group.cache.reveal(rows)

    def _lose_view(self) -> None:
        self._in_view.clear()
        for group in self.groups:
            group.cache.unreveal()

    def view(self, features: KeyedJaggedTensor) -> CachedBatch:
        """A batch whose keys are known, checked."""
        check_features(features, self._weighted)
        rows, bags = zip(*(group.features.rows_and_bags(features) for group in self.groups), strict=True)
        return CachedBatch(features, list(rows), list(bags))

    def _plan(self, features: KeyedJaggedTensor) -> CachedBatch:
        if self._in_view and self._in_view[0].features is not features:
            self._lose_view()
        # What may fail comes before the first cache is touched: neither a bad key nor a store that cannot be reached
        # may leave pins behind.
        for group in self.groups:
            group.cache.finish_unanswered()
        batch = self._in_view.popleft() if self._in_view else self.view(features)
        with uninterrupted():  # until what was cut is on its way
            batch.plans = [group.cache.plan(rows) for group, rows in zip(self.groups, batch.rows, strict=True)]
            batch.enter(State.PLANNED)
            self._send(batch)
        return batch

    def _send(self, batch: CachedBatch) -> None:
        batch.replies = self._exchanges.submit([plan.request for plan in batch.plans], batch.answered)
        batch.failed = False
        batch.enter(State.SENT)

    def _resend(self) -> None:
        """Send again, in order, what failed and what came after it."""
        waiting = [batch for batch in self.ahead if batch.replies is not None]
        self._exchanges.recover(batch.replies for batch in waiting if batch.replies is not None)
        for batch in waiting:
            self._send(batch)

    def _commit(self, batch: CachedBatch) -> None:
        if batch.state is not State.SENT:
            return
        if batch.failed:
            self._resend()
        start = time.perf_counter()
        assert batch.replies is not None
        try:
            replies = batch.replies.result()
        except BaseException:
            # What the request carries is in no cache any more, so it must not be lost: whoever goes on sends it again.
            batch.failed = batch.replies.done() and batch.replies.exception() is not None  # Ctrl-C ends the wait only
            raise
        self._wait_s += time.perf_counter() - start
        batch.replies = None
        batch.enter(State.COMMITTED)
        for group, plan, reply in zip(self.groups, batch.plans, replies, strict=True):
            group.cache.commit(plan, reply)

    def _settle(self, batch: CachedBatch) -> None:
        start = time.perf_counter()
        for group, plan in zip(self.groups, batch.plans, strict=True):
            group.cache.settle(plan)
        self._wait_s += time.perf_counter() - start

    def _give_back_ahead(self, until: KeyedJaggedTensor) -> None:
        """Prefetched batches that do not come after all give their rows back."""
        while self.ahead and self.ahead[0].features is not until:
            batch = self.ahead[0]
            self._commit(batch)
            self._settle(batch)
            self._release(self.ahead.popleft())

    def _release_abandoned(self) -> None:
        """Forward passes without backward, however many there are, hold no pins."""
        for batch in [batch for batch in self._begun if batch.is_abandoned]:
            self._begun.remove(batch)
            self._release(batch)

    def _release(self, batch: CachedBatch) -> None:
        for i, (group, plan) in enumerate(zip(self.groups, batch.plans, strict=True)):
            if i not in batch.stepped:
                group.cache.release(plan)
        batch.enter(State.RELEASED)

    def _step_group(self, i: int, batches: Sequence[CachedBatch], lr: float) -> tuple[Tensor, Tensor]:
        """Tables and keys of the rows whose step was left out."""
        self._dirty = True
        cache = self.groups[i].cache
        if len(batches) == 1 and len(batches[0].gradients[i]) == 1:
            (gradient,), plan = batches[0].gradients[i], batches[0].plans[i]
            left_out = cache.update_bags(plan, gradient.pooled, gradient.bags, self._scale, lr)
            return plan.rows.tables[left_out], plan.rows.keys[left_out]
        left_out_of = self._step_accumulated(i, batches, lr)
        for batch in batches:
            cache.release(batch.plans[i])
        return left_out_of

    def _step_accumulated(self, i: int, batches: Sequence[CachedBatch], lr: float) -> tuple[Tensor, Tensor]:
        """Several gradients for one step: sum them per row first."""
        cache = self.groups[i].cache
        grads, slots = [], []
        for batch in batches:
            plan = batch.plans[i]
            for gradient in batch.gradients[i]:
                slots.append(plan.slots)
                grads.append(
                    ops.bag_grad(
                        gradient.pooled, plan.rows.order, plan.rows.splits, *gradient.bags, cache.dim, self._scale
                    )
                )
        slots.append(torch.empty(0, dtype=torch.int64))  # a batch without rows, or without a gradient, steps too
        grads.append(torch.empty(0, cache.dim))
        distinct, inverse = torch.unique(torch.cat(slots), return_inverse=True)
        total = torch.zeros(distinct.numel(), cache.dim).index_add_(0, inverse, torch.cat(grads))
        left_out = cache.update_rows(distinct, total, lr)
        return cache.rows_in(distinct[left_out])

    def _report(self, left_out: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Say which rows were not stepped because they would not be finite."""
        if not (count := sum(keys.numel() for _, keys in left_out)):
            return
        table, key = next((int(tables[0]), int(keys[0])) for tables, keys in left_out if keys.numel())
        which = f"key {key} of table {self._table_names[table]!r}" + (f" and {count - 1} more" if count > 1 else "")
        what = f"step {self._steps}: the gradient of {which} is NaN or infinite, or would make the row so"
        if self._optimizer.nonfinite == "error":
            raise ValueError(
                f"{what}. No row has taken it over. Look at the loss, the learning rate and the inputs, or leave such "
                "rows' steps out with embedding.nonfinite=skip"
            )
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{what}. Such a row's step is left out and counted (rows_nonfinite), which is said once; "
                "embedding.nonfinite=error ends the run instead",
                UserWarning,
                stacklevel=2,
            )
