"""What the engine counts, and the hook through which others hear of latencies.

Plain numbers, standard library only: the server turns them into Prometheus series, the
command line prints them, and nothing here knows either.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol

# vLLM's edges.
TOKENS_PER_STEP = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(kw_only=True)
class EngineStats:
    """Gauges and counters of one engine; only the thread that steps the engine changes them.

    Attributes:
        num_requests_running: Sequences that hold pages.
        num_requests_waiting: Sequences that wait, preempted ones included.
        kv_cache_usage: Share of the pages that live sequences hold, 0 to 1; where layers with
            windows have pages of their own, of those that will run out first.
        num_pages: Pages, of all groups of layers.
        num_pages_used: Pages that at least one sequence holds.
        num_pages_cached: Pages that nobody holds and whose content may be found again.
        num_preemptions: Sequences that lost their pages to others, ever.
        prefix_cache_queries: Prompt tokens looked up in the prefix cache, ever.
        prefix_cache_hits: Prompt tokens found there, ever.
        prompt_tokens: Prompt tokens of admitted sequences, ever.
        generation_tokens: Tokens produced, ever.
        num_steps: Steps done, ever; several decode steps in one dispatch count once.
        num_multi_steps: Dispatches of several decode steps, ever.
        num_scheduled_tokens: Tokens computed in steps, of prompts and outputs, ever.
        num_padding_tokens: Tokens computed only because steps are padded to a bucket, ever.
        num_sampled_rows: Rows sampled in steps, ever.
        num_padding_rows: Rows sampled only because of padding, ever.
        step_host_s: Seconds that steps took apart from waiting for the device, ever.
        step_device_s: Seconds that steps waited for the device, ever.
        tokens_per_step: Steps with up to `TOKENS_PER_STEP[i]` tokens and no fewer, ever; the last
            entry is for those with more.
        num_corrupted_requests: Sequences ended because their logits held a NaN, ever.
        compilations_total: Graphs compiled, ever.
        compilations_pending: Graphs that are being compiled ahead of their use.
        compilations_after_warmup: Graphs compiled while serving; anything but 0 is a defect.
        finished: Sequences that ended, by finish reason, ever.
    """

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_pages: int = 0
    num_pages_used: int = 0
    num_pages_cached: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_steps: int = 0
    num_multi_steps: int = 0
    num_scheduled_tokens: int = 0
    num_padding_tokens: int = 0
    num_sampled_rows: int = 0
    num_padding_rows: int = 0
    step_host_s: float = 0.0
    step_device_s: float = 0.0
    tokens_per_step: list[int] = field(default_factory=lambda: [0] * (len(TOKENS_PER_STEP) + 1))
    num_corrupted_requests: int = 0
    compilations_total: int = 0
    compilations_pending: int = 0
    compilations_after_warmup: int = 0
    finished: dict[str, int] = field(default_factory=dict)

    def count_step(self, num_tokens: int, T: int, num_rows: int, B: int) -> None:
        """Count a step of so many tokens and sampled rows, padded to T and B."""
        self.num_scheduled_tokens += num_tokens
        self.num_padding_tokens += T - num_tokens
        self.num_sampled_rows += num_rows
        self.num_padding_rows += B - num_rows
        self.tokens_per_step[bisect_left(TOKENS_PER_STEP, num_tokens)] += 1


def summed(stats: Sequence[EngineStats]) -> EngineStats:
    """Return the sums over several engines; the usage of the KV cache is their mean."""
    total = EngineStats()
    for f in fields(EngineStats):
        values = [getattr(one, f.name) for one in stats]
        if f.name == "finished":
            total.finished = dict(sum(map(Counter, values), Counter()))
        elif f.name == "tokens_per_step":
            total.tokens_per_step = [sum(counts) for counts in zip(*values, strict=True)]
        else:
            setattr(total, f.name, sum(values))
    total.kv_cache_usage /= max(len(stats), 1)
    return total


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """How one request went, all its samples together. Durations in seconds.

    Attributes:
        request_id: Whose.
        finish_reasons: Per sample.
        num_prompt_tokens: Length of the prompt.
        num_cached_tokens: How many of them came from the prefix cache.
        num_generation_tokens: Per sample.
        e2e_s: Arrival to end.
        queue_s: Arrival to first scheduling; None if it never ran, or the engine does not say.
        prefill_s: First scheduling to first token.
        ttft_s: Arrival to first token; None if there was none.
        decode_s: First token to last token.
    """

    request_id: str
    finish_reasons: tuple[str, ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generation_tokens: tuple[int, ...]
    e2e_s: float
    queue_s: float | None = None
    prefill_s: float | None = None
    ttft_s: float | None = None
    decode_s: float | None = None


class RequestObserver(Protocol):
    """Hears of every request's progress, on the thread that steps the engine.

    Calls must be cheap and must not raise: an error here is an error of the engine.
    """

    def on_first_token(self, ttft_s: float) -> None:
        """A request got the first token of its first sample."""

    def on_next_tokens(self, num_tokens: int, interval_s: float) -> None:
        """A sample got further tokens, `interval_s` after its previous ones."""

    def on_finished(self, record: RequestRecord) -> None:
        """A request ended, whatever the reason."""


class NullObserver:
    """Hears nothing: what runs when nobody listens."""

    def on_first_token(self, ttft_s: float) -> None:
        pass

    def on_next_tokens(self, num_tokens: int, interval_s: float) -> None:
        pass

    def on_finished(self, record: RequestRecord) -> None:
        pass
