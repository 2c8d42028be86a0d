"""Captures on disk: one npz file a sequence, written as soon as the sequence ends.

So memory holds what runs, however many prompts there are. numpy cannot name bfloat16 in a file:
such arrays are stored as their bits, under a name that says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxinfer.hooks import Captures

POSITIONS = "positions"
BITS = "|bfloat16"


class CaptureFolder:
    """Writes captures to a folder, which is made if need be.

    Args:
        folder: Files are `INDEX-SAMPLE.npz`, both counted from 0, INDEX that of the prompt. What
            has the name of one is replaced.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def keeper(self, index: int) -> Callable[[int, Captures], Captures]:
        """Return what writes the captures of a prompt's samples, and returns those on disk."""
        return partial(self._keep, index)

    def _keep(self, index: int, sample: int, captures: Captures) -> Captures:
        path = self._folder / f"{index:06}-{sample}.npz"
        arrays: dict[str, Any] = {POSITIONS: captures.positions}
        for name, x in captures.arrays.items():
            if x.dtype == ml_dtypes.bfloat16:
                arrays[name + BITS] = x.view(np.uint16)
            else:
                arrays[name] = x
        # A file that is there is whole.
        partly = path.with_suffix(".part")
        with partly.open("wb") as file:
            np.savez(file, **arrays)
        partly.replace(path)
        size = path.stat().st_size
        return dataclasses.replace(captures, arrays=CaptureFile(path), num_saved_bytes=size)


class CaptureFile(Mapping[str, np.ndarray]):
    """What one file holds, by name; each array is read when it is asked for.

    Args:
        path: As written by `CaptureFolder`.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        with np.load(self.path) as file:
            self._names = [n.removesuffix(BITS) for n in file.files if n != POSITIONS]
            self.positions: np.ndarray = file[POSITIONS]
            self._bits = frozenset(n for n in file.files if n.endswith(BITS))

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(name)
        with np.load(self.path) as file:
            if name + BITS in self._bits:
                return file[name + BITS].view(ml_dtypes.bfloat16)
            return file[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
