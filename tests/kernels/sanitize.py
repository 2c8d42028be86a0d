"""Builds and runs `sanitize.cc` under AddressSanitizer (with UBSan) and under ThreadSanitizer.

.venv/bin/python -m tests.kernels.sanitize [address] [thread]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jaxinfer.cpu_kernels.build import SOURCES, BuildError, compile_objects, find_compiler, run

SANITIZERS = {"address": ("address,undefined", 60), "thread": ("thread", 15)}
"""What the compiler is told, and rounds for each instruction set."""


def sanitize(kind: str) -> None:
    """Build and run.

    Raises:
        BuildError: There is no compiler, or it fails.
        subprocess.CalledProcessError: The sanitizer found something, and has said what.
    """
    names, rounds = SANITIZERS[kind]
    flags = ("-std=c++17", "-O1", "-g", "-pthread", f"-fsanitize={names}")
    flags += ("-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
    sources = [s for s in SOURCES.glob("*.cc") if s.name not in ("isa.cc", "handlers.cc")]
    compiler = find_compiler()
    with tempfile.TemporaryDirectory() as folder:
        main = Path(__file__).with_suffix(".cc")
        objects = compile_objects(compiler, Path(folder), [*sources, main], flags)
        program = str(Path(folder) / "sanitize")
        run([compiler, *flags, *objects, "-o", program])
        subprocess.run([program, str(rounds)], check=True, timeout=600)


def main() -> None:
    """Run those named, or all."""
    try:
        find_compiler()
    except BuildError as error:
        sys.stdout.write(f"skipped: {error}\n")
        return
    for kind in sys.argv[1:] or SANITIZERS:
        start = time.monotonic()
        sanitize(kind)
        sys.stdout.write(f"{kind}: {time.monotonic() - start:.0f} s\n")


if __name__ == "__main__":
    main()
