"""A tap that looks and changes: for one trace of one step, or of one differentiable function.

What it is shown is named after where it is:

    embed                        [T, D]     what enters the first layer
    layers.i.resid_pre           [T, D]     the stream before the layer
    layers.i.attn_in             [T, D]     what attention reads: normed
    layers.i.q, .k, .v           [T, N, H], [T, K, H] twice: after rotation, as they are used
    layers.i.attn_weights        [T, N, S]  float32, over the sequence's keys; capture only
    layers.i.attn_heads          [T, N, H]  what each head gathers, before the output projection
    layers.i.attn_out            [T, D]     what attention adds to the stream
    layers.i.resid_mid           [T, D]     the stream between attention and feed-forward
    layers.i.mlp_in              [T, D]     what the feed-forward reads: normed
    layers.i.router_logits       [T, E]     float32, of a mixture of experts
    layers.i.mlp_hidden          [T, F]     neurons: activations before the last projection
    layers.i.mlp_out             [T, D]     what the feed-forward adds to the stream
    layers.i.resid_post          [T, D]     the stream behind the layer
    final                        [T, D]     the last layer's, normed: what the head reads
    logits                       [T, V]     float32; capture only

dtypes are those of the model's activations, unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxinfer.edits import Change, apply_change
from jaxinfer.nn.tap import Make
from pallas_kernels.shapes import Array, Int

type Edits = Sequence[tuple[Sequence[Change], Array | None]]
"""Changes, and the slots that say which tokens have which of their stack: see `apply_change`."""


class HookTap:
    """Captures what it is asked for, and applies edits, each before a capture of the same name.

    Args:
        names: What to capture.
        edits: What to change.
        positions: Of the tokens, for edits.
        tokens: Indices of the tokens to capture; None for all.
        num_keys: How many keys to show of attention weights; None for all there can be.

    Attributes:
        captured: name → values, filled while the model runs.
    """

    def __init__(
        self,
        names: frozenset[str],
        *,
        positions: Int[Array, " T"],
        edits: Edits = (),
        tokens: Int[Array, " C"] | None = None,
        num_keys: int | None = None,
        scope: str = "",
        captured: dict[str, Array] | None = None,
    ):
        self._names = names
        self._positions = positions
        self._edits = edits
        self._tokens = tokens
        self._num_keys = num_keys
        self._scope = scope
        self.captured: dict[str, Array] = {} if captured is None else captured
        self._edited = frozenset(change.at for changes, _ in edits for change in changes)

    def __call__(self, name: str, x: Array) -> Array:
        name = self._scope + name
        if name in self._edited:
            for changes, slots in self._edits:
                for change in changes:
                    if change.at == name:
                        x = apply_change(change, x, self._positions, slots)
        if name in self._names:
            self.captured[name] = x if self._tokens is None else x[self._tokens]
        return x

    def observe(self, name: str, make: Make) -> None:
        name = self._scope + name
        if name in self._names:
            self.captured[name] = make(self._tokens, self._num_keys)

    def wants(self, *names: str) -> bool:
        scoped = {self._scope + name for name in names}
        return not scoped.isdisjoint(self._names | self._edited)

    def inside(self, scope: str) -> HookTap:
        return HookTap(
            self._names,
            positions=self._positions,
            edits=self._edits,
            tokens=self._tokens,
            num_keys=self._num_keys,
            scope=f"{self._scope}{scope}.",
            captured=self.captured,
        )


class ListTap:
    """Notes the name and shape of all that it is shown, under `jax.eval_shape`."""

    def __init__(self, scope: str = "", seen: dict[str, Array] | None = None):
        self._scope = scope
        self.seen: dict[str, Array] = {} if seen is None else seen

    def __call__(self, name: str, x: Array) -> Array:
        self.seen[self._scope + name] = x
        return x

    def observe(self, name: str, make: Make) -> None:
        self.seen[self._scope + name] = make(None, None)

    def wants(self, *names: str) -> bool:
        return True

    def inside(self, scope: str) -> ListTap:
        return ListTap(f"{self._scope}{scope}.", self.seen)


def hook_points(
    run: Callable[[ListTap], Array], vocab_size: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return name → shape and dtype of all that a model shows, and of its logits.

    Args:
        run: Calls the model on abstract arrays and returns its hidden states [T, D].
        vocab_size: V.
    """

    def shown() -> dict[str, Array]:
        tap = ListTap()
        hidden = run(tap)
        tap.seen["logits"] = jnp.zeros((hidden.shape[0], vocab_size), jnp.float32)
        return tap.seen

    # A dict comes back sorted by name; what a user is told is in the order of computing.
    order: list[str] = []

    def noted() -> dict[str, Array]:
        seen = shown()
        order[:] = seen
        return seen

    shapes = jax.eval_shape(noted)
    return {name: shapes[name] for name in order}
