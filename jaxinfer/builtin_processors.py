"""The logits processors that come with the engine, written as anybody would write theirs.

Each is a function for one row and a constructor that puts its parameters into the state. The table
in the documentation is made from `BUILT_INS`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.errors import ConfigError, InvalidRequestError
from jaxinfer.logits_processor import LogitsProcessor
from jaxinfer.processing import Row
from jaxinfer.selection import bisect
from pallas_kernels.shapes import Array

MAX_BREAKERS = 32
"""Tokens at which `dry` lets a repetition end."""

MAX_PENALTY = 1e9
"""Where `dry`'s exponential growth ends; float32 stays finite."""


def typical_p(p: float = 0.95) -> LogitsProcessor:
    """Keep the tokens whose surprise is nearest the expected one, until they reach probability `p`.

    Locally typical sampling (arXiv:2202.00666). `p` in (0, 1]; 1 keeps all.
    """
    return LogitsProcessor(_typical_p, {"p": _number("typical_p", "p", p, 0, 1, above=True)})


def _typical_p(logits: Array, state: Any) -> tuple[Array, Any]:
    logprobs = jax.nn.log_softmax(logits)
    probs = jnp.exp(logprobs)
    entropy = -jnp.sum(jnp.where(probs > 0, probs * logprobs, 0))
    # How typical: 0 for a token of the expected surprise, less for others.
    score = jnp.where(probs > 0, -jnp.abs(-logprobs - entropy), -jnp.inf)

    def mass(least: Array) -> Array:
        return jnp.sum(jnp.where(score >= least[0], probs, 0), keepdims=True)

    bottom = jnp.full((1,), -jnp.inf, jnp.float32)
    goal = state["p"] * mass(bottom)
    least = bisect(lambda x: mass(x) >= goal, low=bottom, high=jnp.zeros((1,), jnp.float32))
    return jnp.where(score >= least[0], logits, -jnp.inf), state


def top_n_sigma(n: float = 1.0) -> LogitsProcessor:
    """Keep the tokens whose logit is within `n` standard deviations of the highest.

    arXiv:2411.07641. `n` > 0. Temperature does not change which tokens are kept.
    """
    return LogitsProcessor(_top_n_sigma, {"n": _number("top_n_sigma", "n", n, 0, above=True)})


def _top_n_sigma(logits: Array, state: Any) -> tuple[Array, Any]:
    possible = jnp.isfinite(logits)
    count = jnp.maximum(jnp.sum(possible), 1).astype(jnp.float32)
    mean = jnp.sum(jnp.where(possible, logits, 0)) / count
    sigma = jnp.sqrt(jnp.sum(jnp.where(possible, (logits - mean) ** 2, 0)) / count)
    return jnp.where(logits >= jnp.max(logits) - state["n"] * sigma, logits, -jnp.inf), state


def epsilon_cutoff(epsilon: float = 3e-4) -> LogitsProcessor:
    """Keep the tokens with at least probability `epsilon`, and the likeliest in any case.

    Truncation sampling (arXiv:2210.15191). `epsilon` in [0, 1).
    """
    number = _number("epsilon_cutoff", "epsilon", epsilon, 0, 1)
    return LogitsProcessor(_epsilon_cutoff, {"epsilon": number})


def _epsilon_cutoff(logits: Array, state: Any) -> tuple[Array, Any]:
    keep = (jax.nn.softmax(logits) >= state["epsilon"]) | (logits == jnp.max(logits))
    return jnp.where(keep, logits, -jnp.inf), state


def xtc(probability: float = 0.5, threshold: float = 0.1) -> LogitsProcessor:
    """Now and then, drop all but the least likely of the tokens above a threshold.

    "Exclude top choices", as llama.cpp names it: at each token with `probability`; tokens count if
    they are at least `threshold` likely. The request's seed decides.
    """
    return LogitsProcessor(
        _xtc,
        {
            "probability": _number("xtc", "probability", probability, 0, 1),
            "threshold": _number("xtc", "threshold", threshold, 0, 1),
        },
    )


def _xtc(logits: Array, state: Any, row: Row) -> tuple[Array, Any]:
    probs = jax.nn.softmax(logits)
    tops = probs >= state["threshold"]
    least = jnp.min(jnp.where(tops, probs, jnp.inf))
    now = jax.random.uniform(row.key) < state["probability"]
    return jnp.where(now & tops & (probs > least), -jnp.inf, logits), state


def dynamic_temperature(
    low: float = 0.5, high: float = 1.5, exponent: float = 1.0
) -> LogitsProcessor:
    """Divide the logits by a temperature between `low` and `high`, by how unsure the model is.

    llama.cpp's dynatemp: the entropy's share of the largest possible one, to the power of
    `exponent`, says where between the two. Multiplies with the request's own temperature.
    """
    name = "dynamic_temperature"
    return LogitsProcessor(
        _dynamic_temperature,
        {
            "low": _number(name, "low", low, 0, above=True),
            "high": _number(name, "high", high, low),
            "exponent": _number(name, "exponent", exponent, 0),
        },
    )


def _dynamic_temperature(logits: Array, state: Any) -> tuple[Array, Any]:
    logprobs = jax.nn.log_softmax(logits)
    probs = jnp.exp(logprobs)
    entropy = -jnp.sum(jnp.where(probs > 0, probs * logprobs, 0))
    largest = jnp.log(jnp.maximum(jnp.sum(probs > 0), 2).astype(jnp.float32))
    share = jnp.clip(entropy / largest, 0, 1) ** state["exponent"]
    return logits / (state["low"] + (state["high"] - state["low"]) * share), state


def no_repeat_ngram(size: int = 3) -> LogitsProcessor:
    """Rule out every token that would repeat a sequence of `size` tokens of prompt or output.

    As Hugging Face's `no_repeat_ngram_size`.
    """
    return LogitsProcessor(_no_repeat_ngram, {"size": _count("no_repeat_ngram", "size", size)})


def _no_repeat_ngram(logits: Array, state: Any, row: Row) -> tuple[Array, Any]:
    needed = state["size"] - 1
    repeats = _match_lengths(row, jnp.full((0,), -1, jnp.int32), needed) >= needed
    S = row.token_ids.shape[0]
    known = (jnp.arange(S, dtype=jnp.int32) < row.num_tokens) & repeats
    banned = jnp.zeros(logits.shape, bool).at[_or_none(row, known, logits)].set(True, mode="drop")
    return jnp.where(banned, -jnp.inf, logits), state


def dry(
    multiplier: float = 0.8,
    base: float = 1.75,
    allowed_length: int = 2,
    breakers: Sequence[int] = (),
) -> LogitsProcessor:
    """Make a token less likely the longer the sequence that it would repeat.

    DRY, with llama.cpp's names: a token that would continue a repetition of n tokens, n ≥
    `allowed_length`, loses `multiplier * base ** (n - allowed_length)`. Repetitions do not reach
    beyond the `breakers`, token ids (at most 32) such as those of line breaks and quotes.
    """
    if len(breakers) > MAX_BREAKERS:
        raise InvalidRequestError(
            f"dry: at most {MAX_BREAKERS} breakers, got {len(breakers)}", "logits_processors"
        )
    padded = [*breakers, *[-1] * (MAX_BREAKERS - len(breakers))]
    return LogitsProcessor(
        _dry,
        {
            "multiplier": _number("dry", "multiplier", multiplier, 0),
            "base": _number("dry", "base", base, 1),
            "allowed_length": _count("dry", "allowed_length", allowed_length),
            "breakers": np.asarray(padded, np.int32),
        },
    )


def _dry(logits: Array, state: Any, row: Row) -> tuple[Array, Any]:
    lengths = _match_lengths(row, state["breakers"], row.num_tokens)
    S = row.token_ids.shape[0]
    known = (jnp.arange(S, dtype=jnp.int32) < row.num_tokens) & (lengths > 0)
    longest = jnp.zeros(logits.shape, jnp.int32)
    longest = longest.at[_or_none(row, known, logits)].max(lengths, mode="drop")
    excess = (longest - state["allowed_length"]).astype(jnp.float32)
    penalty = jnp.minimum(state["multiplier"] * state["base"] ** excess, MAX_PENALTY)
    return jnp.where(longest >= state["allowed_length"], logits - penalty, logits), state


def exponential_decay_length(
    token_id: int = 0, after: int = 100, factor: float = 1.02
) -> LogitsProcessor:
    """Make the end token likelier with each token behind the first `after` of the output.

    As Hugging Face's `exponential_decay_length_penalty`: its logit x grows by
    |x| * (factor ** n - 1), n tokens later.
    """
    name = "exponential_decay_length"
    return LogitsProcessor(
        _exponential_decay_length,
        {
            "token_id": _count(name, "token_id", token_id, least=0),
            "after": _count(name, "after", after, least=0),
            "factor": _number(name, "factor", factor, 1),
        },
    )


def _exponential_decay_length(logits: Array, state: Any, row: Row) -> tuple[Array, Any]:
    late = row.num_tokens - row.num_prompt_tokens - state["after"]
    growth = jnp.minimum(state["factor"] ** jnp.maximum(late, 0).astype(jnp.float32), MAX_PENALTY)
    x = logits.at[state["token_id"]].get(mode="fill", fill_value=0)
    return logits.at[state["token_id"]].add(jnp.abs(x) * (growth - 1), mode="drop"), state


BUILT_INS: dict[str, Callable[..., LogitsProcessor]] = {
    make.__name__: make
    for make in (
        typical_p,
        top_n_sigma,
        epsilon_cutoff,
        xtc,
        dynamic_temperature,
        no_repeat_ngram,
        dry,
        exponential_decay_length,
    )
}


def find_processor(name: str | LogitsProcessor) -> LogitsProcessor:
    """Return the processor that a setting names: a built-in one, or `module:name`.

    Raises:
        ConfigError: There is none of that name.
    """
    if isinstance(name, LogitsProcessor):
        return name
    found: Any = BUILT_INS.get(name)
    module, _, attribute = name.partition(":")
    if found is None and attribute:
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"logits_processors: {name} cannot be imported: {error}") from error
    if callable(found):
        found = found()
    if not isinstance(found, LogitsProcessor):
        raise ConfigError(
            f"logits_processors: expected one of {', '.join(BUILT_INS)}, or module:name of a "
            f"LogitsProcessor or of a function without arguments that makes one, got {name!r}"
        )
    return found


def _match_lengths(row: Row, breakers: Array, most: Array) -> Array:
    """Return int32 [S]: how many tokens before each position repeat those at the very end.

    Counts at most `most`, and no further back than a breaker.
    """
    tokens, n = row.token_ids, row.num_tokens
    S = tokens.shape[0]
    at = jnp.arange(S, dtype=jnp.int32)

    def extend(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        j, alive, lengths = carry
        newest = tokens.at[n - 1 - j].get(mode="fill", fill_value=-1)
        other = tokens.at[jnp.maximum(at - 1 - j, 0)].get(mode="clip")
        stops = jnp.any(newest == breakers)
        alive &= (at - 1 - j >= 0) & (at < n) & (other == newest) & (j < most) & ~stops
        return j + 1, alive, lengths + alive.astype(jnp.int32)

    start = (jnp.int32(0), jnp.ones((S,), bool), jnp.zeros((S,), jnp.int32))
    return lax.while_loop(lambda carry: jnp.any(carry[1]) & (carry[0] < most), extend, start)[2]


def _or_none(row: Row, rows: Array, logits: Array) -> Array:
    """Return the row's token ids where `rows` says so, elsewhere one that is dropped."""
    return jnp.where(rows, row.token_ids, logits.shape[0])


def _number(
    name: str, param: str, value: Any, low: float, high: float = math.inf, *, above: bool = False
) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value < low or value > high or (above and value == low):
        edge = ">" if above else "≥"
        upper = "" if math.isinf(high) else f" and ≤ {high}"
        raise InvalidRequestError(
            f"{name}: {param} must be a number {edge} {low}{upper}, got {value!r}",
            "logits_processors",
        )
    return float(value)


def _count(name: str, param: str, value: Any, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
        raise InvalidRequestError(
            f"{name}: {param} must be a whole number ≥ {least}, got {value!r}", "logits_processors"
        )
    return value
