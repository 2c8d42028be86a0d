"""Which families there are, and how a checkpoint finds its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.errors import ModelError
from jaxinfer.models.family import Family
from jaxinfer.models.llama import LLAMA, MISTRAL

_FAMILIES: list[Family] = [LLAMA, MISTRAL]


def register_family(family: Family) -> None:
    """Add a family from outside the package; it wins over earlier ones of the same architecture."""
    _FAMILIES.insert(0, family)


def supported_families() -> tuple[Family, ...]:
    """All families, latest registered first."""
    return tuple(_FAMILIES)


def family_of(hf: Mapping[str, Any]) -> Family:
    """Return the family that serves a HF config.

    Raises:
        ModelError: None does; the message lists those that exist.
    """
    architectures = hf.get("architectures") or []
    for family in _FAMILIES:
        if any(a in family.architectures for a in architectures):
            return family
    if not architectures:
        for family in _FAMILIES:
            if hf.get("model_type") in family.model_types:
                return family
    asked = ", ".join(architectures) or hf.get("model_type") or "none named"
    known = ", ".join(a for f in _FAMILIES for a in f.architectures)
    raise ModelError(f"architecture {asked} is not supported; supported: {known}")
