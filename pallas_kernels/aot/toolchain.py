"""The CUDA compiler without CUDA: which packages it takes, where they lie, who sees them.

Among an environment's packages they would make every `import jax` load a GPU plugin and complain
that there is no driver. So they lie apart, and only the processes that compile have them on their
path.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

TOOLS = ("nvidia-cuda-nvcc==13.5.37", "nvidia-nvvm==13.5.37", "nvidia-cuda-nvdisasm==13.5.37")
"""Assembler, libdevice and disassembler. Pinned, so that register counts change only on purpose."""

PLUGINS = ("jax-cuda13-plugin", "jax-cuda13-pjrt")
"""XLA's CUDA compiler, of the same version as jax."""


class ToolchainError(RuntimeError):
    """There is no compiler, or it belongs to another jax."""


@dataclass(frozen=True)
class Toolchain:
    """A folder with the compiler's packages.

    Plugin and tools lie in different folders: XLA prefers an assembler that lies beside its plugin
    to ours, which records what it is asked.

    Attributes:
        folder: Where they lie.
    """

    folder: Path

    @classmethod
    def of_environment(cls) -> Toolchain:
        """The one that `install` puts into this Python environment."""
        return cls(Path(sys.prefix) / "gpu-compiler")

    @property
    def plugin(self) -> Path:
        return self.folder / "plugin"

    @property
    def cuda(self) -> Path:
        return self.folder / "tools" / "nvidia" / "cu13"

    def check(self) -> None:
        """Make sure that this process's jax can use it.

        Raises:
            ToolchainError: Says what is missing and how to get it.
        """
        import jax

        wanted = f"jax_cuda13_plugin-{jax.__version__}.dist-info"
        if not (self.cuda / "bin" / "ptxas").exists() or not self.plugin.exists():
            raise ToolchainError("no GPU compiler here; `make gpu-compiler` installs it")
        if not (self.plugin / wanted).exists():
            found = [path.name for path in self.plugin.glob("jax_cuda13_plugin-*.dist-info")]
            raise ToolchainError(
                f"the GPU compiler is {', '.join(found) or 'incomplete'}, but jax is "
                f"{jax.__version__}; `make gpu-compiler` installs the right one"
            )

    def install(self) -> None:
        """Install it with pip; 250 MB to download.

        Raises:
            subprocess.CalledProcessError: pip failed; it has said why.
        """
        import jax

        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
        plugins = [f"{name}=={jax.__version__}" for name in PLUGINS]
        for folder, packages in ((self.plugin, plugins), (self.cuda.parents[1], TOOLS)):
            command = [*pip, "--quiet", "--no-deps", "--upgrade", "--target", str(folder)]
            subprocess.run([*command, *packages], check=True)

    def environment(self, scratch: Path) -> dict[str, str]:
        """Return the environment of a process that compiles; writes the front end into `scratch`.

        Args:
            scratch: Empty folder of that process. Records appear in `scratch/records`, XLA's dumps
                in `scratch/dump`.
        """
        root = scratch / "cuda"
        (root / "bin").mkdir(parents=True)
        (scratch / "records").mkdir()
        for name in ("nvvm", "lib", "bin/nvlink"):
            (root / name).symlink_to(self.cuda / name)
        front = root / "bin" / "ptxas"
        front.write_text(
            _FRONT_END.format(
                ptxas=shlex.quote(str(self.cuda / "bin" / "ptxas")),
                records=shlex.quote(str(scratch / "records")),
            )
        )
        front.chmod(0o755)
        paths = [str(self.plugin), *filter(None, sys.path)]
        flags = [f"--xla_gpu_cuda_data_dir={root}", f"--xla_dump_to={scratch / 'dump'}"]
        return {
            **os.environ,
            # A driver is never looked for, and the plugin is still there to compile with.
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join(paths),
            "PATH": f"{root / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
            "XLA_FLAGS": " ".join(flags),
            # Compiled anew each time: a cache would hide what the assembler says.
            "JAX_ENABLE_COMPILATION_CACHE": "false",
            "MOSAIC_GPU_DUMP_RESOURCES": "1",
        }

    def disassemble(self, cubin: Path) -> str:
        """Return the machine code of an assembled file as text."""
        # Where jumps lead is of no interest, and takes a quarter of the time to find out.
        command = [str(self.cuda / "bin" / "nvdisasm"), "-c", "-ndf", str(cubin)]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=60
        ).stdout


# XLA asks the assembler questions about itself, which are handed through; what it has assembled is
# recorded with the assembler's statistics.
_FRONT_END = """\
#!/bin/sh
case "$*" in *--version* | *input-as-string*) exec {ptxas} "$@" ;; esac
record={records}/$$
{ptxas} -v "$@" >"$record.log" 2>&1
status=$?
cat "$record.log" >&2
previous=
for argument; do
    [ "$previous" = -o ] && [ -f "$argument" ] && cp "$argument" "$record.cubin"
    previous=$argument
done
exit $status
"""
