"""Every benchmark runs in its smallest form and reports every variant. No time is asserted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PEERS = {"ps-lite, no cache", "HET's client, no cache", "HET's cache, s=0", "HET's cache, s=100"}


def _run(script: Path, folder: Path, *arguments: str) -> dict[str, Any]:
    file = folder / "figures.json"
    command = [sys.executable, str(script), "--quick", "--json", str(file), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(file.read_text())
    assert set(figures) == {"machine", "settings", "tables"}
    assert figures["machine"]["cores"] == os.cpu_count()
    for table in figures["tables"]:
        assert table["title"] in done.stdout
        columns = set(table["rows"][0])
        assert all(set(row) == columns for row in table["rows"])
    return figures


def _needs_hosts() -> None:
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("network namespaces need root and iproute2")


def test_store_rows_and_bytes_a_second(benchmarks: Path, tmp_path: Path) -> None:
    table, loopback = _run(benchmarks / "store.py", tmp_path, "--parts", "table", "loopback")["tables"]
    assert [row["D"] for row in table["rows"]] == [16, 128]
    assert all(row["million rows/s fetched"] > 0 and row["pushed"] > 0 for row in table["rows"])
    every = {(d, rows, call) for d in (16, 128) for rows in ("fp32", "fp16") for call in ("fetch", "push")}
    assert {(row["D"], row["rows"], row["call"]) for row in loopback["rows"]} == every
    for row in loopback["rows"]:
        assert row["million rows/s"] > 0
        assert row["GB/s"] > 0
        assert (row["iperf3 GB/s"] is None) == (shutil.which("iperf3") is None)


def test_step_under_torchrec(benchmarks: Path, tmp_path: Path) -> None:
    (table,) = _run(benchmarks / "torchrec_step.py", tmp_path)["tables"]
    assert [(row["D"], row["layout"]) for row in table["rows"]] == [
        (dim, layout) for dim in (16, 128) for layout in ("one table", "26 tables")
    ]
    assert all(row["ratio"] > 0 and row["TorchRec ms"] > 0 for row in table["rows"])


def test_small_caches_of_node_embeddings(benchmarks: Path, tmp_path: Path) -> None:
    plot = tmp_path / "misses.png"
    nowhere = ["--facebook", str(tmp_path)]
    (table,) = _run(benchmarks / "graph_cache.py", tmp_path, *nowhere, "--plot", str(plot))["tables"]
    assert [(row["fan-outs"], row["cached %"]) for row in table["rows"]] == [
        (fanouts, cached) for fanouts in ("2, 2", "10, 10") for cached in (3, 5, 10, 15)
    ]
    assert all(0 < row[f"{policy} miss %"] <= 100 for row in table["rows"] for policy in ("lru", "lfu", "lookahead"))
    assert plot.stat().st_size > 10_000


def test_auc_over_staleness(benchmarks: Path, tmp_path: Path) -> None:
    plot = tmp_path / "auc.png"
    (table,) = _run(benchmarks / "staleness.py", tmp_path, "--data", str(tmp_path), "--plot", str(plot))["tables"]
    *runs, best = table["rows"]
    assert [(row["variant"], row["clock"]) for row in runs] == [
        ("no cache", "-"),
        ("bsp", "-"),
        ("HET s=10", "lamport"),
        ("HET s=10", "sum"),
    ]
    assert runs[0]["minus no cache"] == "+0.00000"
    assert all(0.4 < float(row["test AUC"]) < float(best["test AUC"]) < 1 for row in runs)
    assert plot.stat().st_size > 10_000


def test_store_latency(benchmarks: Path, tmp_path: Path) -> None:
    (latency,) = _run(benchmarks / "store.py", tmp_path, "--parts", "latency")["tables"]
    assert [row["clients"] for row in latency["rows"]] == [1, 4, 16]
    assert all(0 < row["median"] <= row["p99"] for row in latency["rows"])


def test_store_key_stream(benchmarks: Path, tmp_path: Path) -> None:
    _needs_hosts()
    (stream,) = _run(benchmarks / "store.py", tmp_path, "--parts", "stream")["tables"]
    clients = {"hetrec, fp32", "hetrec, fp16", "hetrec, int8 out, fp16 in", *PEERS}
    every = {(d, link, client) for d in (16, 128) for link in ("plain", "1 Gbit/s") for client in clients}
    assert {(row["D"], row["link"], row["client"]) for row in stream["rows"]} == every
    ours = {(row["D"], row["client"]): row for row in stream["rows"] if row["hit rate"] is not None}
    assert all(0 < row["hit rate"] < 1 and row["MB"] > 0 for row in ours.values())
    assert ours[128, "hetrec, fp16"]["MB"] < 0.7 * ours[128, "hetrec, fp32"]["MB"]


def test_one_gigabit(benchmarks: Path, tmp_path: Path) -> None:
    _needs_hosts()
    plot = tmp_path / "plot.png"
    figures = _run(benchmarks / "one_gigabit.py", tmp_path, "--plot", str(plot))
    (table,) = figures["tables"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    rows = {(row["D"], row["variant"]): row for row in table["rows"]}
    variants = {
        "no network",
        "no network, both cores busy",
        "TorchRec, its planner",
        "TorchRec, table-wise",
        "HET s=100, fp16, 16 known",
        "HET s=100, fp16, dense bf16",
        "HET s=100, fp16, stock DDP",
        *(f"HET s={s}, {codec}" for s in (0, 10, 100) for codec in ("fp32", "fp16")),
        *(f"no cache, {codec}{way}" for way in ("", ", overlapped") for codec in ("fp32", "fp16")),
    }
    assert set(rows) == {(d, variant) for d in (16, 128) for variant in variants}
    for (_, variant), row in rows.items():
        assert 0 < row["fastest"] <= row["ms"] <= row["slowest"]
        moved = row["MB out"] + row["MB in"]
        assert (moved < 0.01) == variant.startswith("no network")
        if variant.startswith("no cache"):
            assert row["hit rate"] == 0
        if variant.startswith(("HET s=10", "HET s=100")):
            assert 0 < row["hit rate"] < 1
    assert rows[128, "HET s=100, fp16"]["rows MB"] < rows[128, "no cache, fp16"]["rows MB"]
    assert rows[128, "no cache, fp16"]["rows MB"] < rows[128, "no cache, fp32"]["rows MB"]
    ways = [{how.split()[0] for how in plan["plan"].values()} for plan in figures["settings"]["plans"]]
    assert {"table_wise"} in ways


def test_policies(benchmarks: Path, tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    (table,) = _run(benchmarks / "policies.py", tmp_path, "--plot", str(plot))["tables"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    rows = {row["policy"]: row for row in table["rows"]}
    ahead = {f"lookahead, {depth} batches" for depth in (4, 16, 64)}
    assert set(rows) == {"lru", "lfu", "light_lfu", "tiny_lfu", "Belady", *ahead}
    assert all(rows["Belady"]["miss %"] <= row["miss %"] < 100 for row in rows.values())
    assert all((row["reveal ns/row"] is not None) == (name in ahead) for name, row in rows.items())


def test_neighbour_sampling(benchmarks: Path, tmp_path: Path) -> None:
    figures = _run(benchmarks / "sampling.py", tmp_path, "--facebook", str(tmp_path / "absent"))
    assert figures["settings"]["facebook"] is False
    (table,) = figures["tables"]
    assert [(row["graph"], row["seeds"]) for row in table["rows"]] == [("synthetic, 3,000", n) for n in (128, 1024)]
    for row in table["rows"]:
        assert row["seeds"] < row["nodes a batch"] <= 3000
        assert row["edges a batch"] > 3 * row["seeds"]
        assert row["million edges/s"] > 0
        assert row["as batches"] > 0


def test_cache_ops_help_names_its_options(benchmarks: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(benchmarks / "cache_ops.py"), "--help"], capture_output=True, text=True, check=True
    )
    assert "--json" in done.stdout
    assert "--batches" in done.stdout
