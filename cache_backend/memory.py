"""Large zeroed host tensors on huge pages: cached rows are visited at random, and small pages cost more than the
rows."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

__all__ = ["zeros"]

_WORTH_IT = 4 << 20  # bytes


def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    """A zeroed CPU tensor whose pages are taken when they are first touched."""
    count = math.prod(shape)
    size = count * dtype.itemsize
    if size < _WORTH_IT or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # the tensor keeps it alive
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)
