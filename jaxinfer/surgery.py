"""Replacing parts of a model before its weights are read: the tools of `quant.py` and its like.

A model is abstract then: modules whose parameters are shapes. An operation replaces modules in
place and says, for each new parameter, what it is made of. Nothing else in the model knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxinfer.models import Transformer
from jaxinfer.nn import MoE


def abstract_parameter(
    shape: tuple[int, ...], dtype: Any, axes: tuple[str | None, ...]
) -> nnx.Param:
    """Return what `jaxinfer.nn.parameter.parameter` returns under `nnx.eval_shape`."""
    return nnx.Param(jax.ShapeDtypeStruct(shape, dtype), axes=axes)


def modules_of(model: Transformer, kind: type[nnx.Module]) -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and the module of each module of this very class."""
    found = [(path, module) for path, module in nnx.iter_modules(model) if type(module) is kind]
    yield from ((".".join(map(str, path)), module) for path, module in found)


def replace(model: Transformer, path: str, module: nnx.Module) -> None:
    """Put a module in the place of the one at a dotted path."""
    *parents, name = path.split(".")
    owner: Any = model
    for part in parents:
        owner = owner[int(part)] if part.isdigit() else getattr(owner, part)
    if name.isdigit():
        owner[int(name)] = module
    else:
        setattr(owner, name, module)


def with_steady_experts(model: Transformer) -> Transformer:
    """Return the model with every mixture `steady`; another one, if it has any."""
    if not any(isinstance(module, MoE) for _, module in nnx.iter_modules(model)):
        return model
    copied = nnx.merge(*nnx.split(model))
    for _, module in nnx.iter_modules(copied):
        if isinstance(module, MoE):
            module.steady = True
    return copied


def weight_sources(path: str, bias: Any) -> tuple[str, ...]:
    """Paths of a `Linear`'s parameters."""
    return (f"{path}.kernel",) if bias is None else (f"{path}.kernel", f"{path}.bias")


def output_major(kernel: np.ndarray, bias: np.ndarray | None) -> tuple[np.ndarray, Any]:
    """Return a `Linear`'s kernel [in, *out] as [N, in], and its bias as [N]."""
    return kernel.reshape(kernel.shape[0], -1).T, None if bias is None else bias.reshape(-1)
