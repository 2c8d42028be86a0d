"""Which hidden states of a step are scored or pooled: host work, numpy only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jaxinfer.batch import ScheduledRow, StepPlan
from jaxinfer.request import Pooling


@dataclass(frozen=True)
class ScoredPart:
    """Hidden states of one row, and the tokens that they are asked about.

    Attributes:
        row: Whose they are.
        index: Its number among the sampling rows; of a prompt's part it means nothing.
        count: Entries that mean something; the others are padding.
        indices: int32 [size], of hidden states among the step's tokens.
        targets: int32 [size], token ids.
    """

    row: ScheduledRow
    index: int
    count: int
    indices: np.ndarray
    targets: np.ndarray


def prompt_parts(plan: StepPlan, size: int) -> Iterator[ScoredPart]:
    """Yield the prompt tokens behind those of this step, of the requests that ask, in parts."""
    first = 0
    for row in plan.rows:
        request = row.request
        if request.params.prompt_logprobs is not None:
            # The state at position p tells about the token at p + 1.
            end = min(row.end, request.num_prompt_tokens - 1)
            begin = max(row.start, request.first_scored - 1)
            for start in range(begin, end, size):
                n = min(size, end - start)
                indices, targets = np.zeros((2, size), np.int32)
                indices[:n] = first + (start - row.start) + np.arange(n)
                targets[:n] = request.token_ids[start + 1 : start + 1 + n]
                yield ScoredPart(row, 0, n, indices, targets)
        first += row.num_scheduled_tokens


def asked_parts(plan: StepPlan, size: int) -> Iterator[ScoredPart]:
    """Yield the tokens that requests ask about behind their newest one, in parts."""
    first, index = 0, 0
    for row in plan.rows:
        first += row.num_scheduled_tokens
        if not row.samples:
            continue
        ids = row.request.params.logprob_token_ids or ()
        for start in range(0, len(ids), size):
            some = ids[start : start + size]
            targets = np.zeros(size, np.int32)
            targets[: len(some)] = some
            indices = np.full(size, first - 1, np.int32)
            yield ScoredPart(row, index, len(some), indices, targets)
        index += 1


def pool_slots(plan: StepPlan, num_tokens: int, num_slots: int) -> np.ndarray | None:
    """Return int32 [num_tokens]: into which sum each hidden state goes; None if nobody pools.

    The i-th row that pools has slot i; what goes nowhere has the number `num_slots`.
    """
    if all(row.request.pooling is None for row in plan.rows):
        return None
    slots = np.full(num_tokens, num_slots, np.int32)
    slot, first = 0, 0
    for row in plan.rows:
        end = first + row.num_scheduled_tokens
        if row.request.pooling is not None:
            if row.request.pooling is Pooling.MEAN:
                slots[first:end] = slot
            elif row.samples:
                slots[end - 1] = slot
            slot += 1
        first = end
    return slots
