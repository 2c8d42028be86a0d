"""What a request wants to see and to change inside the model, and what was seen. Host side, no jax.

Names are those of `jaxinfer.hook_tap`: "layers.3.resid_post", or "layers.*.resid_post" for all.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
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
        nothing: name → what a sequence has of it when none of its tokens was asked for: an array
            [0, ...]. May lack names.
        keep: Takes a sample's index and captures once it has ended, and returns what the caller
            gets instead: say, the same on disk.
    """

    capture: tuple[str, ...] = ()
    positions: Positions = None
    edits: tuple[Any, ...] = ()
    nothing: Mapping[str, np.ndarray] = field(default_factory=dict)
    keep: Callable[[int, Captures], Captures] | None = None
    _wanted: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False)

    def select(self, start: int, end: int, num_prompt_tokens: int) -> np.ndarray:
        """Return what `select_positions` does, quickly: every step asks it of every row."""
        if self.positions is None or isinstance(self.positions, str):
            return select_positions(self.positions, start, end, num_prompt_tokens)
        wanted = self._wanted.get(num_prompt_tokens)
        if wanted is None:
            wanted = self._wanted[num_prompt_tokens] = _wanted(self.positions, num_prompt_tokens)
        first, last = np.searchsorted(wanted, (start, end))
        return wanted[first:last]


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
        cls,
        chunks: Sequence[CapturedChunk],
        names: Sequence[str],
        num_tokens: int,
        nothing: Mapping[str, np.ndarray] | None = None,
    ) -> Captures:
        """Put together what steps showed of the first `num_tokens` of a sequence.

        What was computed twice, because a request had to give its pages away, is taken once.
        `nothing` is what there is of a name without any step: see `Hooks`.
        """
        if not chunks:
            empty = np.zeros(0, np.float32)
            arrays = {name: (nothing or {}).get(name, empty) for name in names}
            return cls(positions=np.zeros(0, np.int64), arrays=arrays)
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
            raise InvalidRequestError(
                f"nothing is named {pattern!r}{_hint(pattern, known, general)} There are: "
                f"{', '.join(general)} (layers 0 to {_last_layer(known)}; * matches any)",
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


def _hint(pattern: str, known: Collection[str], general: Sequence[str]) -> str:
    """Return what may have been meant by a pattern that stands for none."""
    numbers = [part for part in pattern.split(".") if _is_number(part)]
    if _general(pattern) in general:
        return f": layers count from 0 to {_last_layer(known)}."
    if any(name.startswith(f"{_general(pattern)}.") for name in general):
        return f"; did you mean {pattern + '.resid_post'!r}?"
    close = difflib.get_close_matches(_general(pattern), general, n=1)
    last = pattern.split(".")[-1]
    meant = close or [name for name in general if name.split(".")[-1] == last][:1]
    return f"; did you mean {meant[0].replace('*', (*numbers, '*')[0])!r}?" if meant else "."


def _is_number(part: str) -> bool:
    return part.removeprefix("-").isdigit()


def _general(name: str) -> str:
    return ".".join("*" if _is_number(part) else part for part in name.split("."))


def _last_layer(known: Iterable[str]) -> int:
    return max((int(p) for name in known for p in name.split(".") if p.isdigit()), default=0)


def select_positions(
    positions: Positions, start: int, end: int, num_prompt_tokens: int
) -> np.ndarray:
    """Return which positions of [start, end) are asked for, ascending.

    None or "all" are all that are computed, which is every token but the last sampled one; "prompt"
    and "generated" divide them; "last" is the prompt's last. Numbers are positions in the sequence,
    negative ones count from the end of the prompt; their order and repeats mean nothing. A slice
    is of the prompt.

    Raises:
        InvalidRequestError: It is none of these, or outside of the prompt's beginning.
    """
    here = np.arange(start, end)
    if positions is None:
        return here
    if not isinstance(positions, str):
        return here[np.isin(here, _wanted(positions, num_prompt_tokens))]
    match positions:
        case "all":
            return here
        case "prompt":
            return here[here < num_prompt_tokens]
        case "generated":
            return here[here >= num_prompt_tokens]
        case "last":
            return here[here == num_prompt_tokens - 1]
        case _:
            raise _no_positions(positions)


def check_positions(positions: Positions, num_prompt_tokens: int, end: int) -> None:
    """Refuse positions that can never be computed.

    Args:
        positions: See `select_positions`.
        num_prompt_tokens: Of the sequence.
        end: Tokens of the longest sequence that may be computed, its output included.

    Raises:
        InvalidRequestError: As `select_positions`, or a number lies behind `end`.
    """
    select_positions(positions, 0, 0, num_prompt_tokens)
    if positions is None or isinstance(positions, str | slice):
        return
    highest = _numbers(positions, num_prompt_tokens).max(initial=0)
    if highest >= end:
        raise InvalidRequestError(
            f"positions: {highest} lies behind the last token that is computed, {end - 1}: the "
            f"prompt has {num_prompt_tokens}, and the last of the sampled tokens is not computed",
            "positions",
        )


def _wanted(positions: Any, num_prompt_tokens: int) -> np.ndarray:
    """Return the positions that a slice or numbers stand for, ascending, each once."""
    if isinstance(positions, slice):
        return np.sort(np.arange(num_prompt_tokens)[positions])
    return np.unique(_numbers(positions, num_prompt_tokens))


def _numbers(positions: Any, num_prompt_tokens: int) -> np.ndarray:
    """Return positions from 0, int64 [n], of those that a caller wrote as numbers."""
    several = positions.tolist() if hasattr(positions, "tolist") else positions
    several = [several] if isinstance(several, int) else several
    if not isinstance(several, Sequence) or isinstance(several, bytes):
        raise _no_positions(positions)
    chosen = [int(p) for p in several if isinstance(p, Integral) and not isinstance(p, bool)]
    if len(chosen) != len(several):
        raise _no_positions(positions)
    wanted = np.array(chosen, np.int64)
    wanted = np.where(wanted < 0, wanted + num_prompt_tokens, wanted)
    if (wanted < 0).any():
        raise InvalidRequestError(
            f"positions: {wanted.min() - num_prompt_tokens} lies before the prompt of "
            f"{num_prompt_tokens} tokens",
            "positions",
        )
    return wanted


def _no_positions(positions: Any) -> InvalidRequestError:
    return InvalidRequestError(
        'positions must be "all", "prompt", "generated", "last", a slice of the prompt, a number '
        f"or a list of numbers, got {positions!r:.80}",
        "positions",
    )
