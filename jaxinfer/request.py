"""One sequence in the engine, and what the engine says of it after a step: token ids, no text."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.hooks import CapturedChunk, Hooks
from jaxinfer.sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    """Where a request stands. A preempted request is WAITING again, with its output kept."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    """Why a request ended, spelled as the API spells it."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Pooling(enum.StrEnum):
    """How the hidden states of a prompt become one vector."""

    MEAN = "mean"
    LAST = "last"


@dataclass(slots=True)
class WindowPages:
    """Pages held for layers that look back a limited number of tokens.

    Attributes:
        page_ids: Page i is for tokens [i * page_size, (i + 1) * page_size).
        first: The first one held; those before are given up, and may be anybody's.
    """

    page_ids: list[int]
    first: int


@dataclass(eq=False, kw_only=True)
class Request:
    """The engine's state of one sequence. Only the scheduler changes it.

    Progress is `num_computed_tokens` chasing `num_tokens_with_pending`; chunked prefill, prefix
    cache hits and preemption are nothing but different ways for the first to lag behind the second.

    Attributes:
        request_id: Unique among live requests.
        prompt_token_ids: The prompt, at least one token.
        params: How to sample and when to stop; `params.n` is 1 here.
        seed: 64-bit seed of this sequence, drawn by the front end if the caller gave none.
        eos_token_ids: The model's own end tokens, empty under `ignore_eos`.
        priority: Lower runs first under the "priority" policy.
        cache_salt: Prefix pages are shared only among equal salts.
        pooling: If given, the request asks for a vector of its prompt and for no token.
        hooks: What it looks at and changes inside the model.
        arrival_time: `time.monotonic()` seconds.
        max_total_tokens: prompt + output may not exceed it (context length and `max_tokens`).
        token_ids: Prompt and output known to the host.
        num_computed_tokens: Tokens whose keys and values are in pages, or will be after the step in
            flight.
        num_pending_tokens: Tokens sampled on the device that the host has not seen.
        pending_row: Row of the pending token in the last dispatched step's result.
        num_preemptions: Doubles as an epoch: results of an earlier epoch are dropped.
        num_cached_tokens: Prompt tokens found in the prefix cache at first admission.
        page_ids: Pages held, in order; page i holds tokens [i * page_size, (i + 1) * page_size).
        window_pages: The same for each group of layers with a window, if the model has any.
        page_hashes: Chained hashes of the full pages known so far.
        num_hashed_pages: Leading pages whose hashes the page pool has been told.
        prompt_logprobs: Entries so far, by position; None before `first_scored`. Emptied on
            delivery.
        pooled: float32 [D], the sum of the hidden states pooled so far; None before the first.
        captured: What hooks saw, in the order of computing. Emptied on delivery.
        finish_reason: Why it ended, if it has.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    seed: int
    max_total_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    cache_salt: str = ""
    pooling: Pooling | None = None
    hooks: Hooks | None = None
    arrival_time: float = 0.0

    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    pending_row: int = -1
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    page_ids: list[int] = field(default_factory=list)
    window_pages: list[WindowPages] = field(default_factory=list)
    page_hashes: list[bytes] = field(default_factory=list)
    num_hashed_pages: int = 0
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])
    pooled: Any = None
    captured: list[CapturedChunk] = field(default_factory=list)
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.prompt_logprobs = [None] * self.first_scored
        self._needs_host = (
            self.params.needs_host_tokens
            or bool(self.params.logprob_token_ids)
            or self.pooling is not None
            or self.hooks is not None
        )
        if self.params.ignore_eos:
            self.eos_token_ids = frozenset()
        self._end_token_ids = self.eos_token_ids.union(self.params.stop_token_ids or ())

    @property
    def is_edited(self) -> bool:
        """Whether its keys and values are not what the model makes of its tokens."""
        return self.hooks is not None and bool(self.hooks.edits)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def first_scored(self) -> int:
        """First position of the prompt that has a log-probability, if those are asked for."""
        return min(max(self.params.prompt_logprobs_start, 1), self.num_prompt_tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_tokens_with_pending(self) -> int:
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_lagging_tokens(self) -> int:
        """Tokens that could be computed now; none while the last one of all is in flight."""
        num_tokens = len(self.token_ids) + self.num_pending_tokens
        return num_tokens - self.num_computed_tokens if num_tokens < self.max_total_tokens else 0

    @property
    def num_tokens_left(self) -> int:
        """Tokens that may still be sampled, those in flight not counted."""
        return self.max_total_tokens - self.num_tokens_with_pending

    @property
    def num_steps_unattended(self) -> float:
        """Decode steps that need nothing of the host in between; 0 if it must see each token.

        The ids allowed change once `min_tokens` are reached; otherwise there is no end to it.
        """
        if self._needs_host:
            return 0
        num_early = self.params.min_tokens - (self.num_tokens_with_pending - self.num_prompt_tokens)
        return num_early if num_early > 0 else float("inf")

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    def append(self, token_id: int) -> None:
        """Learn the value of the token that has been pending longest."""
        self.token_ids.append(token_id)
        self.num_pending_tokens -= 1
        if not self.num_pending_tokens:
            self.pending_row = -1

    def goes_on_with(self, token_id: int) -> bool:
        """Learn a token unless it is the first or the last; return whether it was learnt.

        What `append` and `why_done` come to for almost every token, in one call.
        """
        token_ids = self.token_ids
        if (
            self.first_token_time is None
            or token_id in self._end_token_ids
            or len(token_ids) + 1 >= self.max_total_tokens
        ):
            return False
        token_ids.append(token_id)
        self.num_pending_tokens -= 1
        if not self.num_pending_tokens:
            self.pending_row = -1
        return True

    def why_done(self) -> tuple[FinishReason | None, int | None]:
        """Return the finish reason and the stop reason that the newest token brings, if any."""
        token_ids = self.token_ids
        if token_ids[-1] in self._end_token_ids and self.num_output_tokens > self.params.min_tokens:
            is_eos = token_ids[-1] in self.eos_token_ids
            return FinishReason.STOP, None if is_eos else token_ids[-1]
        if len(token_ids) >= self.max_total_tokens:
            return FinishReason.LENGTH, None
        return None, None

    def start_over(self) -> None:
        """Keep the tokens and forget what was computed of them; the pages have been released."""
        self.num_hashed_pages = 0
        self.num_computed_tokens = 0
        self.num_pending_tokens = 0
        self.pending_row = -1
        self.pooled = None


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities at one position, of the raw distribution.

    Attributes:
        logprob: Of the token that stands there.
        rank: Its rank, 1 for the likeliest.
        top_token_ids: The likeliest tokens, likeliest first; as many as were asked for.
        top_logprobs: Their log-probabilities.
        asked: (log-probability, rank) of each of the request's `logprob_token_ids`.
    """

    logprob: float
    rank: int
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    asked: tuple[tuple[float, int], ...] = ()


@dataclass(slots=True)
class TokenOutput:
    """What one step gave one request.

    Not to be changed, yet not frozen: a step makes one per row, and a frozen one takes 1.3 µs to
    make instead of 0.4.

    Attributes:
        new_token_ids: Tokens since the last output; empty only for outputs that end a request.
        logprobs: One entry per new token, if asked for.
        prompt_logprobs: Once, with the first output, if asked for; entry 0 is None.
        finish_reason: Set on the last output of a request.
        stop_reason: The stop token id that ended it; None for end-of-sequence.
        num_cached_tokens: Prompt tokens that came from the prefix cache; with the first output.
        first_scheduled_time: `time.monotonic()` seconds when the request first ran; with the first
            output.
        error: Why it ended, for `FinishReason.ERROR`.
        pooled: float32 [D], the prompt's vector, on the only output of a request for one.
        captured: What hooks saw since the last output.
    """

    request_id: str
    new_token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    first_scheduled_time: float | None = None
    error: str | None = None
    pooled: Any = None
    captured: tuple[CapturedChunk, ...] = ()

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None
