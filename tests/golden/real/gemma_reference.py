"""Gemma 3's GGUF file as transformers would have it: config, weights, token ids.

A second reading of the format, with no jaxinfer: norms are stored with 1 added, no rows are
permuted, the pattern of windows and the local RoPE base are not in the file. Tokenization is
SentencePiece's BPE written out: the best-scored pair of neighbours merges first.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from smollm2_folder import read_metadata

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
USER_DEFINED = 4  # token_type of pieces that are cut out of a text before any merge


def load(file: Path):
    reader = gguf.GGUFReader(file)
    config = transformers.Gemma3TextConfig(**_config(read_metadata(reader)))
    config._attn_implementation = "eager"
    model = transformers.Gemma3ForCausalLM(config).to(torch.float32)
    weights = {}
    for tensor in reader.tensors:
        a = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        a = a.reshape([int(n) for n in reversed(tensor.shape)])
        if "norm" in tensor.name:
            a = a - np.float32(1)
        weights[_name(tensor.name)] = torch.from_numpy(a)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, strict=True)
    return model.eval()


def _config(meta: dict[str, Any]) -> dict[str, Any]:
    arch = {k.removeprefix("gemma3."): v for k, v in meta.items() if k.startswith("gemma3.")}
    layers = arch["block_count"]
    kinds = ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(layers)]
    bases = {"sliding_attention": 10000.0, "full_attention": arch["rope.freq_base"]}
    return {
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "hidden_size": arch["embedding_length"],
        "intermediate_size": arch["feed_forward_length"],
        "num_hidden_layers": layers,
        "num_attention_heads": arch["attention.head_count"],
        "num_key_value_heads": arch["attention.head_count_kv"],
        "head_dim": arch["attention.key_length"],
        "query_pre_attn_scalar": arch["attention.key_length"],
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": arch["context_length"],
        "rms_norm_eps": arch["attention.layer_norm_rms_epsilon"],
        "sliding_window": arch["attention.sliding_window"],
        "layer_types": kinds,
        "rope_parameters": {k: {"rope_type": "default", "rope_theta": b} for k, b in bases.items()},
        "tie_word_embeddings": True,
    }


def _name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in OUTER_NAMES:
        return f"{OUTER_NAMES[stem]}.{kind}"
    _, layer, stem = stem.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[stem]}.{kind}"


class Vocabulary:
    """SentencePiece's BPE over a GGUF file's pieces and scores, without a `<bos>` in front."""

    def __init__(self, meta: dict[str, Any]):
        tokens = meta["tokenizer.ggml.tokens"]
        kinds = meta["tokenizer.ggml.token_type"]
        self._ids = {token: i for i, token in enumerate(tokens)}
        self._scores = meta["tokenizer.ggml.scores"]
        whole = [t for t, kind in zip(tokens, kinds, strict=True) if kind == USER_DEFINED]
        whole.sort(key=len, reverse=True)
        self._whole = re.compile("(" + "|".join(map(re.escape, whole)) + ")")

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for i, part in enumerate(self._whole.split(text.replace(" ", "\u2581"))):
            ids += [self._ids[part]] if i % 2 else self._merge(list(part))
        return ids

    def _merge(self, pieces: list[str]) -> list[int]:
        while True:
            scored = [
                (self._scores[self._ids[a + b]], -i)
                for i, (a, b) in enumerate(itertools.pairwise(pieces))
                if a + b in self._ids
            ]
            if not scored:
                break
            at = -max(scored)[1]
            pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
        ids = []
        for piece in pieces:
            if piece in self._ids:
                ids.append(self._ids[piece])
            else:
                ids += [self._ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
        return ids
