"""C++ kernels for CPUs, called by XLA: arrays in, arrays out. Knows no request and no model.

Built on first use where there is a compiler (`build.py`); without one, `load_library` says why, and
the plain XLA path serves. Each kernel stands beside a jnp reference of the same signature.
"""

from jaxinfer.cpu_kernels.attention import paged_attention, write_and_attend
from jaxinfer.cpu_kernels.build import BuildError, Library, load_library
from jaxinfer.cpu_kernels.linear import (
    GATES,
    embed,
    int8_matmul,
    linear,
    reference_linear,
)
from jaxinfer.cpu_kernels.memory import LargePages, renew_in_large_pages
from jaxinfer.cpu_kernels.packing import (
    FORMATS,
    interleave,
    pack,
    packed_shape,
    quantize_rows,
    unpack,
)

__all__ = [
    "FORMATS",
    "GATES",
    "BuildError",
    "LargePages",
    "Library",
    "embed",
    "int8_matmul",
    "interleave",
    "linear",
    "load_library",
    "pack",
    "packed_shape",
    "paged_attention",
    "quantize_rows",
    "reference_linear",
    "renew_in_large_pages",
    "unpack",
    "write_and_attend",
]
