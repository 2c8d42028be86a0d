"""What takes minutes only runs when it is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave most models on many devices to those who ask: `pytest tests/equivalence -m slow`."""
    if "slow" in (config.option.markexpr or ""):
        return
    reason = "more models on more devices: pytest tests/equivalence -m slow"
    for item in items:
        if FOLDER in item.path.parents and item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason=reason))
