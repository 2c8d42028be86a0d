"""The JAX/XLA inference engine for language models.

The public names load on first use, so that `import jaxinfer` costs nothing and brings in neither
jax, nor the tokenizer, nor an HTTP stack.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxinfer.async_engine import AsyncEngine
    from jaxinfer.config import EngineConfig
    from jaxinfer.function import functional
    from jaxinfer.llm import LLM
    from jaxinfer.logits_processor import LogitsProcessor
    from jaxinfer.outputs import CompletionOutput, RequestOutput
    from jaxinfer.replicas import Replicas
    from jaxinfer.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "EngineConfig",
    "LogitsProcessor",
    "Replicas",
    "RequestOutput",
    "SamplingParams",
    "functional",
]

_HOMES = {
    "LLM": "jaxinfer.llm",
    "AsyncEngine": "jaxinfer.async_engine",
    "CompletionOutput": "jaxinfer.outputs",
    "EngineConfig": "jaxinfer.config",
    "LogitsProcessor": "jaxinfer.logits_processor",
    "Replicas": "jaxinfer.replicas",
    "RequestOutput": "jaxinfer.outputs",
    "SamplingParams": "jaxinfer.sampling_params",
    "functional": "jaxinfer.function",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxinfer' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
