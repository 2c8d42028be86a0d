"""`jaxinfer plan` with temporaries that the compiler tells."""

from __future__ import annotations

import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.plan_compile import plan_memory
from pallas_kernels.aot import Toolchain


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    ("model", "topology"), [("llama-3-70b", "h100:8"), ("deepseek-v3", "h100:16")]
)
def test_temporaries_are_the_compilers(model: str, topology: str, toolchain: Toolchain) -> None:
    found = plan_memory(EngineConfig(model=model, max_model_len=4096), topology)
    temporaries = found.temporaries
    assert temporaries.compiled, temporaries.note
    assert [name.split()[0] for name in temporaries.by_program] == ["backbone", "sampler"]
    assert all(0 < size < 2**33 for size in temporaries.by_program.values()), temporaries
