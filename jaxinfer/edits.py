"""Changes of what a model computes, as pytrees: new values need no new program.

An `Edit` is what a user writes; `resolve` makes of it one `Change` for each place that it names,
with arrays of that place's shape. A change is a function of one token's value, so that each token
of a batch can have its own: `apply_change` maps it over tokens.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.errors import InvalidRequestError
from jaxinfer.hooks import match_names
from pallas_kernels.shapes import Array, Int

type Where = Literal["all", "prompt", "generated"] | tuple[int, int] | None
type Values = Any  # what jnp.asarray takes

FOREVER = np.iinfo(np.int32).max
KINDS = ("add", "scale", "clamp", "patch")
UNCHANGEABLE = ("attn_weights", "logits")


@dataclass(frozen=True, eq=False)
class Edit:
    """A change of one value, or of one in every layer: made by the functions below.

    Attributes:
        at: A name, `*` for any layer.
        kind: One of `KINDS`.
        values: Arrays by role: float32, and the positions of a patch as int64.
        where: Which tokens of a sequence: "all" (None), "prompt", "generated", or positions
            (start, stop).
        heads: For an ablation, indices along the value's first axis.
    """

    at: str
    kind: str
    values: Mapping[str, Values]
    where: Where = None
    heads: tuple[int, ...] | None = None

    @property
    def depends_on_prompt(self) -> bool:
        """Whether it is another change for a prompt of another length."""
        if self.where in ("prompt", "generated"):
            return True
        return bool((np.asarray(self.values.get("positions", 0)) < 0).any())

    @property
    def last_position(self) -> int:
        """Behind all that a patch replaces; -1 of other edits."""
        positions = np.asarray(self.values.get("positions", -1))
        return int(positions[positions != FOREVER].max(initial=-1))


def add(at: str, vector: Values, *, coefficient: Values = 1.0, where: Where = None) -> Edit:
    """Add `coefficient * vector`: a steering vector.

    Args:
        at: Where, such as "layers.6.resid_post".
        vector: Of the shape of one token's value there, or one that broadcasts to it.
        coefficient: A number.
        where: See `Edit`.
    """
    value = _numeric(vector, f"add at {at}") * _numeric(coefficient, f"add at {at}")
    return Edit(at, "add", {"value": value}, where)


def scale(at: str, factor: Values, *, where: Where = None) -> Edit:
    """Multiply by a number, or by an array that broadcasts to one token's value."""
    return Edit(at, "scale", {"value": _numeric(factor, f"scale at {at}")}, where)


def ablate(
    at: str, indices: int | Sequence[int] | np.ndarray | None = None, *, where: Where = None
) -> Edit:
    """Set to zero: heads of "layers.3.attn_heads", neurons of "layers.3.mlp_hidden", or all."""
    if indices is None:
        return scale(at, 0.0, where=where)
    several = [indices] if np.ndim(indices) == 0 else indices
    try:
        chosen = tuple(map(_whole, cast("Sequence[int]", several)))
    except TypeError as error:
        raise InvalidRequestError(
            f"ablate at {at}: expected the index of a head or neuron, or several, got "
            f"{indices!r:.80}",
            "edits",
        ) from error
    return Edit(at, "scale", {}, where, heads=chosen)


def clamp(at: str, low: Values = -np.inf, high: Values = np.inf, *, where: Where = None) -> Edit:
    """Keep within [low, high], numbers or arrays that broadcast to one token's value."""
    bounds = {"low": low, "high": high}
    return Edit(at, "clamp", {k: _numeric(v, f"clamp at {at}") for k, v in bounds.items()}, where)


def patch(at: str, values: Values, positions: Sequence[int | None]) -> Edit:
    """Replace the values at some positions, say by those that another run captured.

    Args:
        at: Where.
        values: [n, ...], one for each position.
        positions: n positions in the sequence, negative ones from the end of the prompt. None is
            nowhere, for patches that are to differ from others in values only.
    """
    try:
        asked = [FOREVER if p is None else _whole(p) for p in positions]
    except TypeError as error:
        raise InvalidRequestError(
            f"patch of {at}: positions must be a list of positions, got {positions!r:.80}", "edits"
        ) from error
    if not asked:
        raise InvalidRequestError(
            f"patch of {at}: there is no position; for none, leave the edit out", "edits"
        )
    found = _numeric(values, f"patch of {at}")
    return Edit(at, "patch", {"value": found, "positions": np.array(asked, np.int64)})


def _whole(index: Any) -> int:
    if isinstance(index, bool | np.bool_):
        raise TypeError("a truth value is no index")
    return operator.index(index)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Change:
    """An edit of one place, all in arrays.

    Attributes:
        at: The place's name.
        kind: One of `KINDS`.
        values: float32, as broadcast to the place's shape; of a patch, [n, ...] and int32 [n].
        span: int32 [2], positions [start, stop) to which it applies.
    """

    at: str = dataclasses.field(metadata={"static": True})
    kind: str = dataclasses.field(metadata={"static": True})
    values: Mapping[str, Any]
    span: Any


def resolve(
    edits: Sequence[Edit], points: Mapping[str, jax.ShapeDtypeStruct], num_prompt_tokens: int | None
) -> tuple[Change, ...]:
    """Return the changes that some edits stand for, checked against what there is.

    Args:
        edits: In the order in which they apply.
        points: name → shape [T, ...] and dtype of what is there.
        num_prompt_tokens: Divides "prompt" from "generated"; None if nobody knows.

    Raises:
        InvalidRequestError: An edit names nothing, or its values do not fit.
    """
    changes = []
    for edit in edits:
        if not isinstance(edit, Edit):
            raise no_edit(edit)
        for name in match_names([edit.at], points, "edits"):
            if name.split(".")[-1] in UNCHANGEABLE:
                raise InvalidRequestError(
                    f"{name} can be captured and not edited; edit attn_heads, q, k or v instead of "
                    "attn_weights, and use logit_bias for logits",
                    "edits",
                )
            span = _span(edit.where, num_prompt_tokens)
            values = _values(edit, name, points[name].shape[1:], num_prompt_tokens)
            changes.append(Change(name, edit.kind, values, span))
    return tuple(changes)


def structure(changes: Sequence[Change]) -> tuple[Any, ...]:
    """Return what decides which program is needed: all but the values."""
    return tuple(
        (c.at, c.kind, tuple((k, np.shape(v)) for k, v in sorted(c.values.items())))
        for c in changes
    )


def apply_change(
    change: Change,
    x: Array,
    positions: Int[Array, " T"],
    slots: Int[Array, " T"] | None = None,
) -> Array:
    """Return x [T, ...] changed.

    Args:
        change: If there are slots, stacked: each array has one more axis in front.
        x: What the model computed.
        positions: Of the tokens in their sequences.
        slots: Which of the stack concerns a token; -1 for none, whose value stays as it is, bit by
            bit. None: there is no stack, and the change concerns all.
    """
    if slots is None:
        return jax.vmap(_change_token, in_axes=(None, 0, 0))(change, x, positions)
    mine = jax.tree.map(lambda a: a[jnp.maximum(slots, 0)], change)
    changed = jax.vmap(_change_token)(mine, x, positions)
    return jnp.where((slots >= 0).reshape(-1, *[1] * (x.ndim - 1)), changed, x)


def _change_token(change: Change, x: Array, position: Array) -> Array:
    values = {
        k: v if k == "positions" else jnp.asarray(v).astype(x.dtype)
        for k, v in change.values.items()
    }
    inside = (change.span[0] <= position) & (position < change.span[1])
    match change.kind:
        case "add":
            new = x + values["value"]
        case "scale":
            new = x * values["value"]
        case "clamp":
            new = jnp.clip(x, values["low"], values["high"])
        case "patch":
            hits = values["positions"] == position
            inside = inside & hits.any()
            new = values["value"][jnp.argmax(hits)]
        case kind:
            raise AssertionError(f"there is no kind {kind}")
    return jnp.where(inside, new, x)


def no_edit(value: Any) -> InvalidRequestError:
    """Return the refusal of what should have been an edit, or edits."""
    return InvalidRequestError(
        f"expected edits made by jaxinfer.edits (add, scale, ...), got {value!r:.80}", "edits"
    )


def _span(where: Where, num_prompt_tokens: int | None) -> np.ndarray:
    match where:
        case None | "all":
            span = (0, FOREVER)
        case "prompt" | "generated":
            if num_prompt_tokens is None:
                raise InvalidRequestError(
                    f"where={where!r} needs to know where the prompt ends; give positions "
                    "(start, stop)",
                    "edits",
                )
            n = num_prompt_tokens
            span = (0, n) if where == "prompt" else (n, FOREVER)
        case (Integral() as start, Integral() as stop) if 0 <= start <= stop:
            span = (int(start), int(stop))
        case _:
            raise InvalidRequestError(
                'where must be "all", "prompt", "generated" or positions (start, stop), got '
                f"{where!r:.80}",
                "edits",
            )
    return np.array(span, np.int32)


def _values(edit: Edit, name: str, shape: tuple[int, ...], n: int | None) -> dict[str, Any]:
    if edit.heads is not None:
        return {"value": _without(edit.heads, name, shape)}
    values = {k: _absolute(v, name, n) if k == "positions" else v for k, v in edit.values.items()}
    if edit.kind == "patch":
        count = len(values["positions"])
        if values["value"].shape != (count, *shape):
            raise InvalidRequestError(
                f"patch of {name}: {count} positions take values {[count, *shape]}, got "
                f"{list(values['value'].shape)}",
                "edits",
            )
        return values
    try:
        return {
            k: (jnp if isinstance(v, jax.Array) else np).broadcast_to(v, shape)
            for k, v in values.items()
        }
    except ValueError as error:
        shapes = ", ".join(str(list(v.shape)) for v in values.values())
        raise InvalidRequestError(
            f"{edit.kind} at {name}: expected values that broadcast to {list(shape)}, got {shapes}",
            "edits",
        ) from error


def _absolute(positions: np.ndarray, name: str, n: int | None) -> np.ndarray:
    """Return int32 positions from 0, of those of a patch behind a prompt of n tokens."""
    if (positions < 0).any():
        if n is None:
            raise InvalidRequestError(
                f"patch of {name}: position {positions.min()} needs to know where the prompt ends; "
                "count from 0",
                "edits",
            )
        if positions.min() < -n:
            raise InvalidRequestError(
                f"patch of {name}: position {positions.min()} lies before the prompt of {n} tokens",
                "edits",
            )
        positions = np.where(positions < 0, positions + n, positions)
    real = positions[positions != FOREVER]
    if len(np.unique(real)) != len(real):
        raise InvalidRequestError(
            f"patch of {name}: a position takes one value, got {positions.tolist()!r:.80}", "edits"
        )
    return positions.astype(np.int32)


def _numeric(value: Values, what: str) -> Any:
    """Return a copy in float32: of jax if it was, traced or not, else of numpy.

    One type for all values, since what differs in type would need a program of its own.
    """
    try:
        array = value if isinstance(value, jax.Array) else np.asarray(value)
    except ValueError:  # a list of lists of different lengths
        array = np.asarray(None)
    if not (jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.kind in "biu"):
        raise InvalidRequestError(
            f"{what}: expected real numbers or an array of them, got {value!r:.80}", "edits"
        )
    if isinstance(array, jax.Array):
        return array.astype(jnp.float32)
    # Beyond float32 is infinite there.
    with np.errstate(over="ignore"):
        return array.astype(np.float32)


def _without(indices: Sequence[int], name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A factor that is 0 at these indices of the first axis, and 1 elsewhere."""
    factor = np.ones(shape, np.float32)
    for index in indices:
        if not -shape[0] <= index < shape[0]:
            raise InvalidRequestError(
                f"ablate at {name}: index {index} is outside of {shape[0]}", "edits"
            )
        factor[index] = 0.0
    return factor
