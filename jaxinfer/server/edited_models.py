"""Models that a server has besides the one that it loaded: the same weights, changed by edits.

A client asks for one by its name, as for any model; all of them share batches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jaxinfer.errors import ConfigError, InvalidRequestError
from jaxinfer.server.call import ServedModel


def edited_models(
    model: ServedModel, settings: Sequence[str], *, sharded: bool
) -> dict[str, ServedModel]:
    """Return the edited models by name.

    Args:
        model: As it was loaded.
        settings: `NAME=FILE` each.
        sharded: Whether the model lies on several hosts.

    Raises:
        ConfigError: A setting cannot be read, or its edits do not fit.
    """
    models: dict[str, ServedModel] = {}
    if settings and sharded:
        raise ConfigError("edit: a model on several hosts cannot be edited; leave it out")
    for setting in settings:
        name, equals, path = setting.partition("=")
        if not (name and equals and path):
            raise ConfigError(f"edit must be NAME=FILE, got {setting!r}")
        if name == model.name or name in models:
            raise ConfigError(f"edit: there is a model {name!r} already; choose another name")
        models[name] = _edited(model, name, path)
    return models


def _edited(model: ServedModel, name: str, path: str) -> ServedModel:
    from jaxinfer.edit_files import load_edits  # needs jax, which a server without them does not

    try:
        edits = load_edits(path)
        model.engine.check_edits(edits)
    except InvalidRequestError as error:
        raise ConfigError(f"edit {name}: {error}") from error
    digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]
    return replace(
        model,
        name=name,
        parent=model.name,
        hooks={"edits": [edits]},
        fingerprint=f"{model.fingerprint}_{digest}",
    )
