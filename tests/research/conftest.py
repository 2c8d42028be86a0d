"""One tiny model for all tests of a module that only look into it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jaxinfer import LLM
from tests.research.models import llm_of


@pytest.fixture(scope="module")
def llama() -> Iterator[LLM]:
    with llm_of("llama3") as llm:
        yield llm
