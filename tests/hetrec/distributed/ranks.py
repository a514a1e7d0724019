"""Work done by several ranks, each a process of its own, over gloo."""

from __future__ import annotations

import multiprocessing as mp
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def on_ranks(
    work: Callable[..., Any], folder: Path, *arguments: Any, ranks: int = 2, within_s: float = 180
) -> list[Any]:
    """What ``work(rank, ranks, *arguments)`` returns on each rank. ``folder``: new, for these processes."""
    folder.mkdir()
    context = mp.get_context("spawn")
    processes = [
        context.Process(target=_rank, args=(work, rank, ranks, folder, arguments), daemon=True) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + within_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()  # nothing to one that has ended
    errors = [file.read_text() for file in sorted(folder.glob("*.error"))]
    assert not errors, "\n".join(errors)
    return [torch.load(folder / f"{rank}.result", weights_only=False) for rank in range(ranks)]


def _rank(work: Callable[..., Any], rank: int, ranks: int, folder: Path, arguments: tuple[Any, ...]) -> None:
    try:
        dist.init_process_group(
            "gloo", f"file://{folder / 'rendezvous'}", timedelta(seconds=60), rank=rank, world_size=ranks
        )
        torch.save(work(rank, ranks, *arguments), folder / f"{rank}.result")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (folder / f"{rank}.error").write_text(f"rank {rank}: {traceback.format_exc()}")
