"""What a server counts, in the form that Prometheus reads."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

_PREFIX = "headrace_serve"
CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class ServerMetrics:
    """Counters and histograms of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        common: dict[str, Any] = {"labelnames": ("model", "version"), "registry": self.registry}
        by_code = {**common, "labelnames": ("model", "version", "code")}
        self.requests = Counter(f"{_PREFIX}_requests", "Requests for predictions, by status.", **by_code)
        self.seconds = Histogram(
            f"{_PREFIX}_request_seconds", "From a request to its answer.", buckets=_SECONDS, **common
        )
        self.batch = Histogram(f"{_PREFIX}_batch_examples", "Examples computed together.", buckets=_ROWS, **common)
        self.compute = Histogram(f"{_PREFIX}_compute_seconds", "Of one batch.", buckets=_SECONDS, **common)
        self.not_finite = Counter(f"{_PREFIX}_not_finite", "Requests with NaN or infinity.", **common)
        self.queue = Gauge(f"{_PREFIX}_queue_requests", "Requests that wait.", **common)
        self.loaded = Gauge(f"{_PREFIX}_loaded", "1 for each version that answers.", **common)

    def forget(self, name: str, version: str) -> None:
        """Leaves out the gauges of a version that is gone."""
        for gauge in (self.queue, self.loaded):
            gauge.remove(name, version)

    def text(self) -> bytes:
        """Returns all of them."""
        return generate_latest(self.registry)
