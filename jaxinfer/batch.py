"""The records that carry a step: host plan → device result. Nothing here acts.

`StepPlan` is the scheduler's word; `jaxinfer.model_runner` turns it into padded device arrays and
hands back `SampledTokens`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jaxinfer.hooks import CapturedChunk
from jaxinfer.request import Request, RequestStatus, TokenLogprobs


@dataclass(slots=True)
class ScheduledRow:
    """One request's share of a step: tokens [start, start + num_scheduled_tokens).

    Not to be changed, yet not frozen, for the reason given at `TokenOutput`.

    Attributes:
        request: Whose tokens.
        start: First position computed in this step.
        num_scheduled_tokens: How many.
        samples: Whether the last of them yields a new token.
        epoch: `request.num_preemptions` when planned; a result of another epoch is dropped.
        pending_row: Where the row's last token stands in the previous step's sampled tokens, -1 if
            the host knows it.
        num_steps: Times that the row runs in this dispatch, each time on the token sampled before:
            above 1 it computes tokens [start, start + num_steps) and yields as many. See
            `StepPlan.num_decode_steps`.
    """

    request: Request
    start: int
    num_scheduled_tokens: int
    samples: bool
    epoch: int
    pending_row: int = -1
    num_steps: int = 1

    @property
    def end(self) -> int:
        return self.start + self.num_scheduled_tokens

    @property
    def is_current(self) -> bool:
        """Whether the result still concerns the request: not if it ended or was preempted since."""
        request = self.request
        return request.status is RequestStatus.RUNNING and request.num_preemptions == self.epoch


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """Who runs, and for how many tokens. One-token rows come first.

    Attributes:
        rows: Scheduled requests; those with `num_scheduled_tokens == 1` first.
        num_preempted: Requests that lost their pages to make room.
        num_decode_steps: Steps of one dispatch, the most that any row runs. Above 1 all rows have
            one token and sample, and none needs the host in between.
    """

    rows: tuple[ScheduledRow, ...]
    num_preempted: int = 0
    num_decode_steps: int = 1

    def __bool__(self) -> bool:
        return bool(self.rows)

    @cached_property
    def num_tokens(self) -> int:
        return sum([row.num_scheduled_tokens for row in self.rows])

    @cached_property
    def num_decode_rows(self) -> int:
        """Rows of exactly one token; they are `rows[:num_decode_rows]`."""
        return [row.num_scheduled_tokens for row in self.rows].count(1)

    @cached_property
    def sampling_rows(self) -> tuple[ScheduledRow, ...]:
        """Rows that yield a token, in the order in which the result lists them."""
        rows = tuple([row for row in self.rows if row.samples])
        return self.rows if len(rows) == len(self.rows) else rows


@dataclass(frozen=True, kw_only=True)
class SampledTokens:
    """A step's result on the device, fetched by `jaxinfer.model_runner.ModelRunner.fetch`.

    That of several decode steps has one more axis, the step, in front of all but `corrupted`.

    Attributes:
        token_ids: int32 [B], B the sampler's bucket.
        corrupted: bool [B], whether the row's logits held a NaN.
        logprobs: float32 [B] of the sampled tokens.
        ranks: int32 [B].
        top_token_ids: int32 [B, max_logprobs].
        top_logprobs: float32 [B, max_logprobs].
    """

    token_ids: Any
    corrupted: Any
    logprobs: Any
    ranks: Any
    top_token_ids: Any
    top_logprobs: Any


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """A step's result on the host, entry i for `plan.sampling_rows[i]`.

    Attributes:
        token_ids: Per row the sampled tokens: one for each of its steps, fewer if it ended.
        corrupted: Rows that ended because their logits held a NaN, after these tokens.
        logprobs: Per row an entry for each token, None where not asked for.
        prompt_logprobs: request_id → entries for the prompt positions [start + 1, end + 1) of the
            row's chunk, cut at the prompt's end.
        pooled: request_id → float32 [D], the sum of the hidden states that the row's chunk adds.
        captured: request_id → what hooks saw of the row's chunk.
    """

    token_ids: tuple[tuple[int, ...], ...]
    corrupted: tuple[bool, ...]
    logprobs: tuple[tuple[TokenLogprobs, ...] | None, ...]
    prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    pooled: dict[str, Any] = field(default_factory=dict)
    captured: dict[str, CapturedChunk] = field(default_factory=dict)
