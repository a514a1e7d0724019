"""What every test may use: the real sample data and the devices."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path

# One thread per test process, set before torch loads: the suite runs beside other work, and sums in one fixed order.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from servers import servers

from cache_backend import EmbeddingStore, LocalStore, RemoteStore, TableSchema

REPOSITORY = Path(__file__).resolve().parents[1]

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in the background of a shell script; programs inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data samples beside the checkout; tests that need it skip where it is absent."""
    path = REPOSITORY.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip(f"no real data samples at {path}")
    return path


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Makes a disk of so many bytes, in memory; tests that need one skip where mounting is not permitted."""
    mounted: list[Path] = []

    def make(size: int) -> Path:
        path = tmp_path / f"disk{len(mounted)}"
        path.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], capture_output=True, check=False
        )
        if done.returncode:
            pytest.skip(f"mounting is not permitted: {done.stderr.decode().strip()}")
        mounted.append(path)
        return path

    yield make
    for path in mounted:
        subprocess.run(["umount", path], check=True)


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device the code runs on. HETREC_REQUIRE_CUDA=1 turns the skip on a host without a GPU into a failure."""
    if request.param == "cuda" and not torch.cuda.is_available():
        reason = "no CUDA device"
        if os.environ.get("HETREC_REQUIRE_CUDA") == "1":
            pytest.fail(f"{reason}, and HETREC_REQUIRE_CUDA=1")
        pytest.skip(reason)
    return torch.device(request.param)


@pytest.fixture(scope="session")
def shard_addresses() -> Iterator[Callable[[int, str], Sequence[str]]]:
    """Addresses of so many shards with that clock rule; started once, shared by all tests of a process."""
    with ExitStack() as stack:
        running: dict[tuple[int, str], Sequence[str]] = {}

        def addresses(shards: int, clock: str = "lamport") -> Sequence[str]:
            if (shards, clock) not in running:
                running[shards, clock] = stack.enter_context(servers(shards, "--clock", clock))
            return running[shards, clock]

        yield addresses


class OwnTables(RemoteStore):
    """A client whose tables have names of their own, so that tests can share servers."""

    _numbers = count()

    def __init__(self, *args, **kwargs) -> None:  # type: ignore[no-untyped-def]
        super().__init__(*args, **kwargs)
        self._prefix = f"{os.getpid()}-{next(self._numbers)}"

    def open(self, schemas: Sequence[TableSchema]) -> list[int]:
        return super().open([replace(schema, name=f"{self._prefix}/{schema.name}") for schema in schemas])


@pytest.fixture(params=["local", "one-shard", "three-shards"])
def make_store(request: pytest.FixtureRequest, shard_addresses: Callable) -> Callable[..., EmbeddingStore]:
    """Every kind of store behind the same tests. ``exclusive`` is for the local one, ``options`` for remote ones."""

    def make(clock: str = "lamport", exclusive: bool = True, **options: object) -> EmbeddingStore:
        if request.param == "local":
            return LocalStore(clock=clock, exclusive=exclusive)
        shards = {"one-shard": 1, "three-shards": 3}[request.param]
        return OwnTables(list(shard_addresses(shards, clock)), **options)

    return make
