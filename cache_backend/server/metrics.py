"""What the server counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Callable
    from http.server import HTTPServer

    from prometheus_client.metrics_core import Metric

    from cache_backend.server.shard import Exchanged

__all__ = ["Metrics"]

_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
# Where a reply says how much it holds (PROTOCOL.md).
_REPLY_WRITTEN, _REPLY_STALE = slice(24, 28), slice(28, 32)


class Metrics:
    """Counters of one server. Every name begins with ``hetrec_``."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"hetrec_{name}", text, labels, registry=self.registry)

        self._requests = counter("requests", "Calls, by kind: exchange, or the action's name", ("kind",))
        self._errors = counter("errors", "Calls turned away or failed, by kind", ("kind",))
        self._pushed = counter("rows_pushed", "Rows pushed and applied")
        self._checked = counter("rows_checked", "Validity checks answered")
        self._stale = counter("rows_stale", "Checks that failed: the row was sent again")
        self._fetched = counter("rows_fetched", "Rows asked for")
        self._fresh = counter("rows_fresh", "Rows asked for that nobody has written: only a flag was sent")
        self._duplicates = counter("duplicates_skipped", "Requests that came again: answered, not applied")
        self._received = counter("received_bytes", "Frames received")
        self._sent = counter("sent_bytes", "Frames sent")
        self._seconds = Histogram(
            "hetrec_exchange_seconds",
            "From a whole request to its reply",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._syncs = Histogram(
            "hetrec_log_sync_seconds", "One write and fsync of the log", buckets=_SECONDS, registry=self.registry
        )
        self._logged = counter("log_written_bytes", "Written to the log")

    def request(self, kind: str) -> None:
        self._requests.labels(kind).inc()

    def error(self, kind: str) -> None:
        self._errors.labels(kind).inc()

    def exchanged(self, done: Exchanged, received: int, seconds: float) -> None:
        written = int.from_bytes(done.reply[_REPLY_WRITTEN].tobytes(), "little")
        stale = int.from_bytes(done.reply[_REPLY_STALE].tobytes(), "little")
        self._requests.labels("exchange").inc()
        if done.duplicate:
            self._duplicates.inc()
        else:
            self._pushed.inc(done.pushes)
        self._checked.inc(done.checks)
        self._stale.inc(stale)
        self._fetched.inc(done.fetches)
        self._fresh.inc(done.fetches - written)
        self._received.inc(received)
        self._sent.inc(done.reply.nbytes)
        self._seconds.observe(seconds)

    def synced(self, seconds: float, written: int) -> None:
        self._syncs.observe(seconds)
        self._logged.inc(written)

    def watch(self, gauges: Callable[[], dict[str, tuple[str, float]]]) -> None:
        """Gauges read at each scrape: name -> (help, value)."""

        class Gauges:
            def collect(self) -> Iterable[Metric]:
                for name, (text, value) in gauges().items():
                    yield GaugeMetricFamily(f"hetrec_{name}", text, value)

        self.registry.register(Gauges())

    def serve(self, host: str, port: int) -> tuple[HTTPServer, int]:
        """Answer scrapes on a thread of their own; returns the server and its port."""
        server, _ = start_http_server(port, host, self.registry)
        return server, server.server_port
