"""What every checkpoint looks like from outside: HF names, an HF-style config, numpy arrays.

Nothing here knows a file format or a model.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np


@dataclass(frozen=True)
class TensorInfo:
    """One tensor without its data.

    Attributes:
        shape: In HF layout (`[out, in]` for a linear layer).
        dtype: How it is stored: "float32", "bfloat16", "float16", "Q4_1", …
        nbytes: Bytes it takes in the file.
    """

    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True)
class TextAssets:
    """What a tokenizer can be built from; either `tokenizer_json` or `gguf_metadata` is set.

    Attributes:
        tokenizer_json: Text of `tokenizer.json`.
        tokenizer_config: Content of `tokenizer_config.json`, or {}.
        chat_template: Jinja source of the default chat template.
        gguf_metadata: All `tokenizer.*` keys of a GGUF file.
    """

    tokenizer_json: str | None = None
    tokenizer_config: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    gguf_metadata: dict[str, Any] | None = None


@runtime_checkable
class Checkpoint(Protocol):
    """Named tensors plus a configuration.

    `read` may be called from several threads at once.

    Attributes:
        path: The file or folder it was opened from.
        config: In the manner of HF's `config.json`, whatever the format.
        generation_config: `generation_config.json`, or {}.
        text: Where the tokenizer comes from.
    """

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    text: TextAssets

    def names(self) -> list[str]:
        """HF names of all tensors, such as `model.layers.0.self_attn.q_proj.weight`."""
        ...

    def info(self, name: str) -> TensorInfo:
        """Shape and stored number format of one tensor, without touching its data."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor in HF layout.

        Float tensors keep their dtype and may be read-only views of the mapped file; quantized
        blocks come back dequantized, as float32.
        """
        ...

    def close(self) -> None:
        """Let go of the files; arrays already read stay valid."""
        ...
