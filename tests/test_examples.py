"""The programs in examples/ run as they are, on two ranks."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from servers import servers

REPOSITORY = Path(__file__).resolve().parents[1]
EXAMPLES = REPOSITORY / "examples"
ADDRESS = "grpc://127.0.0.1:7070"


def run(program: Path, folder: Path, *arguments: str) -> str:
    """Its output, run in a folder of its own by two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["torchrec_dlrm", "torchrec_dlrm_stock"])
def test_dlrm_trains_on_two_ranks(name: str, tmp_path: Path) -> None:
    source = (EXAMPLES / f"{name}.py").read_text()
    assert (ADDRESS in source.split('"""')[2]) == (name == "torchrec_dlrm")
    with servers(1) as (address,):
        # The port that the example names may be taken here.
        program = tmp_path / f"{name}.py"
        program.write_text(source.replace(ADDRESS, address))
        said = run(program, tmp_path, "--rows", "30000", "--batch-size", "512")
    (auc,) = re.findall(r"test AUC ([0-9.]+)", said)
    assert float(auc) > 0.6


def test_what_a_torchrec_program_has_to_change() -> None:
    stock, ours = (
        (EXAMPLES / f"{name}.py").read_text().splitlines() for name in ("torchrec_dlrm_stock", "torchrec_dlrm")
    )
    changed = [line for line in difflib.ndiff(stock, ours) if line.startswith(("- ", "+ "))]
    assert 0 < len(changed) <= 10
