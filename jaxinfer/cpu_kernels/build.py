"""From C++ sources to a loaded library: compiled once, on the machine that runs it, and kept.

A package can be installed without a compiler, from a wheel or read-only, so nothing is compiled at
installation. The first process that wants the kernels compiles them into the user's cache folder,
under a name made of everything that went into them; processes that start at once wait for it.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax
import jaxlib

SOURCES = Path(__file__).parent / "src"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=fast", "-fvisibility=hidden", "-pthread")
TIMEOUT_S = 600

_AVX512 = (
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma"),
    # With the default tuning, GCC 12 keeps half of the largest int8 tile on the stack: 269 GOP/s a
    # core instead of 378.
    "-mtune=skylake-avx512",
)
ISA_FLAGS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    # machine → instruction set → how to compile for it
    "x86_64": {
        "portable": (),
        "avx2": ("-mavx2", "-mfma"),
        "avx512": _AVX512,
        "avx512_vnni": (*_AVX512, "-mavx512vnni"),
        "avx512_bf16": (*_AVX512, "-mavx512vnni", "-mavx512bf16"),
    },
    "other": {"portable": ()},
}
TARGETS = ("jaxinfer_linear", "jaxinfer_attention", "jaxinfer_attention_in_place")


class BuildError(Exception):
    """There is no library, for a reason that one line tells."""


@dataclass(frozen=True)
class Library:
    """The loaded kernels, known to XLA.

    Attributes:
        isa_names: Instruction sets that this processor has and the library knows, best first.
        suffix: Of the names under which XLA knows the kernels: an executable that was compiled for
            others, and kept, must not find these.
    """

    isa_names: tuple[str, ...]
    suffix: str


@functools.cache
def load_library() -> Library:
    """Return the kernels, compiled now if they never were.

    Raises:
        BuildError: There is no compiler, or it fails.
    """
    compiler = find_compiler()
    digest = digest_of(compiler)
    path = cached_library(compiler, digest)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} does not load: {error}") from error
    suffix = "_" + digest[:12]
    for target in TARGETS:
        handler = jax.ffi.pycapsule(getattr(library, target))
        jax.ffi.register_ffi_target(target + suffix, handler, platform="cpu")
    names = library.jaxinfer_isa_names
    names.restype = ctypes.c_char_p
    return Library(tuple(names().decode().split()), suffix)


def compile_library(compiler: str, out: Path) -> None:
    """Compile and link the kernels to `out`.

    Raises:
        BuildError: Says what the compiler says.
    """
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        sources = sorted(source for source in SOURCES.glob("*.cc") if source.name != "isa.cc")
        objects = compile_objects(compiler, Path(folder), sources, FLAGS)
        linked = Path(folder) / "linked.so"
        run([compiler, *FLAGS, "-shared", *objects, "-o", str(linked)])
        # Whole or not at all: a reader may look at any moment.
        os.replace(linked, out)


def compile_objects(
    compiler: str, folder: Path, sources: Sequence[Path], flags: Sequence[str]
) -> list[str]:
    """Compile `sources`, and the kernels of each instruction set, several at a time.

    Returns:
        The object files, in `folder`.

    Raises:
        BuildError: Says what the compiler says.
    """
    include = ("-isystem", jax.ffi.include_dir(), f"-I{SOURCES}")
    machine = platform.machine().lower().replace("amd64", "x86_64")
    isas = ISA_FLAGS.get(machine, ISA_FLAGS["other"])
    # The largest first.
    units = [
        (SOURCES / "isa.cc", folder / f"isa_{isa}.o", (f"-DISA={isa}", *isa_flags))
        for isa, isa_flags in reversed(list(isas.items()))
    ]
    units += [(source, folder / f"{source.stem}.o", include) for source in sources]
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        jobs = [
            pool.submit(run, [compiler, *flags, *more, "-c", str(source), "-o", str(made)])
            for source, made, more in units
        ]
        for job in jobs:
            job.result()
    return [str(made) for _, made, _ in units]


def run(command: Sequence[str]) -> str:
    """Run a command and return what it prints.

    Raises:
        BuildError: It failed; the first line of its complaint.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} did not run: {error}") from error
    if done.returncode:
        reason = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr)
        raise BuildError(f"{command[0]} failed: {reason.strip()[:500]}")
    return done.stdout


def find_compiler() -> str:
    """Return the path of a C++ compiler.

    Raises:
        BuildError: There is none.
    """
    for name in COMPILERS:
        found = shutil.which(name)
        if found:
            return found
    raise BuildError("there is no C++ compiler")


def cached_library(compiler: str, digest: str) -> Path:
    """Return the library of this name, compiled now if it never was.

    Raises:
        BuildError: It cannot be.
    """
    folder = cache_dir()
    path = folder / f"{digest}.so"
    if path.exists():
        return path
    with _alone(folder / f"{digest}.lock"):
        # Another process may have been faster.
        if not path.exists():
            compile_library(compiler, path)
    return path


@contextmanager
def _alone(lock: Path) -> Generator[None]:
    """Hold a lock file, which its owner's end releases whatever happens."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def cache_dir() -> Path:
    """Return the user's folder for compiled kernels, or one that lasts as long as the machine."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    temporary = Path(tempfile.gettempdir()) / f"jaxinfer-{os.getuid()}"
    for folder in (Path(base) / "jaxinfer" / "kernels", temporary):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            continue
        # Somebody else's folder may hold anything.
        if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
            return folder
    raise BuildError("no folder to compile into can be written")


def digest_of(compiler: str) -> str:
    """Return a name for what the library is made of and by."""
    version = run([compiler, "--version"]).partition("\n")[0]
    facts = (version, platform.machine(), jaxlib.__version__, FLAGS, ISA_FLAGS)
    digest = hashlib.sha256(repr(facts).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:32]
