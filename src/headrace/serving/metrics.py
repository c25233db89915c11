"""What a server counts, in the form that Prometheus reads."""

from __future__ import annotations

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
        own, model = self.registry, ("model", "version")
        self.requests = Counter(
            f"{_PREFIX}_requests", "Requests for predictions, by status.", (*model, "code"), registry=own
        )
        self.seconds = Histogram(
            f"{_PREFIX}_request_seconds", "From a request to its answer.", model, buckets=_SECONDS, registry=own
        )
        self.batch = Histogram(
            f"{_PREFIX}_batch_examples", "Examples computed together.", model, buckets=_ROWS, registry=own
        )
        self.compute = Histogram(f"{_PREFIX}_compute_seconds", "Of one batch.", model, buckets=_SECONDS, registry=own)
        self.not_finite = Counter(f"{_PREFIX}_not_finite", "Requests with NaN or infinity.", model, registry=own)
        self.queue = Gauge(f"{_PREFIX}_queue_requests", "Requests that wait.", model, registry=own)
        self.loaded = Gauge(f"{_PREFIX}_loaded", "1 for each version that answers.", model, registry=own)

    def forget(self, name: str, version: str) -> None:
        """Leaves out the gauges of a version that is gone."""
        for gauge in (self.queue, self.loaded):
            gauge.remove(name, version)

    def text(self) -> bytes:
        """Returns all of them."""
        return generate_latest(self.registry)
