"""The instruction sets of the CPU kernels, and what to skip where one cannot run."""

from __future__ import annotations

import pytest

from jaxinfer.cpu_kernels import BuildError, load_library
from jaxinfer.cpu_kernels.build import ISA_FLAGS

CPU_ISAS = tuple(ISA_FLAGS["x86_64"])


def isa_or_skip(isa: str) -> str:
    """Return `isa`; skip the test where there is no compiler or this processor lacks it."""
    try:
        names = load_library().isa_names
    except BuildError as error:
        pytest.skip(f"no CPU kernels: {error}")
    if isa not in names:
        pytest.skip(f"this processor does not have {isa}")
    return isa
