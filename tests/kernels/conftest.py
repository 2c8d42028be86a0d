"""The compiler that needs no GPU, where it is installed."""

from __future__ import annotations

import pytest

from pallas_kernels.aot import Toolchain


@pytest.fixture(scope="session")
def toolchain() -> Toolchain:
    """Skips where there is none. One of another jax version is an error, not a reason to skip."""
    found = Toolchain.of_environment()
    if not found.folder.exists():
        pytest.skip("no GPU compiler here: `make gpu-compiler` installs it (Linux)")
    found.check()
    return found
