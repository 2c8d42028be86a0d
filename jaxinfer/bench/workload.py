"""What is asked of an engine: prompts and arrivals, the same for the same seed. Pure host work."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

# Ids of whole words in common vocabularies: no special token, no single byte.
_LOWEST_ID, _HIGHEST_ID = 1000, 10_000


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests of one shape.

    Attributes:
        num_requests: How many.
        prompt_tokens: Tokens of each prompt.
        new_tokens: Tokens of each answer: no end token ends it sooner.
        shared_tokens: Leading tokens that all prompts have in common; 0 for wholly random prompts.
        seed: Another seed, other prompts and arrivals.
    """

    num_requests: int
    prompt_tokens: int
    new_tokens: int
    shared_tokens: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_requests", "prompt_tokens", "new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.shared_tokens <= self.prompt_tokens:
            raise ValueError(
                f"shared_tokens must be in [0, {self.prompt_tokens}], got {self.shared_tokens}"
            )

    def prompts(self, vocab_size: int = _HIGHEST_ID) -> list[list[int]]:
        """Return the prompts, token ids below `vocab_size`."""
        rng = random.Random(f"prompts {self.seed}")
        high = min(_HIGHEST_ID, vocab_size)
        low = min(_LOWEST_ID, high // 2)

        def tokens(count: int) -> list[int]:
            return [rng.randrange(low, high) for _ in range(count)]

        shared = tokens(self.shared_tokens)
        rest = self.prompt_tokens - self.shared_tokens
        return [[*shared, *tokens(rest)] for _ in range(self.num_requests)]


def poisson_arrivals(num_requests: int, rate: float, seed: int = 0) -> list[float]:
    """Return seconds after the start at which requests arrive, `rate` a second on average.

    An infinite rate lets all arrive at once.
    """
    if rate <= 0:
        raise ValueError(f"rate must be above 0, got {rate}")
    rng = random.Random(f"arrivals {seed}")
    now, arrivals = 0.0, []
    for _ in range(num_requests):
        arrivals.append(now)
        now += 0.0 if math.isinf(rate) else rng.expovariate(rate)
    return arrivals


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile, interpolated between neighbours; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (at - below)
