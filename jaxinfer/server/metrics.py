"""What `/metrics` shows, under vLLM's names, so that its dashboards and autoscalers work here.

Counters and gauges of the engine are read from `EngineStats` at scrape time; latencies come in
through `RequestObserver`. Every label value exists at 0 from the start, or `rate()` would miss the
first event.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from jaxinfer.async_engine import AsyncEngine
from jaxinfer.metrics import RequestRecord
from jaxinfer.request import FinishReason

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABELS = ("model_name", "engine")
# One engine per server; dashboards group by the label all the same.
ENGINE = "0"

# vLLM's edges, with finer ones below them: a small model on a fast device would fill one bucket.
_TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_ITL_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0),
    *(20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_HTTP_S = (0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0)
_N = (1, 2, 5, 10, 20)


@dataclass(frozen=True, kw_only=True)
class _Series:
    """One field of `EngineStats` as a Prometheus series."""

    field: str
    name: str
    counter: bool
    doc: str


def _gauge(field: str, name: str, doc: str) -> _Series:
    return _Series(field=field, name=name, counter=False, doc=doc)


def _counter(field: str, name: str, doc: str) -> _Series:
    return _Series(field=field, name=name, counter=True, doc=doc)


# `EngineStats.finished` has a label of its own and is added in `_EngineCollector`.
ENGINE_SERIES = (
    _gauge("num_requests_running", "vllm:num_requests_running", "Sequences that hold pages."),
    _gauge("num_requests_waiting", "vllm:num_requests_waiting", "Sequences that wait."),
    _gauge("kv_cache_usage", "vllm:kv_cache_usage_perc", "Share of KV pages in use, 0 to 1."),
    _counter("num_preemptions", "vllm:num_preemptions", "Sequences that lost their pages."),
    _counter("prefix_cache_queries", "vllm:prefix_cache_queries", "Prompt tokens looked up."),
    _counter("prefix_cache_hits", "vllm:prefix_cache_hits", "Prompt tokens found."),
    _counter("prompt_tokens", "vllm:prompt_tokens", "Prompt tokens of admitted sequences."),
    _counter("generation_tokens", "vllm:generation_tokens", "Tokens produced."),
    _counter("num_corrupted_requests", "vllm:corrupted_requests", "Ended by NaN logits."),
    _gauge("num_pages", "jaxinfer_pages", "KV pages in the pool."),
    _gauge("num_pages_used", "jaxinfer_pages_used", "KV pages that sequences hold."),
    _gauge("num_pages_cached", "jaxinfer_pages_cached", "KV pages held for reuse only."),
    _counter("num_steps", "jaxinfer_steps", "Engine steps."),
    _counter(
        "num_multi_steps", "jaxinfer_multi_steps", "Engine steps of several tokens per request."
    ),
    _counter("compilations_total", "jaxinfer_compilations", "Graphs compiled."),
    _gauge("compilations_pending", "jaxinfer_compilations_pending", "Graphs still to be compiled."),
    _counter(
        "compilations_after_warmup",
        "jaxinfer_compilations_after_warmup",
        "Graphs compiled while serving; anything but 0 is a defect.",
    ),
)


class ServerMetrics:
    """The series of one server, in a registry of their own. Hears of requests as `RequestObserver`.

    Args:
        registry: Where the series live.
        model_name: The label of all `vllm:` series.
        max_model_len: Upper end of the token buckets.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str, max_model_len: int):
        self._registry = registry
        self._labels = (model_name, ENGINE)
        tokens = tuple(_one_two_five(max_model_len))
        self._ttft = self._histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token.", _TTFT_S
        )
        self._itl = self._histogram(
            "vllm:inter_token_latency_seconds", "Gap between tokens.", _ITL_S
        )
        self._itl_old = self._histogram(
            "vllm:time_per_output_token_seconds", "Old name of inter_token_latency.", _ITL_S
        )
        self._tpot = self._histogram(
            "vllm:request_time_per_output_token_seconds", "A request's mean gap.", _ITL_S
        )
        self._e2e = self._histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to end.", _REQUEST_S
        )
        self._queue = self._histogram(
            "vllm:request_queue_time_seconds", "Arrival to first scheduling.", _REQUEST_S
        )
        self._prefill = self._histogram(
            "vllm:request_prefill_time_seconds", "First scheduling to first token.", _REQUEST_S
        )
        self._decode = self._histogram(
            "vllm:request_decode_time_seconds", "First token to last.", _REQUEST_S
        )
        self._inference = self._histogram(
            "vllm:request_inference_time_seconds", "First scheduling to last token.", _REQUEST_S
        )
        self._prompt_tokens = self._histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a request.", tokens
        )
        self._computed_tokens = self._histogram(
            "vllm:request_prefill_kv_computed_tokens", "Those not found in the cache.", tokens
        )
        self._generation_tokens = self._histogram(
            "vllm:request_generation_tokens", "Tokens of a sample.", tokens
        )
        self._max_generation_tokens = self._histogram(
            "vllm:request_max_num_generation_tokens", "Tokens of the longest sample.", tokens
        )
        self._params_max_tokens = self._histogram(
            "vllm:request_params_max_tokens", "max_tokens of a request.", tokens
        )
        self._params_n = self._histogram("vllm:request_params_n", "n of a request.", _N)
        self._cached = Counter(
            "vllm:prompt_tokens_cached", "Cached prompt tokens.", LABELS, registry=registry
        ).labels(*self._labels)
        by_source = Counter(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens of ended requests, by where their keys and values came from.",
            (*LABELS, "source"),
            registry=registry,
        )
        self._local_compute = by_source.labels(*self._labels, "local_compute")
        self._local_cache_hit = by_source.labels(*self._labels, "local_cache_hit")

    def watch(self, engine: AsyncEngine) -> None:
        """Show the engine's counters from now on."""
        self._registry.register(_EngineCollector(engine, self._labels))
        info = {
            "block_size": engine.config.page_size,
            "num_gpu_blocks": engine.config.num_pages or engine.stats.num_pages,
            "cache_dtype": engine.config.dtype,
            "enable_prefix_caching": engine.config.enable_prefix_caching,
            "max_model_len": engine.max_model_len,
        }
        gauge = Gauge(
            "vllm:cache_config_info",
            "The configuration, as labels.",
            (*LABELS, *info),
            registry=self._registry,
        )
        gauge.labels(*self._labels, *map(str, info.values())).set(1)

    def on_params(self, max_tokens: int) -> None:
        """Count what a request asks for."""
        self._params_max_tokens.observe(max_tokens)

    def on_first_token(self, ttft_s: float) -> None:
        """See `jaxinfer.metrics.RequestObserver`."""
        self._ttft.observe(ttft_s)

    def on_next_tokens(self, num_tokens: int, interval_s: float) -> None:
        """See `jaxinfer.metrics.RequestObserver`. Tokens that come together share the gap."""
        for _ in range(num_tokens):
            self._itl.observe(interval_s / num_tokens)
            self._itl_old.observe(interval_s / num_tokens)

    def on_finished(self, record: RequestRecord) -> None:
        """See `jaxinfer.metrics.RequestObserver`."""
        num_computed = record.num_prompt_tokens - record.num_cached_tokens
        longest = max(record.num_generation_tokens, default=0)
        self._e2e.observe(record.e2e_s)
        for histogram, value in (
            (self._queue, record.queue_s),
            (self._prefill, record.prefill_s),
            (self._decode, record.decode_s),
        ):
            if value is not None:
                histogram.observe(value)
        if record.prefill_s is not None and record.decode_s is not None:
            self._inference.observe(record.prefill_s + record.decode_s)
        if record.decode_s is not None and longest > 1:
            self._tpot.observe(record.decode_s / (longest - 1))
        self._prompt_tokens.observe(record.num_prompt_tokens)
        self._computed_tokens.observe(num_computed)
        for num_tokens in record.num_generation_tokens:
            self._generation_tokens.observe(num_tokens)
        self._max_generation_tokens.observe(longest)
        self._params_n.observe(len(record.num_generation_tokens))
        self._cached.inc(record.num_cached_tokens)
        self._local_compute.inc(num_computed)
        self._local_cache_hit.inc(record.num_cached_tokens)

    def _histogram(self, name: str, doc: str, buckets: Iterable[float]) -> Histogram:
        histogram = Histogram(
            name, doc, LABELS, registry=self._registry, buckets=tuple(map(float, buckets))
        )
        return histogram.labels(*self._labels)


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


def new_registry() -> CollectorRegistry:
    """Return a registry that knows this process (memory, CPU time, open files) and nothing else."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


def render(registry: CollectorRegistry) -> bytes:
    """Return all series in the text format."""
    return generate_latest(registry)


class _EngineCollector(Collector):
    """Reads `EngineStats` when scraped, so the engine thread counts in plain integers."""

    def __init__(self, engine: AsyncEngine, labels: tuple[str, str]):
        self._engine = engine
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        for series in ENGINE_SERIES:
            family = CounterMetricFamily if series.counter else GaugeMetricFamily
            metric = family(series.name, series.doc, labels=LABELS)
            metric.add_metric(self._labels, getattr(stats, series.field))
            yield metric
        waiting = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Sequences that wait.",
            labels=(*LABELS, "reason"),
        )
        waiting.add_metric((*self._labels, "capacity"), stats.num_requests_waiting)
        waiting.add_metric((*self._labels, "deferred"), 0)
        yield waiting
        finished = CounterMetricFamily(
            "vllm:request_success", "Sequences that ended.", labels=(*LABELS, "finished_reason")
        )
        for reason in FinishReason:
            count = stats.finished.get(reason.value, 0)
            finished.add_metric((*self._labels, reason.value), count)
        yield finished
        alive = GaugeMetricFamily("jaxinfer_engine_alive", "1 while it serves.", labels=LABELS)
        alive.add_metric(self._labels, float(self._engine.is_alive))
        yield alive


def _one_two_five(most: int) -> Iterator[int]:
    """Yield 1, 2, 5, 10, 20, 50, … up to `most`."""
    scale = 1
    while True:
        for digit in (1, 2, 5):
            if digit * scale > most:
                return
            yield digit * scale
        scale *= 10
