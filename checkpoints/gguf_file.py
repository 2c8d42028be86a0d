"""A GGUF file as a `Checkpoint`: HF names and layouts over memory-mapped ggml tensors.

Undoes what llama.cpp's converter does to weights. Builds no model.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
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
from checkpoints.gguf_architectures import ROPE_TENSORS, GgufArchitecture
from checkpoints.gguf_config import architecture_of, to_hf_config
from checkpoints.gguf_header import GgufTensor, read_header
from checkpoints.gguf_layouts import AS_IS, Layout
from checkpoints.mapped_file import MappedFile

_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_GLOBAL_TENSOR = re.compile(r"(\w+)\.(weight|bias)")

# Names are made for so many: a damaged number must not ask for gigabytes.
_MAX_STACKED = 10_000


@dataclass(frozen=True)
class _Source:
    """What an HF tensor is made of."""

    parts: tuple[GgufTensor, ...]
    layout: Layout = AS_IS


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
        source = self._source(name)
        shape = source.layout.shape([part.shape for part in source.parts])
        type_name = source.parts[0].type_name
        plain = PLAIN_DTYPES.get(type_name)
        nbytes = sum(part.nbytes for part in source.parts)
        return TensorInfo(shape, plain.name if plain else type_name, nbytes)

    def read(self, name: str) -> np.ndarray:
        """The tensor in HF layout; block types as float32."""
        source = self._source(name)
        parts = [self._decode(part) for part in source.parts]
        try:
            array = source.layout.join(parts, self.config)
        except ValueError as error:
            shapes = ", ".join(str(list(part.shape)) for part in source.parts)
            raise CorruptFileError(
                f"{self.path}: {name} cannot be made of shape {shapes}; convert the model again"
            ) from error
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

    def _source(self, name: str) -> _Source:
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
    tensors: Mapping[str, GgufTensor], row: GgufArchitecture, path: Path
) -> dict[str, _Source]:
    renamed: dict[str, _Source] = {}
    unknown, incomplete = [], []
    joined_by_part = {part: joined for joined in row.joined_tensors for part in joined.parts}
    for name, tensor in tensors.items():
        if name in ROPE_TENSORS:
            continue
        layer = _LAYER_TENSOR.fullmatch(name)
        outside = _GLOBAL_TENSOR.fullmatch(name)
        prefix = row.layer_prefix.format(i=layer[1]) if layer else ""
        if layer and (joined := joined_by_part.get(f"{layer[2]}.{layer[3]}")):
            needed = [f"blk.{layer[1]}.{part}" for part in joined.parts]
            if missing := [part for part in needed if part not in tensors]:
                incomplete.append(f"{name} without {', '.join(missing)}")
            elif name == needed[0]:
                parts = tuple(tensors[part] for part in needed)
                ranks = tuple(len(part.shape) for part in parts)
                if joined.layout.ranks not in ((), ranks):
                    incomplete.append(f"{', '.join(needed)} with {ranks} dimensions")
                renamed[prefix + joined.hf_name] = _Source(parts, joined.layout)
        elif layer and layer[2] in row.stacked_tensors:
            pattern = f"{prefix}{row.stacked_tensors[layer[2]]}.{layer[3]}"
            slices = _slices(tensor)
            if not slices:
                incomplete.append(f"{name} of shape {list(tensor.shape)}")
            renamed |= {pattern.format(n=n): _Source((part,)) for n, part in enumerate(slices)}
        elif layer and layer[2] in row.layer_tensors:
            renamed[f"{prefix}{row.layer_tensors[layer[2]]}.{layer[3]}"] = _Source((tensor,))
        elif outside and outside[1] in row.global_tensors:
            renamed[f"{row.global_tensors[outside[1]]}.{outside[2]}"] = _Source((tensor,))
        else:
            unknown.append(name)
    if unknown:
        raise UnknownArchitectureError(
            f"{path}: {len(unknown)} tensors have no place in a {row.model_type} model: "
            f"{', '.join(unknown[:20])}{' …' if len(unknown) > 20 else ''}; "
            "the file holds a variant that is not known here"
        )
    if incomplete:
        raise CorruptFileError(
            f"{path}: {'; '.join(incomplete[:20])}: not what a {row.model_type} model holds; "
            "convert the model again with a current llama.cpp"
        )
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CorruptFileError(
            f"{path}: expected a matrix token_embd.weight, got "
            f"{f'shape {list(embedding.shape)}' if embedding else f'{len(tensors)} other tensors'}"
            "; the file is not a whole language model"
        )
    return renamed


def _slices(tensor: GgufTensor) -> list[GgufTensor]:
    """The tensors that are stacked in one: each lies in one piece."""
    number, *shape = tensor.shape
    if not shape or not 0 < number <= _MAX_STACKED:
        return []
    nbytes = tensor.nbytes // number
    return [
        GgufTensor(tuple(shape), tensor.type_name, tensor.offset + n * nbytes, nbytes)
        for n in range(number)
    ]


def _text_assets(metadata: dict[str, Any]) -> TextAssets:
    tokenizer = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
    texts = {key: value for key, value in tokenizer.items() if isinstance(value, str)}
    return TextAssets(
        tokenizer_json=texts.get("tokenizer.huggingface.json"),
        chat_template=texts.get("tokenizer.chat_template"),
        gguf_metadata=tokenizer,
    )
