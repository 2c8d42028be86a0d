"""`import jaxinfer` is free, and its names are there."""

from __future__ import annotations

import subprocess
import sys

import pytest

import jaxinfer

PROBE = """
import sys, jaxinfer
from jaxinfer import CompletionOutput, EngineConfig, RequestOutput, SamplingParams
heavy = {"jax", "flax", "numpy", "tokenizers", "starlette", "uvicorn", "pydantic", "rich"}
print(sorted(heavy & set(sys.modules)))
"""


def test_importing_the_package_brings_in_nothing_heavy():
    run = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("name", jaxinfer.__all__)
def test_every_public_name_resolves_and_is_listed(name):
    assert getattr(jaxinfer, name).__name__ == name
    assert name in dir(jaxinfer)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nonsense"):
        _ = jaxinfer.nonsense
