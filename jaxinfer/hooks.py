"""What a request wants to see and to change inside the model, and what was seen. Host side, no jax.

Names are those of `jaxinfer.hook_tap`: "layers.3.resid_post", or "layers.*.resid_post" for all.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jaxinfer.errors import InvalidRequestError

type Positions = Literal["all", "prompt", "generated", "last"] | int | Sequence[int] | slice | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Hooks:
    """What one request looks at and changes.

    Attributes:
        capture: Names of values to return, all of them existing.
        positions: Of which tokens: see `select_positions`.
        edits: `jaxinfer.edits.Change`s, in the order in which they apply.
        keep: Takes a sample's index and captures once it has ended, and returns what the caller
            gets instead: say, the same on disk.
    """

    capture: tuple[str, ...] = ()
    positions: Positions = None
    edits: tuple[Any, ...] = ()
    keep: Callable[[int, Captures], Captures] | None = None


@dataclass(frozen=True)
class CapturedChunk:
    """What one step showed of one request.

    Attributes:
        positions: int [n], ascending.
        arrays: name → [n, ...].
    """

    positions: np.ndarray
    arrays: Mapping[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Captures:
    """All that was seen of one sequence.

    Attributes:
        positions: int [n], ascending.
        arrays: name → [n, ...] in the order of positions. Attention weights are [n, N, S], S the
            tokens up to the last position: 0 for keys that a token does not see.
        num_saved_bytes: What was written to disk.
    """

    positions: np.ndarray
    arrays: Mapping[str, np.ndarray]
    num_saved_bytes: int = 0

    @classmethod
    def join(
        cls, chunks: Sequence[CapturedChunk], names: Sequence[str], num_tokens: int
    ) -> Captures:
        """Put together what steps showed of the first `num_tokens` of a sequence.

        What was computed twice, because a request had to give its pages away, is taken once.
        """
        if not chunks:
            nothing = {name: np.zeros(0, np.float32) for name in names}
            return cls(positions=np.zeros(0, np.int64), arrays=nothing)
        computed = np.concatenate([chunk.positions for chunk in chunks])
        # The last of equal positions: numpy returns the first, so search from behind.
        positions, behind = np.unique(computed[::-1], return_index=True)
        newest = len(computed) - 1 - behind
        within = positions < num_tokens
        positions, newest = positions[within], newest[within]
        num_keys = int(positions[-1]) + 1 if len(positions) else 0
        arrays = {}
        for name in names:
            parts = [chunk.arrays[name] for chunk in chunks]
            if name.split(".")[-1] == "attn_weights":
                parts = [_as_wide(part, num_keys) for part in parts]
            arrays[name] = np.concatenate(parts)[newest]
        return cls(positions=positions, arrays=arrays)


def _as_wide(weights: np.ndarray, num_keys: int) -> np.ndarray:
    weights = weights[..., :num_keys]
    return np.pad(weights, ((0, 0), (0, 0), (0, num_keys - weights.shape[-1])))


def match_names(
    patterns: Iterable[str], known: Collection[str], param: str = "capture"
) -> tuple[str, ...]:
    """Return the known names that the patterns stand for, in the patterns' order, each once.

    Raises:
        InvalidRequestError: A pattern stands for none; the message lists what there is.
    """
    found: dict[str, None] = {}
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise InvalidRequestError(f"expected names, got {pattern!r:.80}", param)
        matches = [name for name in known if _matches(name, pattern)]
        if not matches:
            general = list(dict.fromkeys(_general(name) for name in known))
            close = difflib.get_close_matches(_general(pattern), general, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise InvalidRequestError(
                f"nothing is named {pattern!r}{hint} There are: {', '.join(general)} "
                f"(layers 0 to {_last_layer(known)}; * matches any)",
                param,
            )
        found.update(dict.fromkeys(matches))
    return tuple(found)


def _matches(name: str, pattern: str) -> bool:
    """Whether each dotted part matches: * does not reach over a dot."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(
        fnmatch.fnmatchcase(part, p) for part, p in zip(parts, patterns, strict=True)
    )


def _general(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _last_layer(known: Iterable[str]) -> int:
    return max((int(p) for name in known for p in name.split(".") if p.isdigit()), default=0)


def select_positions(
    positions: Positions, start: int, end: int, num_prompt_tokens: int
) -> np.ndarray:
    """Return which positions of [start, end) are asked for, ascending.

    None or "all" are all that are computed, which is every token but the last sampled one; "prompt"
    and "generated" divide them; "last" is the prompt's last. Numbers are positions in the sequence,
    negative ones count from the end of the prompt. A slice is of the prompt.

    Raises:
        InvalidRequestError: It is none of these, or outside of the prompt's beginning.
    """
    here = np.arange(start, end)
    match positions:
        case None | "all":
            return here
        case "prompt":
            return here[here < num_prompt_tokens]
        case "generated":
            return here[here >= num_prompt_tokens]
        case "last":
            wanted = np.array([num_prompt_tokens - 1])
        case slice():
            wanted = np.arange(num_prompt_tokens)[positions]
        case _:
            try:
                wanted = np.atleast_1d(np.asarray(positions, np.int64))
            except (TypeError, ValueError):
                wanted = np.zeros((0, 0))
            if wanted.ndim != 1 or isinstance(positions, str):
                raise InvalidRequestError(
                    'positions must be "all", "prompt", "generated", "last", a slice of the prompt,'
                    f" a number or a list of numbers, got {positions!r:.80}",
                    "positions",
                )
            wanted = np.where(wanted < 0, wanted + num_prompt_tokens, wanted)
            if (wanted < 0).any():
                raise InvalidRequestError(
                    f"positions: {wanted.min() - num_prompt_tokens} lies before the prompt of "
                    f"{num_prompt_tokens} tokens",
                    "positions",
                )
    return here[np.isin(here, wanted)]
