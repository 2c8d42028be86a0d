"""The lowering that the portable kernels stand on is still there. JAX has deprecated it."""

from __future__ import annotations

import importlib

import jax
import pytest

GONE = (
    "jax {version} has no Pallas Triton lowering any more ({what}): pin jax below this version in "
    "pyproject.toml, and move the GPUs that pallas_kernels/triton serves to Mosaic kernels"
)


def test_triton_lowering_is_still_in_jax():
    """The import alone; whether it compiles, the other tests here say."""
    try:
        triton = importlib.import_module("jax.experimental.pallas.triton")
    except ImportError as error:
        pytest.fail(GONE.format(version=jax.__version__, what=error))
    used = ("CompilerParams", "load", "store")
    missing = [name for name in used if not hasattr(triton, name)]
    if missing:
        pytest.fail(GONE.format(version=jax.__version__, what=f"no {', '.join(missing)}"))
