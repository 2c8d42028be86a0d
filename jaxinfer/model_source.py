"""A model on disk: what it is, before any weight is read, and its weights, once they are wanted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from flax import nnx

import checkpoints
from checkpoints import TextAssets
from jaxinfer.models import (
    ModelConfig,
    Transformer,
    family_of,
    flat_parameters,
    load_weights,
)
from jaxinfer.sharding import parameter_shardings


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
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_model: Callable[[Transformer, dict[str, jax.ShapeDtypeStruct]], None] = lambda *_: None,
) -> tuple[Transformer, dict[str, jax.Array]]:
    """Return the abstract model and its parameters by dotted path, each in its sharding.

    Args:
        source: Where the weights are.
        model_config: The model's sizes.
        mesh: The devices.
        dtype: Of the weights.
        on_progress: Called with what is done and the total.
        on_model: Called before any weight is read, with the model and what its parameters will be:
            compiling may begin.
    """
    model = nnx.eval_shape(lambda: Transformer(model_config, dtype))
    _, state = nnx.split(model)
    abstract = flat_parameters(state)
    shardings = parameter_shardings(mesh, abstract)
    targets = {
        path: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=shardings[path])
        for path, p in abstract.items()
    }
    on_model(model, targets)
    if source.checkpoint is None:
        return model, checkpoints.restore_tree(source.path, targets)
    family = family_of(source.config)
    return model, load_weights(
        source.checkpoint, family, model_config, state, shardings, on_progress
    )
