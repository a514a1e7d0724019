"""Metrics over HTTP agree with what a client did."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from prometheus_client.parser import text_string_to_metric_families
from running import Program


def scrape(server: Program) -> dict[str, float]:
    """Sample name, with its label where it has one -> value."""
    url = re.search(r"metrics on (http://\S+)", server.errors)
    with urllib.request.urlopen(url[1], timeout=10) as answer:
        text = answer.read().decode()
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_counts(program: Callable[..., Program], peer, tmp_path: Path) -> None:
    server = program("--metrics-port", "0", "--durability", "log", "--data", str(tmp_path))
    client = peer(server.address)
    client.open()
    frame = client.frame(push=[1, 2, 3], check=[1, 2, 9], fetch=[1, 7, 8], sequence=1)
    (reply,) = client.send(frame)
    client.send(frame)
    with pytest.raises(pa.ArrowInvalid):
        client.send(bytes(frame[:-8]))
    client.act("stats")

    found = scrape(server)
    assert found["hetrec_requests_total exchange"] == 2
    assert found["hetrec_requests_total open"] == 1
    assert found["hetrec_requests_total stats"] == 1
    assert found["hetrec_errors_total invalid"] == 1
    assert found["hetrec_rows_pushed_total"] == 3
    assert found["hetrec_rows_checked_total"] == 6
    assert found["hetrec_rows_stale_total"] == 4
    assert found["hetrec_rows_fetched_total"] == 6
    assert found["hetrec_rows_fresh_total"] == 4
    assert found["hetrec_duplicates_skipped_total"] == 1
    assert found["hetrec_received_bytes_total"] == 2 * len(frame)
    assert found["hetrec_sent_bytes_total"] == 2 * len(reply)
    assert found["hetrec_exchange_seconds_count"] == 2
    assert found["hetrec_exchange_seconds_sum"] > 0
    assert found["hetrec_rows"] == 3
    assert found["hetrec_memory_bytes"] == client.act("stats")["memory_bytes"]
    assert found["hetrec_sessions"] == 1
    assert found["hetrec_log_sync_seconds_count"] >= 2
    (log,) = tmp_path.glob("log-*")
    assert found["hetrec_log_bytes"] == log.stat().st_size
    assert 0 < found["hetrec_log_written_bytes_total"] <= found["hetrec_log_bytes"]
