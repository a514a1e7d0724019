"""``hetrec-ps``: start, serve, stop."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version

import pyarrow as pa

from cache_backend._table import keep_freed_memory
from cache_backend.server.errors import StorageError
from cache_backend.server.lifecycle import Stop, stop_with_parent
from cache_backend.server.limits import Streams
from cache_backend.server.metrics import Metrics
from cache_backend.server.options import Options, parse
from cache_backend.server.security import check_bind_rule
from cache_backend.server.service import Service
from cache_backend.server.shard import Shard
from cache_backend.server.storage import ExitSnapshot, LogStorage

__all__ = ["main"]

_DRAIN_S = 10.0
_CLOSE_S = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until told to stop. Returns the exit status: 0 after a clean stop, 1 where the server could not go on."""
    options = parse(arguments)
    try:
        return _serve(options)
    except (StorageError, ValueError, OSError, pa.ArrowException) as error:
        print(f"hetrec-ps: {error}", file=sys.stderr)
        return 1


def _serve(options: Options) -> int:
    keep_freed_memory()
    check_bind_rule(options)
    _check_port_is_free(options.host, options.port)
    stop = Stop()
    stop.on_signals(signal.SIGTERM, signal.SIGINT)
    if options.exit_with_stdin:
        stop_with_parent(stop)
    metrics = Metrics()
    streams = Streams(options.max_streams, options.max_streams_per_client)
    shard = Shard(
        options.shard, options.shards, options.clock, _generation(), options.max_rows, options.max_message_bytes
    )
    failures: list[OSError] = []

    def on_failure(error: OSError) -> None:
        print(f"hetrec-ps: the log cannot be written, stopping: {error}", file=sys.stderr, flush=True)
        failures.append(error)
        stop.set()

    storage = _open_storage(options, shard, metrics, on_failure)
    metrics.watch(lambda: _gauges(shard, streams, storage))
    service = Service(options, shard, streams, metrics, _release())
    scheme, _, rest = options.listen.partition("://")
    address = f"{scheme}://{rest.rpartition(':')[0]}:{service.port}"
    if options.metrics_port is not None:
        _, metrics_port = metrics.serve(options.host, options.metrics_port)
        print(f"hetrec-ps: metrics on http://{options.host}:{metrics_port}/metrics", file=sys.stderr, flush=True)
    print(f"hetrec-ps: shard {shard.index}/{shard.count} serving on {address}", flush=True)
    stop.wait()
    shard.rounds.stop()
    streams.drain(_DRAIN_S)
    status = 1 if failures else 0
    if storage is not None and not failures:
        storage.close(options.snapshot_on_exit)
    _close(service, status)
    return status


def _open_storage(
    options: Options, shard: Shard, metrics: Metrics, on_failure: Callable[[OSError], None]
) -> LogStorage | ExitSnapshot | None:
    if options.data is None:
        return None
    if options.durability == "log":
        return LogStorage(options.data, shard, options.compact_bytes, metrics.synced, on_failure)
    return ExitSnapshot(options.data, shard)


def _gauges(shard: Shard, streams: Streams, storage: LogStorage | ExitSnapshot | None) -> dict[str, tuple[str, float]]:
    stats = shard.stats()
    return {
        "rows": ("Rows held", stats["rows"]),
        "memory_bytes": ("What rows and their index take", stats["memory_bytes"]),
        "rows_left_out": ("Pushes and steps left out: the row would have become NaN or infinite", stats["left_out"]),
        "sessions": ("Client processes whose requests are remembered", stats["sessions"]),
        "streams": ("Calls under way", streams.under_way),
        "log_bytes": ("Log since its last snapshot", storage.log_bytes if isinstance(storage, LogStorage) else 0),
    }


def _close(service: Service, status: int) -> None:
    # Flight waits for open streams, and a client may hold one open for ever.
    closing = threading.Thread(target=service.shutdown, daemon=True)
    closing.start()
    closing.join(_CLOSE_S)
    if closing.is_alive():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _check_port_is_free(host: str, port: int) -> None:
    """gRPC shares a port with a server that is there already, and each would get some of the clients."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from None


def _generation() -> int:
    return secrets.randbits(62) + 1


def _release() -> str:
    try:
        return version("hetrec")
    except PackageNotFoundError:  # run from a checkout
        return "unknown"
