"""What every test may use: the real sample data and the devices."""

from __future__ import annotations

import os
from pathlib import Path

# One thread per test process, set before torch loads: the suite runs beside other work, and sums in one fixed order.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data samples beside the checkout; tests that need it skip where it is absent."""
    path = REPOSITORY.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip(f"no real data samples at {path}")
    return path


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device the code runs on. HETREC_REQUIRE_CUDA=1 turns the skip on a host without a GPU into a failure."""
    if request.param == "cuda" and not torch.cuda.is_available():
        reason = "no CUDA device"
        if os.environ.get("HETREC_REQUIRE_CUDA") == "1":
            pytest.fail(f"{reason}, and HETREC_REQUIRE_CUDA=1")
        pytest.skip(reason)
    return torch.device(request.param)
