"""One safetensors file: names, shapes, and zero-copy arrays over a memory map.

Parsed here because the `safetensors` package hands bfloat16 to numpy only in some versions and
copies every tensor. Format: https://huggingface.co/docs/safetensors. Knows no model.
"""

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints.checkpoint import TensorInfo
from checkpoints.errors import (
    BadMagicError,
    CorruptFileError,
    DuplicateTensorError,
    TruncatedFileError,
    UnsupportedDtypeError,
)
from checkpoints.mapped_file import MappedFile

# The limit that the format itself sets.
MAX_HEADER_BYTES = 100_000_000

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


class SafetensorsFile:
    """The tensors of one file; `tensors` maps each name to its `TensorInfo`."""

    def __init__(self, path: Path):
        """Read and check the header; no tensor data is touched.

        Raises:
            FileFormatError: The subclass says how the file is broken.
        """
        self._file = MappedFile(path)
        header, data_start = _read_header(self._file)
        self.tensors: dict[str, TensorInfo] = {}
        self._offsets: dict[str, int] = {}
        for name, entry in header.items():
            if name != "__metadata__":
                self.tensors[name], start = _check_entry(path, name, entry)
                self._offsets[name] = data_start + start
        for name, info in self.tensors.items():
            end = self._offsets[name] + info.nbytes
            if end > self._file.size:
                raise TruncatedFileError(
                    f"{path} ends inside its tensor data: {name!r} ends at byte {end}, but the "
                    f"file has {self._file.size} bytes; fetch the file again"
                )

    def read(self, name: str) -> np.ndarray:
        """A read-only view of one tensor of this file."""
        info = self.tensors[name]
        data = self._file.view(self._offsets[name], info.nbytes)
        return data.view(np.dtype(info.dtype)).reshape(info.shape)

    def close(self) -> None:
        """Let go of the file; arrays already read stay valid."""
        self._file.close()


def _read_header(file: MappedFile) -> tuple[dict[str, Any], int]:
    path = file.path
    if file.size < 8:
        raise TruncatedFileError(
            f"{path} has {file.size} bytes, a safetensors file at least 8; fetch the file again"
        )
    length = int.from_bytes(file.buffer[:8], "little")
    first = file.buffer[8:9]
    if length > MAX_HEADER_BYTES or first not in (b"{", b""):
        raise BadMagicError(
            f"{path} is not a safetensors file: expected a header of at most {MAX_HEADER_BYTES} "
            f"bytes that starts with b'{{', got a length of {length} and {first!r}; "
            "check that the download is the model itself and not an error page"
        )
    if 8 + length > file.size:
        raise TruncatedFileError(
            f"{path} ends inside its header: expected {8 + length} bytes, got {file.size}; "
            "fetch the file again"
        )
    try:
        header = json.loads(file.buffer[8 : 8 + length], object_pairs_hook=_without_duplicates)
    except DuplicateTensorError as error:
        raise DuplicateTensorError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(
            f"{path} has a header that is not JSON ({error}); fetch the file again"
        ) from error
    if not isinstance(header, dict):
        raise CorruptFileError(f"{path}: expected a JSON object as header, got {header!r:.80}")
    return header, 8 + length


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise DuplicateTensorError(f"the header names {', '.join(map(repr, twice))} twice")
    return result


def _check_entry(path: Path, name: str, entry: Any) -> tuple[TensorInfo, int]:
    try:
        dtype_name, shape = entry["dtype"], tuple(entry["shape"])
        start, stop = entry["data_offsets"]
        numbers = (*shape, start, stop)
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers):
            raise TypeError(f"{numbers} are not all whole numbers ≥ 0")
    except (TypeError, KeyError, ValueError) as error:
        raise CorruptFileError(
            f"{path}: tensor {name!r} has a malformed entry {entry!r:.120} ({error}); "
            "fetch the file again"
        ) from error
    if dtype_name not in DTYPES:
        raise UnsupportedDtypeError(
            f"{path}: tensor {name!r} has the number format {dtype_name!r}; "
            f"{', '.join(DTYPES)} are read"
        )
    dtype = DTYPES[dtype_name]
    nbytes = math.prod(shape) * dtype.itemsize
    if stop - start != nbytes:
        raise CorruptFileError(
            f"{path}: tensor {name!r} of shape {list(shape)} and format {dtype_name} takes "
            f"{nbytes} bytes, but its entry gives it {stop - start}; fetch the file again"
        )
    return TensorInfo(shape, dtype.name, nbytes), start
