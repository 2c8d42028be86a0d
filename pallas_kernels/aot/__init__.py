"""Compiles kernels to machine code for GPUs that are not there, and says what came out.

XLA's CUDA compiler runs without a driver. What it produces for a chip tells registers, spills,
shared memory and instructions; what it refuses fails here instead of on a user's GPU. Only a GPU
can tell speed, and that the numbers are right after the assembler.

    python -m pallas_kernels.aot install    # the compiler, once, beside the environment's packages
    python -m pallas_kernels.aot decode     # every case whose name holds "decode", on every chip

Compiling happens in processes of their own: they alone see the CUDA plugin, and an instruction that
a chip lacks ends the process that meets it.
"""

from pallas_kernels.aot.case import Case, Program
from pallas_kernels.aot.chips import CHIPS, Chip
from pallas_kernels.aot.driver import compile_cases
from pallas_kernels.aot.report import KernelReport, Report
from pallas_kernels.aot.toolchain import Toolchain, ToolchainError

__all__ = [
    "CHIPS",
    "Case",
    "Chip",
    "KernelReport",
    "Program",
    "Report",
    "Toolchain",
    "ToolchainError",
    "compile_cases",
]
