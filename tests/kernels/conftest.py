"""The compiler that needs no GPU, where it is installed; and the cases that only `-m slow` runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from pallas_kernels.aot import Toolchain

FOLDER = Path(__file__).parent


@pytest.fixture(scope="session")
def toolchain() -> Toolchain:
    """Skips where there is none. One of another jax version is an error, not a reason to skip."""
    found = Toolchain.of_environment()
    if not found.folder.exists():
        pytest.skip("no GPU compiler here: `make gpu-compiler` installs it (Linux)")
    found.check()
    return found


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave an hour of compiling and interpreting to those who ask for it."""
    if "slow" in (config.option.markexpr or ""):
        return
    reason = "all combinations, and models in full depth: pytest tests/kernels -m slow"
    for item in items:
        if FOLDER in item.path.parents and item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason=reason))
