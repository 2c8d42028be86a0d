"""OpenTelemetry: a span per API request, with children for queue, prefill and decode.

Nothing of OpenTelemetry is imported unless traces are asked for; it comes with the extra `otel`.
Attribute names are those of OpenTelemetry's conventions for generative AI where they have one, and
vLLM's where it has one.
"""

from __future__ import annotations

import os
from typing import Any, Protocol

from starlette.datastructures import Headers

from jaxinfer.errors import ConfigError
from jaxinfer.server.exchange import Exchange

SERVICE = "jaxinfer"


class Tracer(Protocol):
    """Hears of every API request when it is over."""

    def record(self, exchange: Exchange) -> None:
        """A request is over."""

    def close(self) -> None:
        """Send what is left."""


class NoTracer:
    """Sends nothing."""

    def record(self, exchange: Exchange) -> None:
        pass

    def close(self) -> None:
        pass


def make_tracer(endpoint: str | None) -> Tracer:
    """Return what sends traces to an endpoint, or nowhere.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    if endpoint is None:
        return NoTracer()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"otlp_traces_endpoint needs OpenTelemetry ({error}); "
            "install it with: pip install 'jaxinfer[otel]'"
        ) from None
    # OpenTelemetry's own variable wins over our name.
    own = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": SERVICE}
    resource = Resource.create(own)
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return SpanTracer(provider)


class SpanTracer:
    """Turns requests that are over into spans.

    Args:
        provider: OpenTelemetry's `TracerProvider`.
    """

    def __init__(self, provider: Any):
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer(SERVICE)
        self._kind = SpanKind.SERVER
        self._failed = Status(StatusCode.ERROR)
        self._within = set_span_in_context
        self._parent = TraceContextTextMapPropagator().extract

    def record(self, exchange: Exchange) -> None:
        """Send a request's spans; the request's own `traceparent` is their parent."""
        headers = dict(Headers(scope=exchange.scope))
        span = self._tracer.start_span(
            f"{exchange.method} {exchange.path}",
            context=self._parent(headers),
            kind=self._kind,
            start_time=exchange.start_ns,
            attributes=_attributes(exchange),
        )
        if exchange.status >= 500:
            span.set_status(self._failed)
        if exchange.batch is not None:
            self._record_stages(exchange, self._within(span))
        span.end(exchange.start_ns + _ns(exchange.duration_s))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()

    def _record_stages(self, exchange: Exchange, context: Any) -> None:
        timings = exchange.batch.timings()
        stages = (
            ("queue", timings.queue_ms),
            ("prefill", timings.prompt_ms),
            ("decode", timings.predicted_ms),
        )
        # They follow each other without a gap, up to the last token.
        at = exchange.start_ns + _ns(exchange.duration_s - sum(ms for _, ms in stages) / 1e3)
        at = max(at, exchange.start_ns)
        for name, ms in stages:
            stage = self._tracer.start_span(name, context=context, start_time=at)
            at += _ns(ms / 1e3)
            stage.end(at)


def _attributes(exchange: Exchange) -> dict[str, Any]:
    state = exchange.scope["state"]
    attributes: dict[str, Any] = {
        "http.request.method": exchange.method,
        "url.path": exchange.target,
        "http.response.status_code": exchange.status,
        "gen_ai.system": SERVICE,
        "gen_ai.request.id": state["request_id"],
    }
    call, batch = state.get("call"), exchange.batch
    if call is not None:
        attributes["gen_ai.request.model"] = call.model.name
    if batch is None:
        return attributes
    usage, timings, params = batch.usage(), batch.timings(), batch.params
    asked = {
        "gen_ai.request.n": params.n,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
    }
    return {
        **attributes,
        **{name: value for name, value in asked.items() if value is not None},
        "gen_ai.usage.prompt_tokens": usage.prompt_tokens,
        "gen_ai.usage.completion_tokens": usage.completion_tokens,
        "gen_ai.latency.time_in_queue": timings.queue_ms / 1e3,
        "gen_ai.latency.time_to_first_token": (timings.queue_ms + timings.prompt_ms) / 1e3,
        "gen_ai.latency.time_in_model_decode": timings.predicted_ms / 1e3,
        "gen_ai.latency.e2e": exchange.duration_s,
    }


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
