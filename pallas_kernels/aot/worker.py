"""The process that compiles: reads jobs from stdin, answers one line of JSON each.

Runs in the environment that `Toolchain.environment` makes. Whatever libraries print goes to a file,
so that standard output carries answers only.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.aot import assembly
from pallas_kernels.aot.case import Case, Jitted, cases_of
from pallas_kernels.aot.chips import CHIPS, targeting
from pallas_kernels.aot.report import KernelReport, Report
from pallas_kernels.aot.toolchain import Toolchain


def main(toolchain: Toolchain, scratch: Path) -> None:
    """Answer every job; "started" comes before each, so that a crash has an address."""
    with os.fdopen(os.dup(1), "w") as answers:
        printed = os.open(scratch / "printed", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.dup2(printed, 1)
        for job in json.load(sys.stdin):
            case = cases_of(job["module"])[job["case"]]
            print(json.dumps({"started": job}), file=answers, flush=True)
            report = compile_case(case, job["chip"], toolchain, scratch)
            print(json.dumps({"report": report.to_json()}), file=answers, flush=True)


def compile_case(case: Case, chip: str, toolchain: Toolchain, scratch: Path) -> Report:
    """Compile one case for one chip. Exceptions are results; only a crash of the process is not."""
    for leftover in (*scratch.glob("records/*"), *scratch.glob("dump/*")):
        leftover.unlink()
    os.ftruncate(1, 0)
    # What was traced for another chip may have chosen other tiles.
    jax.clear_caches()
    start = time.monotonic()
    error, facts = None, {}
    try:
        facts = _compile(case, chip)
    except Exception as e:
        error = f"{type(e).__name__}: {e}"
    seconds = round(time.monotonic() - start, 2)
    sys.stdout.flush()
    return Report(
        case=case.name,
        chip=chip,
        kernels=tuple(_kernels(case, toolchain, scratch)),
        error=error,
        seconds=seconds,
        facts=facts,
    )


def _compile(case: Case, chip: str) -> dict[str, Any]:
    mesh = CHIPS[chip].mesh(case.num_devices)
    whole = NamedSharding(mesh, PartitionSpec())

    def placed(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = x.sharding or whole
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    with targeting(mesh):
        program = case.build(mesh)
        args = jax.tree.map(placed, program.args)
        # A jitted function may be jitted again, but then it donates nothing.
        function = program.function
        jitted = function if isinstance(function, Jitted) else jax.jit(function)
        compiled = jitted.lower(*args).compile()
        return program.inspect(compiled) if program.inspect else {}


def _kernels(case: Case, toolchain: Toolchain, scratch: Path) -> list[KernelReport]:
    """Join what assembler, disassembler and XLA know of each kernel."""
    launches: dict[str, assembly.Launch] = {}
    for thunks in sorted(scratch.glob("dump/*thunk_sequence.txt")):
        launches |= assembly.read_launches(thunks.read_text())
    mosaic = iter(assembly.read_mosaic_resources((scratch / "printed").read_text()))
    kernels = []
    for log in sorted(scratch.glob("records/*.log"), key=lambda path: path.stat().st_mtime_ns):
        cubin = log.with_suffix(".cubin")
        if not cubin.exists():
            continue
        found = assembly.read_assembler_log(log.read_text())
        # A whole step has a hundred kernels of XLA's, and the disassembler takes 0.3 s for each.
        ours = any(kernel.name.startswith(case.kernels) for kernel in found)
        instructions = assembly.count_instructions(toolchain.disassemble(cubin)) if ours else {}
        for kernel in found:
            launch = launches.get(kernel.name, assembly.Launch((), 0, 0))
            dynamic = launch.shared_bytes
            if "mosaic" in kernel.name:
                # Not a thunk of XLA's: Mosaic launches its kernels itself.
                dynamic = next(mosaic, 0)
            kernels.append(
                KernelReport(
                    name=kernel.name,
                    target=kernel.target,
                    registers=kernel.registers,
                    spill_bytes=kernel.spill_bytes,
                    stack_bytes=kernel.stack_bytes,
                    shared_bytes=kernel.shared_bytes + dynamic,
                    threads=launch.threads,
                    grid=launch.grid,
                    instructions=dict(instructions.get(kernel.name, {})),
                )
            )
    return kernels


if __name__ == "__main__":
    main(Toolchain(Path(sys.argv[1])), Path(sys.argv[2]))
