"""A parameter server to measure against, in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cache_backend import EmbeddingStore, TableSchema
from cache_backend.store import Check, ExchangeRequest, Fetch, Push

__all__ = ["Server", "cpu_seconds", "fill", "parameter_server"]

ROOT = Path(__file__).resolve().parents[1]
_START_S = 60.0
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Server:
    address: str
    pid: int


def cpu_seconds(pid: int) -> float:
    """Processor time, user and system, that a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


@contextmanager
def parameter_server(
    listen: str = "grpc://127.0.0.1:0", start: Callable[..., subprocess.Popen[Any]] = subprocess.Popen
) -> Iterator[Server]:
    """One ``hetrec-ps`` shard without durability; ``start(command, **options)`` starts its process."""
    module = os.environ.get("HETREC_BENCH_SERVER", "cache_backend.server")
    command = [sys.executable, "-m", module, "--shard", "0/1", "--listen", listen, "--insecure"]
    with tempfile.TemporaryFile("w+") as log:
        process = start(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
        try:
            yield Server(_wait_for_address(process, log), process.pid)
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for_address(process: subprocess.Popen[Any], log: Any) -> str:
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        log.seek(0)
        said = log.read()
        if address := re.search(r"grpc\S*://[\w.\-\[\]:]+:[1-9]\d*", said):
            return address[0]
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise RuntimeError(f"the parameter server did not start: {said.strip() or 'it said nothing'}")


def fill(store: EmbeddingStore, schema: TableSchema, table: int, rows: int) -> None:
    """Write rows 0 .. ``rows`` - 1 of a table as they begin: a row that nobody wrote would not travel."""
    width = schema.dim + schema.state_dim
    for start in range(0, rows, 20_000):
        keys = np.arange(start, min(rows, start + 20_000), dtype=np.int64)
        tables, clocks = np.full(len(keys), table, np.int32), np.zeros(len(keys), np.int64)
        push = Push(tables, keys, clocks, clocks, np.zeros((len(keys), width), np.float32))
        store.exchange(ExchangeRequest(schema.dim, schema.state_dim, push, Check(), Fetch(tables[:0], keys[:0])))
