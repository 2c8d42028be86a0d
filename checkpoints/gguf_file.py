"""A GGUF file as a `Checkpoint`: HF names and layouts over memory-mapped ggml tensors.

Undoes what llama.cpp's converter does to weights. Builds no model.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.checkpoint import TensorInfo, TextAssets
from checkpoints.errors import (
    CorruptFileError,
    MissingFileError,
    UnknownArchitectureError,
    UnknownTensorError,
)
from checkpoints.ggml_blocks import PLAIN_DTYPES, decode
from checkpoints.gguf_architectures import GLOBAL_TENSORS, ROPE_TENSORS, GgufArchitecture
from checkpoints.gguf_config import architecture_of, to_hf_config
from checkpoints.gguf_header import GgufTensor, read_header
from checkpoints.mapped_file import MappedFile

_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_GLOBAL_TENSOR = re.compile(r"(\w+)\.(weight|bias)")


class GgufFile:
    """A `Checkpoint` over one GGUF file. See the protocol for the contract of its methods."""

    def __init__(self, path: Path):
        """Read the header; no tensor data is touched.

        Raises:
            CheckpointError: The subclass says what is wrong with the file.
        """
        self.path = path
        self.generation_config: dict[str, Any] = {}
        self._file = MappedFile(path)
        header = read_header(self._file)
        metadata = header.metadata
        if metadata.get("split.count", 1) != 1:
            raise MissingFileError(
                f"{path} is only one of {metadata['split.count']} parts of a model; "
                "join the parts with `llama-gguf-split --merge` and open the result"
            )
        _, self._architecture = architecture_of(metadata, path)
        self._tensors = _to_hf_names(header.tensors, self._architecture, path)
        factors = {
            name: self._decode(header.tensors[name]).astype(np.float64).tolist()
            for name in ROPE_TENSORS
            if name in header.tensors
        }
        shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
        self.config = to_hf_config(metadata, shapes, factors, path)
        self.text = _text_assets(metadata)

    def names(self) -> list[str]:
        """HF names, in the order of the file."""
        return list(self._tensors)

    def info(self, name: str) -> TensorInfo:
        """Shape and ggml type; plain float types carry numpy's name."""
        tensor = self._tensor(name)
        plain = PLAIN_DTYPES.get(tensor.type_name)
        return TensorInfo(tensor.shape, plain.name if plain else tensor.type_name, tensor.nbytes)

    def read(self, name: str) -> np.ndarray:
        """The tensor in HF layout; block types as float32."""
        array = self._decode(self._tensor(name))
        if self._architecture.permuted_rope and (".q_proj." in name or ".k_proj." in name):
            key = "num_attention_heads" if ".q_proj." in name else "num_key_value_heads"
            num_heads = self.config[key]
            if array.ndim < 1 or array.shape[0] % (2 * num_heads):
                raise CorruptFileError(
                    f"{self.path}: {name} has shape {list(array.shape)}, expected rows for "
                    f"{num_heads} heads ({key}); convert the model again"
                )
            array = unpermute_rope(array, num_heads)
        if self._architecture.norm_offset and name.endswith("norm.weight"):
            array = array - array.dtype.type(self._architecture.norm_offset)
        return array

    def close(self) -> None:
        """Let go of the file; arrays already read stay valid."""
        self._file.close()

    def _tensor(self, name: str) -> GgufTensor:
        if name not in self._tensors:
            raise UnknownTensorError(f"{self.path} has no tensor {name!r}; see names()")
        return self._tensors[name]

    def _decode(self, tensor: GgufTensor) -> np.ndarray:
        return decode(self._file.view(tensor.offset, tensor.nbytes), tensor.type_name, tensor.shape)


def unpermute_rope(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a Q or K projection (or its bias) back from llama.cpp's order into HF's.

    llama.cpp rotates neighbouring pairs (0,1), (2,3), …; HF rotates (0, H/2), (1, H/2+1), …. The
    converter (`LlamaModel.permute` in llama.cpp's `convert_hf_to_gguf.py`) interleaves the halves
    of each head; this is its inverse: row `2i + h` of a head becomes row `i + h·H/2`.
    """
    rows = array.shape[0]
    pairs = array.reshape(num_heads, rows // num_heads // 2, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def _to_hf_names(
    tensors: dict[str, GgufTensor], row: GgufArchitecture, path: Path
) -> dict[str, GgufTensor]:
    renamed, unknown = {}, []
    for name, tensor in tensors.items():
        if name in ROPE_TENSORS:
            continue
        if (match := _LAYER_TENSOR.fullmatch(name)) and match[2] in row.layer_tensors:
            hf_name = f"model.layers.{match[1]}.{row.layer_tensors[match[2]]}.{match[3]}"
        elif (match := _GLOBAL_TENSOR.fullmatch(name)) and match[1] in GLOBAL_TENSORS:
            hf_name = f"{GLOBAL_TENSORS[match[1]]}.{match[2]}"
        else:
            unknown.append(name)
            continue
        renamed[hf_name] = tensor
    if unknown:
        raise UnknownArchitectureError(
            f"{path}: {len(unknown)} tensors have no place in a {row.model_type} model: "
            f"{', '.join(unknown[:20])}{' …' if len(unknown) > 20 else ''}; "
            "the file holds a variant that is not known here"
        )
    embedding = renamed.get("model.embed_tokens.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CorruptFileError(
            f"{path}: expected a matrix token_embd.weight, got "
            f"{f'shape {list(embedding.shape)}' if embedding else f'{len(tensors)} other tensors'}"
            "; the file is not a whole language model"
        )
    return renamed


def _text_assets(metadata: dict[str, Any]) -> TextAssets:
    tokenizer = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
    texts = {key: value for key, value in tokenizer.items() if isinstance(value, str)}
    return TextAssets(
        tokenizer_json=texts.get("tokenizer.huggingface.json"),
        chat_template=texts.get("tokenizer.chat_template"),
        gguf_metadata=tokenizer,
    )
