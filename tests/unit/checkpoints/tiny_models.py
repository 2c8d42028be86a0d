"""Tiny random checkpoints, written by the reference libraries (`gguf`, `safetensors`)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FF, VOCAB = 2, 64, 4, 2, 16, 96, 40

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "intermediate_size": FF,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": VOCAB,
    "tie_word_embeddings": True,
}


def llama_weights(dtype: Any = np.float16) -> dict[str, np.ndarray]:
    """HF names and layouts of a two-layer llama with tied embeddings."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        shapes |= {
            layer + "input_layernorm.weight": (HIDDEN,),
            layer + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            layer + "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            layer + "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            layer + "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            layer + "post_attention_layernorm.weight": (HIDDEN,),
            layer + "mlp.gate_proj.weight": (FF, HIDDEN),
            layer + "mlp.up_proj.weight": (FF, HIDDEN),
            layer + "mlp.down_proj.weight": (HIDDEN, FF),
        }
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def permute_rope(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the rows of Q and K."""
    halves = weights.reshape(num_heads, 2, -1, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def write_gguf(
    path: Path,
    tensors: Mapping[str, np.ndarray | tuple[np.ndarray, gguf.GGMLQuantizationType]],
    arch: str = "llama",
    keys: Mapping[str, Any] | None = None,
) -> Path:
    """A GGUF file of GGUF-named tensors; a tuple gives raw block bytes and their type."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("tiny")
    add = {bool: "add_bool", int: "add_uint32", float: "add_float32", str: "add_string"}
    for key, value in (default_keys(arch) | dict(keys or {})).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            getattr(writer, add[type(value)])(key, value)
    for name, tensor in tensors.items():
        data, kind = tensor if isinstance(tensor, tuple) else (tensor, None)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def default_keys(arch: str) -> dict[str, Any]:
    """Metadata of the tiny model."""
    return {
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.block_count": LAYERS,
        f"{arch}.feed_forward_length": FF,
        f"{arch}.context_length": 128,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.attention.layer_norm_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 10000.0,
        f"{arch}.rope.dimension_count": HEAD_DIM,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(VOCAB)],
        "tokenizer.ggml.token_type": [1] * VOCAB,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ messages }}",
    }


def gguf_llama_tensors(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """HF weights → what llama.cpp's converter would write, by its own table of names."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    tensors = {}
    for name, array in weights.items():
        if ".q_proj." in name:
            array = permute_rope(array, HEADS)
        elif ".k_proj." in name:
            array = permute_rope(array, KV_HEADS)
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None
        tensors[gguf_name] = array
    return tensors


def write_llama_gguf(path: Path, dtype: Any = np.float16, **keys: Any) -> Path:
    """The tiny llama as a GGUF file."""
    return write_gguf(path, gguf_llama_tensors(llama_weights(dtype)), keys=keys)


def write_llama_folder(folder: Path, dtype: Any = np.float16, shards: int = 1) -> Path:
    """The tiny llama as an HF folder with one file, or shards and an index."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    (folder / "tokenizer.json").write_text('{"model": {}}')
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    weights = llama_weights(dtype)
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    weight_map = {}
    names = list(weights)
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: weights[name] for name in names[shard::shards]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
