"""What every benchmark prints: the machine, the commit, a table; and the same as JSON."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["report"]


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor()


def _commit() -> str:
    root = Path(__file__).parent
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True, check=False
    )
    return described.stdout.strip() or "unknown"


def report(title: str, rows: Sequence[Mapping[str, Any]], json_file: Path | None) -> None:
    """Print ``rows`` (all with the same keys) as a table; write them, with the machine, to ``json_file``."""
    machine = {"processor": _processor(), "cores": os.cpu_count(), "commit": _commit()}
    console = Console(width=160)
    console.print(f"{machine['processor']}, {machine['cores']} cores, commit {machine['commit']}")
    table = Table(title=title, title_justify="left")
    for column in rows[0]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()))
    console.print(table)
    if json_file is not None:
        json_file.write_text(json.dumps({"title": title, "machine": machine, "rows": list(rows)}, indent=1) + "\n")
