"""From what a caller writes of hooks to what each request carries."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict, cast

import jax

from jaxinfer.capture_files import CaptureFolder
from jaxinfer.edits import Change, Edit, resolve
from jaxinfer.errors import InvalidRequestError
from jaxinfer.hooks import Hooks, Positions, match_names, select_positions
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


def with_hooks(
    requests: Sequence[PreparedRequest],
    points: Mapping[str, jax.ShapeDtypeStruct],
    arguments: HookArguments,
) -> list[PreparedRequest]:
    """Return the requests with hooks in them.

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
    asked = arguments.get("capture") or ()
    names = match_names([asked] if isinstance(asked, str) else asked, points)
    positions = arguments.get("positions")
    edits = _per_request(arguments.get("edits"), len(requests))
    folder = arguments.get("capture_to")
    writer = None if folder is None else CaptureFolder(Path(folder))
    known: dict[tuple[tuple[int, ...], int | None], tuple[Change, ...]] = {}
    hooked = []
    for index, (request, own) in enumerate(zip(requests, edits, strict=True)):
        n = len(request.prompt_token_ids)
        select_positions(positions, 0, n, n)
        by_prompt = any(getattr(e, "where", None) in ("prompt", "generated") for e in own)
        # Requests with the same edits share one place in the stack that the device holds.
        key = (tuple(map(id, own)), n if by_prompt else None)
        if key not in known:
            known[key] = resolve(own, points, n)
        hooks = Hooks(
            capture=names,
            positions=positions,
            edits=known[key],
            keep=None if writer is None else writer.keeper(index),
        )
        needed = names or hooks.edits
        hooked.append(dataclasses.replace(request, hooks=hooks if needed else None))
    return hooked


def _per_request(edits: Edits, count: int) -> list[tuple[Edit, ...]]:
    if edits is None:
        return [()] * count
    if isinstance(edits, Edit):
        return [(edits,)] * count
    if count == 1 and all(isinstance(edit, Edit) for edit in edits):
        return [tuple(cast("Sequence[Edit]", edits))]
    if len(edits) != count:
        raise InvalidRequestError(
            f"expected one edit for all {count} prompts, or a list with an entry for each (None, "
            f"an edit or a list of edits), got a list of {len(edits)}; for several edits of all "
            "prompts, repeat their list",
            "edits",
        )
    each = []
    for own in edits:
        own = () if own is None else own
        each.append((own,) if isinstance(own, Edit) else tuple(own))
    return each
