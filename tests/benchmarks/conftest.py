"""The scripts of benchmarks/ import each other by name, as they do when they run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

_BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(_BENCHMARKS))


@pytest.fixture
def benchmarks() -> Path:
    """The folder of the scripts."""
    return _BENCHMARKS
