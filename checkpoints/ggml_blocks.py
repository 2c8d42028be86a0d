"""ggml's number formats: bytes of one tensor → a numpy array.

The block formats themselves are decoded by the `gguf` package (`gguf.quants`), which llama.cpp
maintains beside its C code. Knows no file and no tensor name.
"""

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize

from checkpoints.errors import UnsupportedDtypeError

# type number → (name, numbers per block, bytes per block)
BLOCK_SIZES: dict[int, tuple[str, int, int]] = {
    kind.value: (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()
}

PLAIN_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
}

# Blocks decoded at a time: the intermediates (some ten times the bytes of the blocks) stay in the
# CPU's cache, and a large embedding never needs more than its result.
_CHUNK_BLOCKS = 2048


def decode(data: np.ndarray, type_name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The numbers in `data`: a view for plain types, a new float32 array for block types.

    Args:
        data: uint8 bytes of the whole tensor.
        type_name: Of the ggml type.
        shape: Row-major; its last axis is a multiple of the type's block size.

    Raises:
        UnsupportedDtypeError: The `gguf` package cannot decode this type.
    """
    if type_name in PLAIN_DTYPES:
        return data.view(PLAIN_DTYPES[type_name]).reshape(shape)
    kind = GGMLQuantizationType[type_name]
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = data.reshape(-1, block_bytes)
    numbers = np.empty((blocks.shape[0], block_size), np.float32)
    for start in range(0, blocks.shape[0], _CHUNK_BLOCKS):
        chunk = blocks[start : start + _CHUNK_BLOCKS]
        numbers[start : start + _CHUNK_BLOCKS] = _dequantize(chunk, kind)
    return numbers.reshape(shape)


def _dequantize(blocks: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    try:
        # One long row: gguf works on groups of rows, and here one group is one call.
        return gguf_dequantize(blocks.reshape(1, -1), kind).reshape(blocks.shape[0], -1)
    except NotImplementedError as error:
        raise UnsupportedDtypeError(
            f"the installed gguf package cannot decode ggml type {kind.name}; "
            "upgrade it with `pip install -U gguf`, or use a file with another quantization"
        ) from error
