"""Trains, validates, tests, predicts: ``python train.py model=deepfm data=criteo``. See README.md and hetrec/cli.py."""

from __future__ import annotations

import sys
from pathlib import Path

from hetrec.cli import main

CONFIGS = Path(__file__).resolve().parent / "configs"

if __name__ == "__main__":
    sys.exit(main(CONFIGS))
