"""What staleness costs in AUC: DeepFM on generated Criteo-shaped rows, two ranks and a server on this machine.

HET (VLDB'22, section 5.3) saw no loss at s=100. For s = 0, 10, 100, 1000 under both clock rules, for no cache at all
(every row fetched and pushed at every step), and for bulk-synchronous training, which is one process on the whole
batch: test AUC of three seeds (of the model, the split and the order of rows), the staleness that was observed, and
bytes a step and rank. The best AUC that any model can reach on these rows is known; it is the last line.

    .venv/bin/python benchmarks/staleness.py [--json FILE] [--plot FILE] [--runs FILE] [--seeds 1 2 3]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from report import report_all
from rich.progress import track
from servers import ROOT

TIMEOUT_S = 3600.0
CLOCKS = ("lamport", "sum")
BOUNDS = (0, 10, 100, 1000)
QUICK_BOUNDS = (10,)
BEST = "best reachable"


@dataclass(frozen=True)
class Variant:
    """name, clock: as shown; words: what it adds to the command line."""

    name: str
    clock: str
    words: tuple[str, ...]


NO_CACHE = Variant("no cache", "-", ("cache.rows=32", "cache.staleness=0", "cache.prefetch_depth=0"))
SYNCHRONOUS = Variant("bsp", "-", ("cache.consistency=bsp", "cache.fraction=0.1"))


def variants(bounds: Sequence[int]) -> list[Variant]:
    found = [NO_CACHE, SYNCHRONOUS]
    for clock in CLOCKS:
        for s in bounds:
            words = ("cache.fraction=0.1", f"cache.staleness={s}", f"store.clock={clock}")
            found.append(Variant(f"HET s={s:,}", clock, words))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    names = list(dict.fromkeys(variant.name for variant in variants(BOUNDS)))
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="variants, by name")
    parser.add_argument("--rows", type=int, default=2_500_000, help="generated rows; 80 % of them train")
    parser.add_argument("--data", type=Path, default=ROOT / "data/synthetic", help="where the rows are kept")
    parser.add_argument("--json", type=Path, help="write the table there too")
    parser.add_argument("--plot", type=Path, help="draw AUC over s there (png)")
    parser.add_argument("--runs", type=Path, help="keep finished runs there (JSON lines), and go on after them")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does everything run?")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rows, arguments.seeds = 4_000, arguments.seeds[:1]
    data = (f"data.rows={arguments.rows}", f"data.path={arguments.data}", "data.scale=0.01", "data.batch_size=1024")
    bounds = QUICK_BOUNDS if arguments.quick else BOUNDS
    chosen = [v for v in variants(bounds) if v.name in {NO_CACHE.name, *arguments.only}]
    runs = [(seed, variant) for seed in arguments.seeds for variant in chosen]
    found: dict[Variant, list[dict[str, float]]] = {}
    best = 0.0
    lines = arguments.runs.read_text().splitlines() if arguments.runs and arguments.runs.exists() else []
    finished = {tuple(run["run"]): (run["figures"], run["best"]) for run in map(json.loads, lines)}
    # Seeds outermost: whatever changes on the machine meanwhile meets all variants.
    for seed, variant in track(runs, description="runs", transient=True):
        name = (variant.name, variant.clock, seed, arguments.rows)
        if name not in finished:
            finished[name] = train(variant, seed, data)
            if arguments.runs is not None:
                line = {"run": name, "figures": finished[name][0], "best": finished[name][1]}
                with arguments.runs.open("a") as file:
                    file.write(json.dumps(line) + "\n")
        figures, best = finished[name]
        found.setdefault(variant, []).append(figures)
    rows = list(table(found))
    rows.append(dict.fromkeys(rows[0]) | {"variant": BEST, "clock": "-", "test AUC": f"{best:.5f}"})
    title = f"Test AUC over staleness, DeepFM, {arguments.rows:,} rows, two ranks, {len(arguments.seeds)} seeds"
    settings = {"quick": arguments.quick, "seeds": arguments.seeds, "rows": arguments.rows}
    report_all({title: rows}, arguments.json, settings)
    if arguments.plot is not None:
        plot(rows, arguments.plot)


def train(variant: Variant, seed: int, data: Sequence[str]) -> tuple[dict[str, float], float]:
    """One run of the command line; its summary, and the best AUC that its data allow.

    Raises:
        RuntimeError: the run failed; its last lines.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, str(ROOT / "train.py"), "model=deepfm", "data=synthetic", *data, *variant.words),
            *("trainer.devices=2", "trainer.accelerator=cpu", f"trainer.default_root_dir={folder}"),
            *(f"seed_everything={seed}", f"data.seed={seed}", "trainer.enable_progress_bar=false"),
            *("trainer.limit_val_batches=0", "trainer.enable_checkpointing=false"),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=TIMEOUT_S, check=False
        )
        summaries = list(Path(folder).rglob("summary.json"))
        if done.returncode != 0 or len(summaries) != 1:
            said = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
            raise RuntimeError(f"{' '.join(command)} ended with exit code {done.returncode}:\n{said}")
        figures = {k: v if v is not None else float("nan") for k, v in json.loads(summaries[0].read_text()).items()}
    said = done.stdout + done.stderr
    return figures, float(said.replace("\n", " ").split("best reachable AUC is ")[1].split(",")[0])


def table(found: Mapping[Variant, Sequence[Mapping[str, float]]]) -> Iterator[dict[str, Any]]:
    for variant, runs in found.items():
        aucs = [run["test_auc"] for run in runs]
        # The same seeds without a cache: what differs is staleness, not the seed.
        against = [a - b["test_auc"] for a, b in zip(aucs, found[NO_CACHE], strict=True)]
        yield {
            "variant": variant.name,
            "clock": variant.clock,
            "test AUC": f"{mean(aucs):.5f}",
            "sd": f"{stdev(aucs):.5f}" if len(aucs) > 1 else None,
            "minus no cache": f"{mean(against):+.5f}",
            "its sd": f"{stdev(against):.5f}" if len(against) > 1 else None,
            "log loss": f"{mean(run['test_logloss'] for run in runs):.5f}",
            "observed p50": worst(runs, "staleness_p50"),
            "observed p99": worst(runs, "staleness_p99"),
            "hit rate": mean(run["hit_rate"] for run in runs),
            "MB a step": mean(run["bytes_per_step"] for run in runs) / 1e6,
            "samples/s": round(mean(run["samples_per_s"] for run in runs)),
        }


def worst(runs: Sequence[Mapping[str, float]], name: str) -> int | None:
    values = [int(run[name]) for run in runs if name in run]
    return max(values) if values else None


def plot(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """AUC over s, a line a clock rule, with the spread of the seeds; no cache, bsp and the best as level lines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for clock, colour in zip(CLOCKS, ("C0", "C1"), strict=True):
        mine = [row for row in rows if row["clock"] == clock]
        y, spread = [float(row["test AUC"]) for row in mine], [float(row["sd"] or 0) for row in mine]
        axes.errorbar(range(len(mine)), y, spread, color=colour, marker="o", capsize=4, label=f"HET, clock {clock}")
    levels = {row["variant"]: float(row["test AUC"]) for row in rows if row["clock"] == "-"}
    for (name, level), style in zip(levels.items(), ("--", "-.", ":"), strict=False):
        axes.axhline(level, color="0.4", linestyle=style, linewidth=1, label=f"{name} ({level:.4f})")
    axes.set_xticks(range(len(mine)), [row["variant"].removeprefix("HET s=") for row in mine])
    axes.set_xlabel("staleness bound s")
    axes.set_ylabel("test AUC (mean and standard deviation over seeds)")
    axes.legend(fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)


if __name__ == "__main__":
    main()
