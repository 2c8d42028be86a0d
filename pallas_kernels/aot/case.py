"""What is compiled: a program and its abstract arguments, made for a mesh of chips."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import jax
from jax.sharding import Mesh

from pallas_kernels.aot.chips import CHIPS

NARROW: Mapping[str, str] = dict.fromkeys(CHIPS, "HMMA")
"""Matrix instruction of tiles with fewer than 64 rows: one warp's, the same on every chip."""

WIDE: Mapping[str, str] = {**NARROW, "h100": "HGMMA", "b200": "UTCHMMA"}
"""Matrix instruction of tiles that fill a warpgroup (Hopper) or tensor memory (Blackwell)."""


@runtime_checkable
class Jitted(Protocol):
    """What `jax.jit` returns, as far as compiling needs it."""

    def lower(self, *args: Any) -> jax.stages.Lowered: ...


@dataclass(frozen=True)
class Program:
    """A function to be compiled.

    Attributes:
        function: Plain; or jitted, where something is donated.
        args: Trees of `jax.ShapeDtypeStruct`. Those without a sharding are replicated.
        inspect: Facts read off the compiled program, in a form that JSON can carry.
    """

    function: Callable[..., Any] | Jitted
    args: tuple[Any, ...]
    inspect: Callable[[jax.stages.Compiled], dict[str, Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to compile for each of some chips.

    Attributes:
        name: Unique in its module, e.g. "decode bf16 H128".
        build: Makes the program. May raise: a refusal is a result, too.
        kernels: Beginnings of the names of the kernels that the program must contain.
        chips: Names in `CHIPS`.
        num_devices: Chips in the mesh.
        matrix: By kernel, the matrix instruction by chip that it must use.
        default: Part of the docs' table.
        sample: Of those cases, the chips that the default test run compiles for: all would take
            longer than it may. None for all.
    """

    name: str
    build: Callable[[Mesh], Program]
    kernels: tuple[str, ...] = ()
    chips: Sequence[str] = tuple(CHIPS)
    num_devices: int = 1
    matrix: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    default: bool = True
    sample: Sequence[str] | None = None

    def is_sampled(self, chip: str) -> bool:
        """Whether the default test run compiles it for this chip."""
        return self.default and (self.sample is None or chip in self.sample)


def cases_of(module: str) -> dict[str, Case]:
    """Return what `cases()` of a module makes, by name."""
    cases = importlib.import_module(module).cases()
    by_name = {case.name: case for case in cases}
    assert len(by_name) == len(cases), f"{module} has two cases of the same name"
    return by_name
