"""A short run of `make fuzz`."""

from __future__ import annotations

import pytest

from tests.server.fuzz import fuzz


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_fuzzing_over_the_openapi_document_finds_no_5xx():
    report = fuzz(30, seed=1)
    assert "22 selected / 22 total" in report
