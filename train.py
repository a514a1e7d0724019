"""Trains, validates, tests, predicts: ``python train.py model=deepfm data=criteo``. See README.md and hetrec/cli.py."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    # Until the program itself listens: imports take seconds, and Ctrl-C there would end in a traceback.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

# Before torch is loaded: its idle workers sleep instead of spinning. Reading ahead and fetching rows are threads beside
# them, and on busy cores spinning workers starve those (seen: 660 samples a second instead of 9,500, on two cores).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from hetrec.cli import main

# A class of the user's own (a callback, a model) that a configuration names may lie in the folder that train.py is
# called from, as with python -m.
sys.path.append("")

CONFIGS = Path(__file__).resolve().parent / "configs"

if __name__ == "__main__":
    code = main(CONFIGS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # what is left is the interpreter's own end
    sys.exit(code)
