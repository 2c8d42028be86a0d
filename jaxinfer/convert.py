"""`jaxinfer convert`: any checkpoint → a folder of our own arrays, restored straight into place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp

import checkpoints
from jaxinfer.errors import ConfigError
from jaxinfer.loading import tokenizer_of
from jaxinfer.model_source import ModelSource, load_model
from jaxinfer.models import family_of
from jaxinfer.sharding import make_mesh


def convert(
    src: str | None,
    dst: str,
    *,
    dtype: str = "bfloat16",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Write the model named `src` to the new folder `dst`, completely or not at all.

    Args:
        src: A file, folder or hub id; None for the embedded default.
        dst: Must not exist.
        dtype: Of the stored weights: "float32" or "bfloat16".
        on_progress: Called with bytes read and in all.

    Returns:
        The folder, which `--model` takes.

    Raises:
        ConfigError: Unknown dtype.
        CheckpointError: The source is damaged, the destination exists, the disk is full.
        ModelError: The source is no model that is supported.
    """
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"dtype must be float32 or bfloat16, got {dtype!r}")
    path = Path(dst)
    if path.exists():
        raise checkpoints.DestinationExistsError(
            f"{path} exists already; remove it or choose another name"
        )
    source = ModelSource.open(src)
    model_config = family_of(source.config).translate(source.config)
    tokenizer = tokenizer_of(source)
    _, parameters = load_model(
        source, model_config, make_mesh(), jnp.dtype(dtype), on_progress=on_progress
    )
    checkpoints.save_tree(
        path,
        parameters,
        metadata={
            "config": dict(source.config),
            "generation_config": dict(source.generation_config),
        },
        text_files={
            "tokenizer.json": tokenizer.to_tokenizer_json(),
            "tokenizer_config.json": json.dumps(tokenizer.tokenizer_config(), indent=1),
        },
    )
    return path
