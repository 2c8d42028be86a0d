"""When things happened to the prompts of one request → what clients are told of it."""

from __future__ import annotations

import time
from collections.abc import Iterable

from jaxinfer.outputs import RequestOutput
from jaxinfer.server.responses import PromptProgress, Timings


def request_timings(outputs: Iterable[RequestOutput], num_generation_tokens: int) -> Timings:
    """Return the timings of an HTTP request from the latest output of each of its prompts."""
    latest = list(outputs)
    times = [output.metrics for output in latest if output.metrics is not None]
    arrival = min((t.arrival_time for t in times), default=0.0)
    scheduled = _earliest(t.first_scheduled_time for t in times)
    first = _earliest(t.first_token_time for t in times)
    last = max((t.last_token_time for t in times if t.last_token_time is not None), default=None)
    num_cached = sum(output.num_cached_tokens for output in latest)
    num_prompt = sum(len(output.prompt_token_ids) for output in latest) - num_cached
    prompt_ms, predicted_ms = _between_ms(scheduled, first), _between_ms(first, last)
    return Timings(
        queue_ms=_between_ms(arrival, scheduled),
        cache_n=num_cached,
        prompt_n=num_prompt,
        prompt_ms=prompt_ms,
        prompt_per_token_ms=_ratio(prompt_ms, num_prompt),
        prompt_per_second=_ratio(1e3 * num_prompt, prompt_ms),
        predicted_n=num_generation_tokens,
        predicted_ms=predicted_ms,
        predicted_per_token_ms=_ratio(predicted_ms, num_generation_tokens),
        predicted_per_second=_ratio(1e3 * num_generation_tokens, predicted_ms),
    )


def request_progress(output: RequestOutput) -> PromptProgress:
    """Return how far the prompt of one output is."""
    times = output.metrics
    started = times and times.first_scheduled_time or (times.arrival_time if times else None)
    return PromptProgress(
        total=len(output.prompt_token_ids),
        cache=output.num_cached_tokens,
        processed=min(output.num_computed_tokens or 0, len(output.prompt_token_ids)),
        time_ms=_between_ms(started, time.monotonic()),
    )


def _earliest(times: Iterable[float | None]) -> float | None:
    return min((t for t in times if t is not None), default=None)


def _between_ms(start: float | None, end: float | None) -> float:
    return 0.0 if start is None or end is None else round(1e3 * (end - start), 3)


def _ratio(value: float, count: float) -> float:
    return round(value / count, 3) if count else 0.0
