"""What every benchmark prints: the machine, the commit, tables; and the same as JSON."""

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

__all__ = ["Rows", "report", "report_all"]

#: A table: all rows have the same keys, which are its columns.
Rows = Sequence[Mapping[str, Any]]


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


def _machine() -> dict[str, Any]:
    return {"processor": _processor(), "cores": os.cpu_count(), "commit": _commit(), "load": os.getloadavg()[0]}


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _print(title: str, rows: Rows, console: Console) -> None:
    console.print(f"\n{title}", soft_wrap=True, highlight=False)
    table = Table()
    for column, value in rows[0].items():
        table.add_column(column, justify="left" if isinstance(value, str) else "right")
    for row in rows:
        table.add_row(*(_text(value) for value in row.values()))
    console.print(table)


def report(title: str, rows: Rows, json_file: Path | None) -> None:
    """Print ``rows`` as a table; write them, with the machine, to ``json_file``."""
    machine = _machine()
    console = _heading(machine)
    _print(title, rows, console)
    if json_file is not None:
        json_file.write_text(json.dumps({"title": title, "machine": machine, "rows": list(rows)}, indent=1) + "\n")


def report_all(tables: Mapping[str, Rows], json_file: Path | None, settings: Mapping[str, Any]) -> None:
    """Print several tables by title; write them, with the machine and the run's ``settings``, to ``json_file``."""
    machine = _machine()
    console = _heading(machine)
    for title, rows in tables.items():
        _print(title, rows, console)
    if json_file is not None:
        listed = [{"title": title, "rows": list(rows)} for title, rows in tables.items()]
        content = {"machine": machine, "settings": dict(settings), "tables": listed}
        json_file.write_text(json.dumps(content, indent=1) + "\n")


def _heading(machine: Mapping[str, Any]) -> Console:
    console = Console(width=160)
    console.print(
        f"{machine['processor']}, {machine['cores']} cores, commit {machine['commit']}, load {machine['load']:.1f}"
    )
    return console
