"""The activation seam: a layer shows what it computes, and goes on with what it is handed back.

A tap is an argument like any other: no globals, no context. Without one nothing is traced but the
layer itself, so a program without hooks is the program of a model that has no taps at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from pallas_kernels.shapes import Array

type Make = Callable[[Array | None, int | None], Array]
"""`make(tokens, num_keys)`: values of the tokens with these indices [C], None for all; of what has
an axis of keys, the first `num_keys`, None for all."""


@runtime_checkable
class Tap(Protocol):
    """What a layer shows its values to. `jaxinfer.hook_tap.HookTap` is one that looks."""

    def __call__(self, name: str, x: Array) -> Array:
        """Return what to go on with: `x` [T, ...], or something else of the same shape."""
        ...

    def observe(self, name: str, make: Make) -> None:
        """Show a value that nothing goes on with, and that is computed only if asked for."""
        ...

    def wants(self, *names: str) -> bool:
        """Whether any of these is looked at: what does not exist otherwise has to be computed."""
        ...

    def inside(self, scope: str) -> Tap:
        """Return the tap for a part: what it calls `name` is `scope.name` here."""
        ...


@dataclass(frozen=True)
class NoTap:
    """Looks at nothing."""

    def __call__(self, name: str, x: Array) -> Array:
        return x

    def observe(self, name: str, make: Make) -> None:
        pass

    def wants(self, *names: str) -> bool:
        return False

    def inside(self, scope: str) -> NoTap:
        return self


NO_TAP = NoTap()
