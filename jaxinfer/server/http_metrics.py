"""Counts of HTTP responses, by method, status class and route. Knows nothing of the engine."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram

_HTTP_S = (0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0)


class HttpMetrics:
    """Counts responses by method, status class and route.

    Args:
        registry: Where the series live.
        routes: The (method, route) pairs that exist, so that each starts at 0.
    """

    OTHER = "other"

    def __init__(self, registry: CollectorRegistry, routes: Iterable[tuple[str, str]]):
        self._known = frozenset(routes)
        self._requests = Counter(
            "http_requests", "Responses.", ("method", "status", "handler"), registry=registry
        )
        self._duration = Histogram(
            "http_request_duration_seconds",
            "Request to end of response.",
            ("method", "handler"),
            registry=registry,
            buckets=_HTTP_S,
        )
        for method, route in (*sorted(self._known), (self.OTHER, self.OTHER)):
            self._duration.labels(method, route)
            for status in ("2xx", "4xx", "5xx"):
                self._requests.labels(method, status, route)

    def observe(self, method: str, route: str, status: int, duration_s: float) -> None:
        """Count one response. Unknown methods and paths share a label: clients choose them."""
        if (method, route) not in self._known:
            method = route = self.OTHER
        self._requests.labels(method, f"{status // 100}xx", route).inc()
        self._duration.labels(method, route).observe(duration_s)
