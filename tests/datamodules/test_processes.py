"""Workers of a script that has its work at the top, and whether they run it again."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from datamodules.processes import process_context

REPOSITORY = Path(__file__).resolve().parents[2]


class Own:
    pass


SQUARES = """
class Squares:
    def read(self, epoch, number):
        return number**2
"""

PLAIN = """
from datamodules.workers import Workers
from squares import Squares

print("top")
print(list(Workers(Squares(), 2).read([(0, 3), (0, 4)])))
"""


def test_workers_of_a_plain_script_read(tmp_path: Path) -> None:
    (tmp_path / "squares.py").write_text(SQUARES)
    (tmp_path / "script.py").write_text(PLAIN)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "script.py"]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "top\n[9, 16]\n"


def test_a_class_of_the_main_program_brings_the_program_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own way of starting children; another class does not need it."""
    assert process_context(Own()).Process is not ForkServerProcess
    monkeypatch.setattr(Own, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "Own", Own, raising=False)
    assert process_context(Own()).Process is ForkServerProcess
