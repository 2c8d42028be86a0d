"""From what a caller writes of hooks to what each request carries."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import jax
import numpy as np

from jaxinfer.capture_files import CaptureFolder
from jaxinfer.edits import Change, Edit, no_edit, resolve
from jaxinfer.errors import InvalidRequestError
from jaxinfer.hooks import Hooks, Positions, check_positions, match_names
from jaxinfer.input_processor import PreparedRequest

type Edits = Edit | Sequence[Edit] | Sequence[Edit | Sequence[Edit] | None] | None


class HookArguments(TypedDict, total=False):
    """What `LLM.generate` takes besides prompts and parameters.

    Attributes:
        capture: Names of values to return, `*` for any layer: "layers.*.resid_post". All names are
            listed by `LLM.hook_points`, and explained in `jaxinfer.hook_tap`.
        positions: Of which tokens: see `jaxinfer.hooks.select_positions`. None: all.
        edits: Made by the functions of `jaxinfer.edits`: one for all prompts, or a list with an
            entry for each prompt, which is None, an edit or a list of them. Of a single prompt, a
            list of edits is its own.
        capture_to: A folder for the captures, one file for each sample: they are written as
            requests end, and what the outputs then hold is read from there when looked at.
    """

    capture: Sequence[str] | str
    positions: Positions
    edits: Edits
    capture_to: str | Path


class ResolvedEdits:
    """What edits stand for, so that requests with the same ones share it.

    And with it one place in the stack that the device holds: an edit of all is there once.

    Args:
        most: How many are remembered.
    """

    def __init__(self, most: int = 1024):
        self._most = most
        # With the edits: as long as they live, nobody else has their ids.
        self._known: dict[Any, tuple[tuple[Edit, ...], tuple[Change, ...]]] = {}

    def of(
        self, edits: tuple[Edit, ...], points: Mapping[str, jax.ShapeDtypeStruct], n: int
    ) -> tuple[Change, ...]:
        """Return the changes behind a prompt of n tokens. Errors: `jaxinfer.edits.resolve`."""
        by_prompt = any(isinstance(e, Edit) and e.depends_on_prompt for e in edits)
        key = (tuple(map(id, edits)), n if by_prompt else None)
        if key not in self._known:
            changes = resolve(edits, points, n)
            if len(self._known) >= self._most:
                del self._known[next(iter(self._known))]
            self._known[key] = edits, changes
        return self._known[key][1]


def with_hooks(
    requests: Sequence[PreparedRequest],
    points: Mapping[str, jax.ShapeDtypeStruct],
    arguments: HookArguments,
    max_model_len: int,
    known: ResolvedEdits | None = None,
) -> list[PreparedRequest]:
    """Return the requests with hooks in them.

    Args:
        requests: Without.
        points: name → shape [T, ...] and dtype of what is there.
        arguments: See `HookArguments`.
        max_model_len: Longest prompt + output, tokens.
        known: Edits of earlier calls.

    Raises:
        InvalidRequestError: A name, a position or an edit's values do not fit the model.
    """
    unknown = sorted(set(arguments) - set(HookArguments.__annotations__))
    if unknown:
        raise InvalidRequestError(
            f"unknown argument {unknown[0]!r}; hooks are "
            f"{', '.join(HookArguments.__annotations__)}",
            unknown[0],
        )
    names = _names(arguments.get("capture"), points)
    positions = arguments.get("positions")
    for name in ("positions", "capture_to"):
        if arguments.get(name) is not None and not names:
            raise InvalidRequestError(f"{name} needs capture: the names of what to keep", name)
    nothing = {name: _nothing(name, points[name]) for name in names}
    edits = _per_request(arguments.get("edits"), len(requests))
    writer = _writer(arguments.get("capture_to"))
    known = ResolvedEdits() if known is None else known
    hooked = []
    for index, (request, own) in enumerate(zip(requests, edits, strict=True)):
        n = len(request.prompt_token_ids)
        most = request.params.max_tokens
        end = min(max_model_len, max_model_len if most is None else n + max(most, 1) - 1)
        check_positions(positions, n, end)
        changes = known.of(own, points, n)
        behind = max((edit.last_position for edit in own), default=-1)
        if behind >= end:
            raise InvalidRequestError(
                f"patch: position {behind} lies behind the last token that is computed, {end - 1}; "
                f"the prompt has {n}",
                "edits",
            )
        hooks = Hooks(
            capture=names,
            positions=positions,
            edits=changes,
            nothing=nothing,
            keep=None if writer is None else writer.keeper(index),
        )
        needed = names or hooks.edits
        hooked.append(dataclasses.replace(request, hooks=hooks if needed else None))
    return hooked


def _names(
    capture: Sequence[str] | str | None, points: Mapping[str, jax.ShapeDtypeStruct]
) -> tuple[str, ...]:
    if capture is None:
        return ()
    if not isinstance(capture, str | Iterable) or isinstance(capture, bytes | Mapping):
        raise InvalidRequestError(f"expected names, got {capture!r:.80}", "capture")
    return match_names([capture] if isinstance(capture, str) else capture, points)


def _nothing(name: str, point: jax.ShapeDtypeStruct) -> np.ndarray:
    shape = point.shape[1:]
    if name.split(".")[-1] == "attn_weights":
        shape = (*shape[:-1], 0)  # of no tokens there are no keys
    return np.zeros((0, *shape), point.dtype)


def _writer(folder: str | Path | None) -> CaptureFolder | None:
    if folder is None:
        return None
    try:
        return CaptureFolder(Path(folder))
    except (OSError, TypeError) as error:
        raise InvalidRequestError(
            f"capture_to must be a folder that can be written, got {folder!r:.200}: {error}",
            "capture_to",
        ) from error


def _per_request(edits: Edits, count: int) -> list[tuple[Edit, ...]]:
    if edits is None:
        return [()] * count
    if isinstance(edits, Edit):
        return [(edits,)] * count
    if not isinstance(edits, Iterable) or isinstance(edits, str | bytes | Mapping):
        raise no_edit(edits)
    entries: list[Any] = list(edits)
    if count == 1 and all(isinstance(edit, Edit) for edit in entries):
        return [tuple(entries)]
    if len(entries) != count:
        raise InvalidRequestError(
            f"expected one edit for all {count} prompts, or a list with an entry for each (None, "
            f"an edit or a list of edits), got a list of {len(entries)}; for several edits of all "
            "prompts, repeat their list",
            "edits",
        )
    return [_own(entry) for entry in entries]


def _own(entry: Any) -> tuple[Edit, ...]:
    if entry is None:
        return ()
    if isinstance(entry, Edit):
        return (entry,)
    if not isinstance(entry, list | tuple):
        raise InvalidRequestError(
            f"edits: expected None, an edit or a list of them for each prompt, got {entry!r:.80}",
            "edits",
        )
    return tuple(entry)
