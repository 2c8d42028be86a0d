"""What has to be equal on all hosts and is not theirs to choose: the code, and the model's files.

A host with another code would make other calls, one with other weights other tokens, and nobody
would notice. Knows files only.
"""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path

WHOLE_BYTES = 2**20
SAMPLES, SAMPLE_BYTES = 64, 4096
_PACKAGES = ("jaxinfer", "pallas_kernels", "checkpoints")
_WEIGHTS = (".safetensors", ".gguf")


def facts(model: Path) -> dict[str, str]:
    """Return what has to be equal, by name.

    Args:
        model: File or folder of the weights. Of large files only samples are read, which two
            trainings of one architecture do not share.
    """
    root = Path(__file__).parents[2]
    code = [file for name in _PACKAGES for file in sorted((root / name).rglob("*.py"))]
    versions = (metadata.version(name) for name in ("jax", "jaxlib", "flax", "numpy"))
    return {
        "jax, jaxlib, flax, numpy": " ".join(versions),
        "code of jaxinfer": _digest(code, root),
        "model": _digest(_files_of(model), model if model.is_dir() else model.parent),
    }


def difference(ours: dict[str, str], theirs: dict[str, str]) -> str:
    """Return, in words, what differs; "" if nothing does."""
    differing = [name for name in theirs if ours.get(name) != theirs[name]]
    parts = [f"{name}: {ours.get(name)}, on host 0 {theirs[name]}" for name in differing]
    return "; ".join(parts)


def _files_of(model: Path) -> list[Path]:
    """The files that decide what is computed; text and training leftovers are host 0's affair.

    A folder of our own arrays is written anew by each conversion: its description stands for it.
    """
    if model.is_file():
        return [model]
    names = ("config.json", "model.safetensors.index.json", "jaxinfer.json")
    files = sorted(file for file in model.iterdir() if file.is_file())
    return [file for file in files if file.name in names or file.suffix in _WEIGHTS]


def _digest(files: list[Path], root: Path) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        size = file.stat().st_size
        # The name of a single file is its owner's choice.
        digest.update(f"{file.relative_to(root) if len(files) > 1 else ''}\0{size}\0".encode())
        with file.open("rb") as opened:
            if size <= WHOLE_BYTES:
                digest.update(opened.read())
                continue
            for i in range(SAMPLES):
                opened.seek((size - SAMPLE_BYTES) * i // (SAMPLES - 1))
                digest.update(opened.read(SAMPLE_BYTES))
    return digest.hexdigest()
