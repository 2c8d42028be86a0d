"""Write a tiny checkpoint as a GGUF file the way llama.cpp's converter would.

It knows GGUF's conventions for arch `llama`: rows of Q and K permuted, Llama 3's RoPE scaling as a
tensor of divisors, one-dimensional tensors always float32, the vocabulary in the metadata. The file
is written by the `gguf` package.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from oracle import GGUF_NAMES, rope_inv_freq
from tiny import BOS, CHAT_TEMPLATE, EOS, PAD, SPECIAL_TOKENS

FILE_TYPES = {
    gguf.GGMLQuantizationType.F32: gguf.LlamaFileType.ALL_F32,
    gguf.GGMLQuantizationType.F16: gguf.LlamaFileType.MOSTLY_F16,
    gguf.GGMLQuantizationType.Q8_0: gguf.LlamaFileType.MOSTLY_Q8_0,
}


def write_gguf(
    file: Path,
    kind: gguf.GGMLQuantizationType,
    config: dict[str, Any],
    weights: dict[str, np.ndarray],
    tokenizer: tokenizers.Tokenizer,
) -> None:
    """Write `weights`, which are float32 under Hugging Face names; 2-D ones become `kind`."""
    writer = gguf.GGUFWriter(file, "llama")
    _add_shape(writer, config)
    writer.add_name(file.stem)
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_vocabulary(writer, tokenizer)
    heads = {
        "q_proj": config["num_attention_heads"],
        "k_proj": config["num_key_value_heads"],
    }
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    rope = _rope(config)
    if rope["rope_type"] == "llama3":
        base = rope_inv_freq({"rope_theta": rope["rope_theta"]}, head_dim)
        divisors = base / rope_inv_freq(config, head_dim)
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
    for name, a in weights.items():
        projection = name.split(".")[-2]
        if projection in heads:
            a = permute(a, heads[projection])
        stored = kind if a.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(_gguf_name(name), gguf.quants.quantize(a, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def permute(a: np.ndarray, num_heads: int) -> np.ndarray:
    """Put the two rows that rotate together next to each other: (0, H/2, 1, H/2 + 1, ...)."""
    rows = a.reshape(num_heads, 2, -1, *a.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(a.shape))


def _add_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    D, N = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim", D // N)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(D)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(N)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    rope = _rope(config)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Return RoPE's settings in the newer spelling, whichever `config` uses."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", config.get("rope_theta"))
    return rope


def _add_vocabulary(writer: gguf.GGUFWriter, tokenizer: tokenizers.Tokenizer) -> None:
    size = tokenizer.get_vocab_size()
    tokens = [tokenizer.id_to_token(i) for i in range(size)]
    special = set(SPECIAL_TOKENS)
    types = [
        gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens
    ]
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_eot_token_id(PAD)
    writer.add_pad_token_id(PAD)
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHAT_TEMPLATE)


def _gguf_name(name: str) -> str:
    hf_to_gguf = {hf: stem for stem, hf in GGUF_NAMES.items()}
    stem, kind = name.rsplit(".", 1)
    if not stem.startswith("model.layers."):
        return f"{hf_to_gguf[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{hf_to_gguf[rest]}.{kind}"
