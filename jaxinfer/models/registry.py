"""Which families there are, and how a checkpoint finds its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.errors import ModelError
from jaxinfer.models.cohere import COHERE, COHERE2
from jaxinfer.models.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from jaxinfer.models.family import Family
from jaxinfer.models.gemma import GEMMA, GEMMA2, GEMMA3
from jaxinfer.models.glm4 import GLM4
from jaxinfer.models.gpt2 import GPT2
from jaxinfer.models.gpt_neox import GPT_NEOX
from jaxinfer.models.gpt_oss import GPT_OSS
from jaxinfer.models.granite import GRANITE
from jaxinfer.models.llama import LLAMA, MISTRAL
from jaxinfer.models.mixtral import MIXTRAL
from jaxinfer.models.olmo import OLMO2, OLMO3, OLMOE
from jaxinfer.models.phi3 import PHI3
from jaxinfer.models.qwen import QWEN2, QWEN3, QWEN3_MOE
from jaxinfer.models.smollm3 import SMOLLM3
from jaxinfer.models.stablelm import STABLELM

BUILT_IN = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    GEMMA,
    GEMMA2,
    GEMMA3,
    PHI3,
    SMOLLM3,
    OLMO2,
    OLMO3,
    GRANITE,
    GLM4,
    COHERE,
    COHERE2,
    STABLELM,
    GPT_NEOX,
    GPT2,
    MIXTRAL,
    QWEN3_MOE,
    OLMOE,
    GPT_OSS,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
)

_FAMILIES: list[Family] = list(BUILT_IN)


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
    architectures = hf.get("architectures")
    if architectures is None:
        architectures = []
    if not isinstance(architectures, list | tuple) or not all(
        isinstance(name, str) for name in architectures
    ):
        raise ModelError(
            f"config.json: architectures must be a list of names, got {architectures!r:.80}"
        )
    for family in _FAMILIES:
        if any(a in family.architectures for a in architectures):
            return family
    if not architectures:
        for family in _FAMILIES:
            if hf.get("model_type") in family.model_types:
                return family
    asked = ", ".join(architectures) or str(hf.get("model_type") or "none named")
    known = ", ".join(a for f in _FAMILIES for a in f.architectures)
    raise ModelError(f"architecture {asked} is not supported; supported: {known}")
