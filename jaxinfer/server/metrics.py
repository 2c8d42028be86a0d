"""What `/metrics` shows, under vLLM's names, so that its dashboards and autoscalers work here.

Counters and gauges of the engine are read from `EngineStats` at scrape time; latencies come in
through `RequestObserver`. Every label value exists at 0 from the start, or `rate()` would miss the
first event.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import generate_latest

from jaxinfer.async_engine import AsyncEngine
from jaxinfer.metrics import RequestRecord
from jaxinfer.server.engine_metrics import LABELS, VLLM, EngineCollector, prefixed

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
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
_N = (1, 2, 5, 10, 20)


class ServerMetrics:
    """The series of one server, in a registry of their own. Hears of requests as `RequestObserver`.

    Args:
        registry: Where the series live.
        model_name: The label of all series but HTTP's.
        max_model_len: Upper end of the token buckets.
        prefix: In front of vLLM's names, instead of theirs.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        model_name: str,
        max_model_len: int,
        *,
        prefix: str = VLLM,
    ):
        self._registry = registry
        self._prefix = prefix
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
            prefixed("vllm:prompt_tokens_cached", prefix),
            "Cached prompt tokens.",
            LABELS,
            registry=registry,
        ).labels(*self._labels)
        by_source = Counter(
            prefixed("vllm:prompt_tokens_by_source", prefix),
            "Prompt tokens of ended requests, by where their keys and values came from.",
            (*LABELS, "source"),
            registry=registry,
        )
        self._local_compute = by_source.labels(*self._labels, "local_compute")
        self._local_cache_hit = by_source.labels(*self._labels, "local_cache_hit")

    def watch(self, engine: AsyncEngine) -> None:
        """Show the engine's counters from now on."""
        self._registry.register(EngineCollector(engine, self._labels, self._prefix))
        info = {
            "block_size": engine.config.page_size,
            "num_gpu_blocks": engine.config.num_pages or engine.stats.num_pages,
            "cache_dtype": engine.config.dtype,
            "enable_prefix_caching": engine.config.enable_prefix_caching,
            "max_model_len": engine.max_model_len,
        }
        gauge = Gauge(
            prefixed("vllm:cache_config_info", self._prefix),
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
            prefixed(name, self._prefix),
            doc,
            LABELS,
            registry=self._registry,
            buckets=tuple(map(float, buckets)),
        )
        return histogram.labels(*self._labels)


def new_registry() -> CollectorRegistry:
    """Return a registry that knows this process (memory, CPU time, open files) and nothing else."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


def render(registry: CollectorRegistry) -> bytes:
    """Return all series in the text format."""
    return generate_latest(registry)


def _one_two_five(most: int) -> Iterator[int]:
    """Yield 1, 2, 5, 10, 20, 50, … up to `most`."""
    scale = 1
    while True:
        for digit in (1, 2, 5):
            if digit * scale > most:
                return
            yield digit * scale
        scale *= 10
