"""What callers get back. Names and shapes are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Logprob:
    """Log-probability of one token at one position.

    Attributes:
        logprob: Natural logarithm, of the raw distribution.
        rank: 1 for the likeliest token of the vocabulary.
        decoded_token: The token's text.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(kw_only=True)
class CompletionOutput:
    """One sample of one prompt.

    Attributes:
        index: Which of the `n` samples.
        text: The text so far (cumulative).
        token_ids: Its tokens, stop token included.
        cumulative_logprob: Sum over the sampled tokens; None if logprobs were not asked for.
        logprobs: Per token, {token id: Logprob}: the sampled token and the likeliest.
        finish_reason: "stop", "length", "abort" or "error"; None while running.
        stop_reason: The stop string or stop token id that ended it; None for end-of-sequence.
        error: What went wrong, for "error".
        captures: name → values [n, ...] at `capture_positions`, once it has ended, if asked for:
            see `jaxinfer.hook_tap` for names and shapes. Every token can have been computed but
            the last sampled one, which nothing was asked of.
        capture_positions: int [n], positions in the sequence of prompt and output, ascending.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    captures: Mapping[str, Any] | None = None
    capture_positions: Any = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(kw_only=True)
class RequestMetrics:
    """When things happened to a request: `time.monotonic()` seconds, None if not yet."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None


@dataclass(kw_only=True)
class RequestOutput:
    """The samples of one prompt.

    Attributes:
        request_id: As given, or made up.
        prompt: The prompt's text, None if it came as token ids.
        prompt_token_ids: The prompt.
        outputs: One entry per sample, by index. Streamed as deltas: only the samples with
            something new, and `text`, `token_ids` and `logprobs` hold only what is new.
        finished: Whether all samples have ended.
        prompt_logprobs: Per prompt token, None for the first; None if not asked for.
        num_cached_tokens: Prompt tokens that came from the prefix cache.
        num_computed_tokens: Prompt tokens computed so far, on the outputs without samples that
            tell of a long prompt's progress; else None.
        embedding: float32 [D], the prompt's vector, if that was asked for.
        metrics: Times.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    num_computed_tokens: int | None = None
    embedding: Any = None
    metrics: RequestMetrics | None = None

    @property
    def captures(self) -> Mapping[str, Any] | None:
        """Those of the first sample."""
        return self.outputs[0].captures if self.outputs else None
