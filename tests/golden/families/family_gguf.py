"""Write a family's weights as a GGUF file the way llama.cpp's converter would.

It knows GGUF's conventions for the families of `GGUF_FAMILIES`: no rows are permuted (their halves
rotate against each other), Gemma's norms are stored with their 1 added, longrope's factors are
tensors, fused projections stay fused, one-dimensional tensors are always float32.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import dense
import gguf
import numpy as np
import spec
import tiny_gguf
import tokenizers

ARCHITECTURES = {
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GGUFFamily:
    """A GGUF file with the shape of a `Family`, its 2-D tensors stored as `kind`."""

    name: str
    family: spec.Family
    kind: gguf.GGMLQuantizationType


def _of(name: str, **change: Any) -> spec.Family:
    family = next(f for f in dense.FAMILIES if f.name == name)
    return dataclasses.replace(family, config=family.config | change, teeth=())


GGUF_FAMILIES = (
    GGUFFamily(name="qwen2_q8_0", family=_of("qwen2"), kind=gguf.GGMLQuantizationType.Q8_0),
    GGUFFamily(name="qwen3_f16", family=_of("qwen3"), kind=gguf.GGMLQuantizationType.F16),
    # The file does not say by what queries are scaled: readers take the head dimension.
    GGUFFamily(
        name="gemma3_f16",
        family=_of("gemma3", query_pre_attn_scalar=16),
        kind=gguf.GGMLQuantizationType.F16,
    ),
    GGUFFamily(
        name="phi3_longrope_q8_0",
        family=_of("phi3_longrope"),
        kind=gguf.GGMLQuantizationType.Q8_0,
    ),
)


def stored(a: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Return what a reader gets back of `a`."""
    if a.ndim == 1:
        return a
    return gguf.quants.dequantize(gguf.quants.quantize(a, kind), kind).reshape(a.shape)


def write_gguf(
    file: Path, spec_: GGUFFamily, weights: dict[str, np.ndarray], tokenizer: tokenizers.Tokenizer
) -> None:
    """Write `weights`, float32 under Hugging Face names."""
    config = spec.hf_config(spec_.family)
    arch = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_name(file.stem)
    writer.add_file_type(tiny_gguf.FILE_TYPES[spec_.kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_shape(writer, config)
    tiny_gguf._add_vocabulary(writer, tokenizer)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, a in weights.items():
        if spec_.family.plus_one and name.endswith("norm.weight"):
            a = a + np.float32(1)
        kind = spec_.kind if a.ndim == 2 else gguf.GGMLQuantizationType.F32
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name, name
        writer.add_tensor(gguf_name, gguf.quants.quantize(a, kind), raw_dtype=kind)
    rope = config.get("rope_scaling") or {}
    for length in ("long", "short"):
        if factors := rope.get(f"{length}_factor"):
            a = np.asarray(factors, np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", a)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(float(config["rope_theta"]))
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if config["model_type"] == "gemma3_text":
        writer.add_sliding_window(config["sliding_window"])
    if config["model_type"] == "phi3":
        _add_phi3(writer, config)


def _add_phi3(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    original = config["original_max_position_embeddings"]
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_dimension_count(int(config.get("partial_rotary_factor", 1.0) * head_dim))
    writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_sliding_window(config["sliding_window"] or 0)
    if config["rope_scaling"]:
        scale = config["max_position_embeddings"] / original
        factor = math.sqrt(1 + math.log(scale) / math.log(original))
        writer.add_rope_scaling_attn_factors(factor)
