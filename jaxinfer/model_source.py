"""A model on disk: what it is, before any weight is read, and its weights, once they are wanted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

import checkpoints
from checkpoints import TextAssets
from jaxinfer import cpu_kernels
from jaxinfer.footprint import abstract_model
from jaxinfer.models import (
    ModelConfig,
    Recipe,
    Transformer,
    family_of,
    flat_parameters,
    load_weights,
    relayout,
)
from jaxinfer.sharding import divide_experts, parameter_shardings, place


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """What a path holds, before any weight is read.

    Attributes:
        path: File or folder.
        config: HF-style.
        generation_config: HF-style, or {}.
        text: Where the tokenizer comes from.
        checkpoint: The tensors; None for an Orbax folder.
    """

    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    text: TextAssets
    checkpoint: checkpoints.Checkpoint | None

    @classmethod
    def open(cls, name: str | None) -> ModelSource:
        """Find a model by name (None: the embedded default) and read all but its weights.

        Raises:
            CheckpointError: There is none, or it is damaged.
        """
        path = checkpoints.resolve_source(name)
        if checkpoints.is_orbax(path):
            metadata = checkpoints.read_metadata(path)
            return cls(
                path=path,
                config=metadata["config"],
                generation_config=metadata["generation_config"],
                text=checkpoints.read_text_assets(path),
                checkpoint=None,
            )
        checkpoint = checkpoints.open_checkpoint(path)
        return cls(
            path=path,
            config=checkpoint.config,
            generation_config=checkpoint.generation_config,
            text=checkpoint.text,
            checkpoint=checkpoint,
        )


def load_model(
    source: ModelSource,
    model_config: ModelConfig,
    mesh: jax.sharding.Mesh,
    dtype: Any,
    *,
    quantization: str | None = None,
    kernels: str = "xla",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_model: Callable[[Transformer, dict[str, jax.ShapeDtypeStruct]], None] = lambda *_: None,
) -> tuple[Transformer, dict[str, jax.Array]]:
    """Return the abstract model and its parameters by dotted path, each in its sharding.

    Args:
        source: Where the weights are.
        model_config: The model's sizes.
        mesh: The devices.
        dtype: Of activations, and of weights that are not quantized.
        quantization: See `jaxinfer.quant.operate`.
        kernels: See `jaxinfer.quant.operate`.
        on_progress: Called with what is done and the total.
        on_model: Called before any weight is read, with the model and what its parameters will be:
            compiling may begin.
    """
    original = nnx.state(abstract_model(model_config.as_stored(), dtype)[0])
    model, recipes = abstract_model(model_config, dtype, quantization, kernels)
    divide_experts(model, mesh)
    parameters = flat_parameters(nnx.state(model))
    shardings = parameter_shardings(mesh, parameters)
    on_model(model, _targets(parameters, shardings))
    if source.checkpoint is None:
        restored = _laid_out(_restore(source, mesh, original), model_config, shardings)
        return model, _changed(restored, recipes, shardings)
    family = family_of(source.config)
    put = cpu_kernels.LargePages(place).put if kernels == "cpu" else place
    return model, load_weights(
        source.checkpoint, family, model_config, original, shardings, recipes, on_progress, put
    )


def _restore(
    source: ModelSource, mesh: jax.sharding.Mesh, state: nnx.State
) -> dict[str, jax.Array]:
    parameters = flat_parameters(state)
    targets = _targets(parameters, parameter_shardings(mesh, parameters))
    return checkpoints.restore_tree(source.path, targets)


def _laid_out(
    arrays: dict[str, jax.Array],
    model_config: ModelConfig,
    shardings: Mapping[str, jax.sharding.Sharding],
) -> dict[str, jax.Array]:
    """Give the arrays the heads of the model, on the devices."""
    if model_config.stored_heads is None:
        return arrays
    laid_out = {}
    for path, values in arrays.items():
        change = partial(relayout, model_config, path)
        if jax.eval_shape(change, values).shape != values.shape:
            values = jax.jit(change, out_shardings=shardings[path])(values)
        laid_out[path] = values
    return laid_out


def _targets(
    parameters: Mapping[str, nnx.Variable], shardings: Mapping[str, jax.sharding.Sharding]
) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        path: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=shardings[path])
        for path, p in parameters.items()
    }


def _changed(
    arrays: dict[str, jax.Array],
    recipes: list[Recipe],
    shardings: Mapping[str, jax.sharding.Sharding],
) -> dict[str, jax.Array]:
    """Replace, one recipe after the other, what the model has no use for."""
    for recipe in recipes:
        values = [np.asarray(arrays.pop(path), np.float32) for path in recipe.sources]
        for path, made in zip(recipe.targets, recipe.make(*values), strict=True):
            arrays[path] = place(np.ascontiguousarray(made), shardings[path])
    return arrays
