"""Makes the interpreter notice what only a GPU would suffer from: access outside of an array.

The interpreter moves a read that leaves its array back into it, and drops such a write. Here every
load and store of a kernel first looks at its indices; where one that is not masked lies outside,
all that the program loads or stores there turns into NaN (integers: into their smallest number).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.triton import backend


@contextlib.contextmanager
def strict_bounds(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> Iterator[None]:
    """Check the bounds of all loads and stores of kernels in these modules, traced inside."""
    load, store = backend.load, backend.store

    def checked_load(ref: Any, index: tuple[Any, ...], *, mask: Any = None) -> Any:
        return _poisoned_unless(_inside(ref, index, mask), load(ref, index, mask=mask))

    def checked_store(ref: Any, index: tuple[Any, ...], value: Any, *, mask: Any = None) -> None:
        store(ref, index, _poisoned_unless(_inside(ref, index, mask), value), mask=mask)

    with monkeypatch.context() as patch:
        for module in modules:
            patch.setattr(module, "load", checked_load)
            patch.setattr(module, "store", checked_store)
        # What was traced before would be found, and what is traced now must not be.
        jax.clear_caches()
        yield
    jax.clear_caches()


def _inside(ref: Any, index: tuple[Any, ...], mask: Any) -> Any:
    """Return whether all indices that are not masked lie in the array."""
    inside = [(i >= 0) & (i < size) for i, size in zip(index, ref.shape, strict=True)]
    shape = jnp.broadcast_shapes(*(jnp.shape(i) for i in index))
    every = functools.reduce(jnp.logical_and, (jnp.broadcast_to(x, shape) for x in inside))
    return (every if mask is None else every | ~jnp.broadcast_to(mask, shape)).all()


def _poisoned_unless(good: Any, value: Any) -> Any:
    is_float = jnp.issubdtype(value.dtype, jnp.floating)
    poison = jnp.nan if is_float else jnp.iinfo(value.dtype).min
    return jnp.where(good, value, jnp.full((), poison, value.dtype))
