"""The engine's own counters as Prometheus series, read from `EngineStats` when scraped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from jaxinfer.async_engine import AsyncEngine
from jaxinfer.metrics import TOKENS_PER_STEP, EngineStats
from jaxinfer.request import FinishReason

LABELS = ("model_name", "engine")
VLLM = "vllm"
_VLLM = f"{VLLM}:"


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


# `EngineStats.finished` has a label of its own and `tokens_per_step` is a histogram: both are added
# in `EngineCollector`.
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
    _counter("num_scheduled_tokens", "jaxinfer_step_tokens", "Tokens computed in steps."),
    _counter("num_padding_tokens", "jaxinfer_padding_tokens", "Tokens computed as padding."),
    _counter("num_sampled_rows", "jaxinfer_step_rows", "Rows sampled in steps."),
    _counter("num_padding_rows", "jaxinfer_padding_rows", "Rows sampled as padding."),
    _counter("step_host_s", "jaxinfer_step_host_seconds", "Steps, apart from the next."),
    _counter("step_device_s", "jaxinfer_step_device_seconds", "Steps: waiting for the device."),
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


class EngineCollector(Collector):
    """Reads `EngineStats` when scraped, so the engine threads count in plain integers.

    Args:
        engines: Each has a line of its own in every series.
        labels: Of each of them.
        prefix: In front of vLLM's names.
    """

    def __init__(
        self, engines: Sequence[AsyncEngine], labels: Sequence[tuple[str, str]], prefix: str
    ):
        self._engines = tuple(zip(engines, labels, strict=True))
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        stats = [(labels, engine.stats) for engine, labels in self._engines]
        for series in ENGINE_SERIES:
            family = CounterMetricFamily if series.counter else GaugeMetricFamily
            metric = family(prefixed(series.name, self._prefix), series.doc, labels=LABELS)
            for labels, one in stats:
                metric.add_metric(labels, getattr(one, series.field))
            yield metric
        yield self._split(
            GaugeMetricFamily,
            "vllm:num_requests_waiting_by_reason",
            "Sequences that wait.",
            "reason",
            [
                (labels, (("capacity", one.num_requests_waiting), ("deferred", 0)))
                for labels, one in stats
            ],
        )
        # It never sleeps; autoscalers ask all the same.
        states = (("awake", 1), ("weights_offloaded", 0), ("discard_all", 0))
        yield self._split(
            GaugeMetricFamily,
            "vllm:engine_sleep_state",
            "1 for the state that the engine is in.",
            "sleep_state",
            [(labels, states) for labels, _ in stats],
        )
        yield self._split(
            CounterMetricFamily,
            "vllm:request_success",
            "Sequences that ended.",
            "finished_reason",
            [
                (
                    labels,
                    [(reason.value, one.finished.get(reason.value, 0)) for reason in FinishReason],
                )
                for labels, one in stats
            ],
        )
        yield self._tokens_per_step(stats)
        for name, doc, value in (
            ("jaxinfer_engine_alive", "1 while it serves.", lambda e: float(e.is_alive)),
            (
                "jaxinfer_engine_busy_seconds",
                "Since the last step, while there is work; a stall makes it grow.",
                lambda e: e.stalled_s,
            ),
        ):
            gauge = GaugeMetricFamily(name, doc, labels=LABELS)
            for engine, labels in self._engines:
                gauge.add_metric(labels, value(engine))
            yield gauge

    def _split(
        self,
        family: type[CounterMetricFamily | GaugeMetricFamily],
        name: str,
        doc: str,
        label: str,
        values: Iterable[tuple[tuple[str, str], Iterable[tuple[str, float]]]],
    ) -> Metric:
        metric = family(prefixed(name, self._prefix), doc, labels=(*LABELS, label))
        for labels, counts in values:
            for value, count in counts:
                metric.add_metric((*labels, value), count)
        return metric

    def _tokens_per_step(self, stats: Iterable[tuple[tuple[str, str], EngineStats]]) -> Metric:
        edges = [*map(str, map(float, TOKENS_PER_STEP)), "+Inf"]
        metric = HistogramMetricFamily(
            prefixed("vllm:iteration_tokens_total", self._prefix),
            "Tokens of a step.",
            labels=LABELS,
        )
        for labels, one in stats:
            buckets = list(zip(edges, accumulate(one.tokens_per_step), strict=True))
            metric.add_metric(labels, buckets, one.num_scheduled_tokens)
        return metric


def prefixed(name: str, prefix: str) -> str:
    """Return a name of vLLM's under another prefix; any other name stays as it is."""
    return f"{prefix}:{name.removeprefix(_VLLM)}" if name.startswith(_VLLM) else name
