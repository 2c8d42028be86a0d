"""What `/metrics` shows, under vLLM's names, so that its dashboards and autoscalers work here.

Counters and gauges of the engine are read from `EngineStats` at scrape time; latencies come in
through `RequestObserver`. Every label value exists at 0 from the start, or `rate()` would miss the
first event.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import generate_latest

from jaxinfer.async_engine import AsyncEngine
from jaxinfer.metrics import RequestRecord
from jaxinfer.server.engine_metrics import LABELS, VLLM, EngineCollector, prefixed

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
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


# What is observed of each engine's requests, by attribute: name, help text, edges (None: tokens).
_HISTOGRAMS: dict[str, tuple[str, str, tuple[float, ...] | None]] = {
    "ttft": ("vllm:time_to_first_token_seconds", "Arrival to first token.", _TTFT_S),
    "itl": ("vllm:inter_token_latency_seconds", "Gap between tokens.", _ITL_S),
    "itl_old": (
        "vllm:time_per_output_token_seconds",
        "Old name of inter_token_latency.",
        _ITL_S,
    ),
    "tpot": ("vllm:request_time_per_output_token_seconds", "A request's mean gap.", _ITL_S),
    "e2e": ("vllm:e2e_request_latency_seconds", "Arrival to end.", _REQUEST_S),
    "queue": ("vllm:request_queue_time_seconds", "Arrival to first scheduling.", _REQUEST_S),
    "prefill": (
        "vllm:request_prefill_time_seconds",
        "First scheduling to first token.",
        _REQUEST_S,
    ),
    "decode": ("vllm:request_decode_time_seconds", "First token to last.", _REQUEST_S),
    "inference": (
        "vllm:request_inference_time_seconds",
        "First scheduling to last token.",
        _REQUEST_S,
    ),
    "prompt_tokens": ("vllm:request_prompt_tokens", "Prompt tokens of a request.", None),
    "computed_tokens": (
        "vllm:request_prefill_kv_computed_tokens",
        "Those not found in the cache.",
        None,
    ),
    "generation_tokens": ("vllm:request_generation_tokens", "Tokens of a sample.", None),
    "max_generation_tokens": (
        "vllm:request_max_num_generation_tokens",
        "Tokens of the longest sample.",
        None,
    ),
    "params_max_tokens": ("vllm:request_params_max_tokens", "max_tokens of a request.", None),
    "params_n": ("vllm:request_params_n", "n of a request.", _N),
}


class ServerMetrics:
    """The series of one server, in a registry of their own.

    Args:
        registry: Where the series live.
        model_name: The label of all series but HTTP's.
        max_model_len: Upper end of the token buckets.
        prefix: In front of vLLM's names, instead of theirs.
        num_engines: Each has a label of its own: "0", "1", …; a dashboard sums over them.

    Attributes:
        observers: To each engine's requests.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        model_name: str,
        max_model_len: int,
        *,
        prefix: str = VLLM,
        num_engines: int = 1,
    ):
        self._registry = registry
        self._prefix = prefix
        self._labels = [(model_name, str(engine)) for engine in range(num_engines)]
        tokens = tuple(_one_two_five(max_model_len))
        histograms = {
            key: Histogram(
                prefixed(name, prefix),
                doc,
                LABELS,
                registry=registry,
                buckets=tuple(map(float, tokens if edges is None else edges)),
            )
            for key, (name, doc, edges) in _HISTOGRAMS.items()
        }
        cached = Counter(
            prefixed("vllm:prompt_tokens_cached", prefix),
            "Cached prompt tokens.",
            LABELS,
            registry=registry,
        )
        by_source = Counter(
            prefixed("vllm:prompt_tokens_by_source", prefix),
            "Prompt tokens of ended requests, by where their keys and values came from.",
            (*LABELS, "source"),
            registry=registry,
        )
        self.observers = tuple(
            EngineObserver(histograms, cached, by_source, labels) for labels in self._labels
        )

    def watch(self, engines: Sequence[AsyncEngine]) -> None:
        """Show the engines' counters from now on."""
        self._registry.register(EngineCollector(engines, self._labels, self._prefix))
        gauge: Gauge | None = None
        for engine, labels in zip(engines, self._labels, strict=True):
            info = {
                "block_size": engine.config.page_size,
                "num_gpu_blocks": engine.config.num_pages or engine.stats.num_pages,
                "cache_dtype": engine.config.dtype,
                "enable_prefix_caching": engine.config.enable_prefix_caching,
                "max_model_len": engine.max_model_len,
            }
            gauge = gauge or Gauge(
                prefixed("vllm:cache_config_info", self._prefix),
                "The configuration, as labels.",
                (*LABELS, *info),
                registry=self._registry,
            )
            gauge.labels(*labels, *map(str, info.values())).set(1)

    def on_params(self, max_tokens: int) -> None:
        """Count what a request asks for; who will run it is not known yet."""
        self.observers[0].on_params(max_tokens)


class EngineObserver:
    """Hears of one engine's requests, as `jaxinfer.metrics.RequestObserver` says.

    Args:
        histograms: By the keys of `_HISTOGRAMS`.
        cached: Prompt tokens found in the cache.
        by_source: Prompt tokens by where they came from.
        labels: The engine's.
    """

    def __init__(
        self,
        histograms: Mapping[str, Histogram],
        cached: Counter,
        by_source: Counter,
        labels: tuple[str, str],
    ):
        own = {key: histogram.labels(*labels) for key, histogram in histograms.items()}
        self._ttft, self._tpot, self._e2e = own["ttft"], own["tpot"], own["e2e"]
        self._itl, self._itl_old = own["itl"], own["itl_old"]
        self._queue, self._prefill, self._decode = own["queue"], own["prefill"], own["decode"]
        self._inference = own["inference"]
        self._prompt_tokens = own["prompt_tokens"]
        self._computed_tokens = own["computed_tokens"]
        self._generation_tokens = own["generation_tokens"]
        self._max_generation_tokens = own["max_generation_tokens"]
        self._params_max_tokens, self._params_n = own["params_max_tokens"], own["params_n"]
        self._cached = cached.labels(*labels)
        self._local_compute = by_source.labels(*labels, "local_compute")
        self._local_cache_hit = by_source.labels(*labels, "local_cache_hit")

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
