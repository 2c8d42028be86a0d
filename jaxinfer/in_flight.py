"""What a dispatched step left on the device, and how it reaches the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from jaxinfer.batch import SampledTokens, StepPlan, StepResult
from jaxinfer.hook_programs import Captured
from jaxinfer.request import Request, TokenLogprobs
from jaxinfer.sampler import Logprobs


@dataclass(frozen=True)
class Hidden:
    """What the backbone leaves on the device.

    Attributes:
        sampled: [B, D], hidden states of the sampling rows.
        tokens: [T, D], hidden states of all tokens.
        captured: What hooks asked to see.
    """

    sampled: jax.Array
    tokens: jax.Array
    captured: Captured | None = None


@dataclass(frozen=True)
class PromptScores:
    """Log-probabilities of up to `SCORED_TOKENS` consecutive prompt tokens, on the device.

    Attributes:
        request: Whose prompt.
        count: Entries that mean something.
        scores: The log-probabilities.
    """

    request: Request
    count: int
    scores: Logprobs


@dataclass(frozen=True)
class AskedScores:
    """Log-probabilities of up to `SCORED_TOKENS` tokens that a request asks about, on the device.

    Attributes:
        row: Which sampling row.
        count: Entries that mean something.
        scores: The log-probabilities.
    """

    row: int
    count: int
    scores: Logprobs


@dataclass(frozen=True)
class InFlight:
    """A sampled step that has not been fetched.

    Attributes:
        sampled: The tokens; None if the step samples none.
        prompt_scores: Scored parts of prompts, in order.
        counts: Of several decode steps: tokens by row.
        pooled: float32 [max_num_seqs, D], sums of hidden states, entry i for the i-th row of the
            plan that pools; None if there is none.
        asked: Log-probabilities of `logprob_token_ids`, in order.
        captured: What hooks asked to see.
    """

    sampled: SampledTokens | None
    prompt_scores: tuple[PromptScores, ...] = ()
    counts: jax.Array | None = None
    pooled: jax.Array | None = None
    asked: tuple[AskedScores, ...] = ()
    captured: Captured | None = None


def fetch(plan: StepPlan, step: InFlight) -> StepResult:
    """Wait for a step's tokens and return them; alternatives only if asked for."""
    if step.counts is not None:
        return _fetch_steps(plan, step)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
    for part in step.prompt_scores:
        request = part.request
        entries = _entries(part.scores, [request.params.prompt_logprobs] * part.count)
        known = prompt_logprobs.setdefault(request.request_id, [])
        known.extend(entry for entry in entries if entry is not None)
    pooled = {}
    if step.pooled is not None:
        ids = [row.request.request_id for row in plan.rows if row.request.pooling is not None]
        pooled = dict(zip(ids, jax.device_get(step.pooled), strict=False))
    captured = {} if step.captured is None else step.captured.fetch()
    rows = plan.sampling_rows
    if step.sampled is None:
        return StepResult(
            token_ids=(),
            corrupted=(),
            logprobs=(),
            prompt_logprobs=_frozen(prompt_logprobs),
            pooled=pooled,
            captured=captured,
        )
    fetched = jax.device_get((step.sampled.token_ids, step.sampled.corrupted))
    token_ids, corrupted = (x[: len(rows)].tolist() for x in fetched)
    tokens: list[tuple[int, ...]] = list(zip(token_ids, strict=True))
    if any(corrupted):
        tokens = [() if bad else t for t, bad in zip(tokens, corrupted, strict=True)]
    widths = [row.request.params.logprobs for row in rows]
    logprobs: list[tuple[TokenLogprobs, ...] | None] = [None] * len(rows)
    if any(width is not None for width in widths):
        entries = _entries(_scores(step.sampled), widths)
        for part in step.asked:
            entry = entries[part.row]
            assert entry is not None, "SamplingParams asks for both or none"
            values, ranks = jax.device_get((part.scores.logprobs, part.scores.ranks))
            more = zip(values[: part.count].tolist(), ranks[: part.count].tolist(), strict=True)
            entries[part.row] = replace(entry, asked=(*entry.asked, *more))
        logprobs = [None if entry is None else (entry,) for entry in entries]
    return StepResult(
        token_ids=tuple(tokens),
        corrupted=tuple(corrupted),
        logprobs=tuple(logprobs),
        prompt_logprobs=_frozen(prompt_logprobs),
        pooled=pooled,
        captured=captured,
    )


def _fetch_steps(plan: StepPlan, step: InFlight) -> StepResult:
    sampled = step.sampled
    assert sampled is not None, "decode steps sample"
    fetched = jax.device_get((step.counts, sampled.token_ids, sampled.corrupted))
    counts, token_ids, corrupted = fetched
    n = len(plan.rows)
    widths = [row.request.params.logprobs for row in plan.rows]
    logprobs: list[tuple[TokenLogprobs, ...] | None] = [None] * n
    if any(width is not None for width in widths):
        scores = jax.device_get(_scores(sampled))
        steps = [Logprobs(*arrays) for arrays in zip(*scores, strict=True)]
        entries = [_entries(step, widths) for step in steps[: counts[:n].max()]]
        logprobs = [
            None if width is None else tuple(e for step in entries[:count] if (e := step[i]))
            for i, (width, count) in enumerate(zip(widths, counts, strict=False))
        ]
    rows = zip(token_ids.T[:n].tolist(), counts.tolist(), strict=False)
    return StepResult(
        token_ids=tuple(tuple(tokens[:count]) for tokens, count in rows),
        corrupted=tuple(corrupted.any(axis=0)[:n].tolist()),
        logprobs=tuple(logprobs),
    )


def _entries(scores: Logprobs, widths: Sequence[int | None]) -> list[TokenLogprobs | None]:
    """Fetch the first rows of `scores`, each with as many alternatives as asked; None for None."""
    columns = (np.asarray(x)[: len(widths)].tolist() for x in jax.device_get(scores))
    return [
        None
        if width is None
        else TokenLogprobs(
            logprob=logprob,
            rank=rank,
            top_token_ids=tuple(ids[:width]),
            top_logprobs=tuple(values[:width]),
        )
        for logprob, rank, ids, values, width in zip(*columns, widths, strict=True)
    ]


def _scores(sampled: SampledTokens) -> Logprobs:
    s = sampled
    return Logprobs(s.logprobs, s.ranks, s.top_token_ids, s.top_logprobs)


def _frozen(entries: Mapping[str, list[TokenLogprobs]]) -> dict[str, tuple[TokenLogprobs, ...]]:
    return {request_id: tuple(known) for request_id, known in entries.items()}
