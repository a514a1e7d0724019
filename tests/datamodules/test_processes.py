"""Workers of a script that has its work at the top, and of one whose own class they need."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

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

OWN_CLASS = f"""
from datamodules.workers import Workers
{SQUARES}
if __name__ == "__main__":
    print("top")
    print(list(Workers(Squares(), 2).read([(0, 3), (0, 4)])))
"""


@pytest.mark.parametrize("script", [PLAIN, OWN_CLASS], ids=["without a guard", "with a class of its own"])
def test_a_scripts_workers_read(tmp_path: Path, script: str) -> None:
    (tmp_path / "squares.py").write_text(SQUARES)
    (tmp_path / "script.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "script.py"]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "top\n[9, 16]\n"
