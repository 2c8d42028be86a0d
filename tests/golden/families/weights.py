"""Random weights for any transformers model, and its folder on disk under the released names.

It knows torch, transformers and safetensors; it knows no family but by the names of its weights.
Scales follow `tiny.py`: logits spread over a few units, and layers add more than the embedding.
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import mxfp4
import numpy as np
import spec
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny import BOS, EOS, PAD

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Released checkpoints of DeepSeek keep this one in float32.
FLOAT32 = "e_score_correction_bias"


def write_folder(directory: Path, family: spec.Family, seed: int) -> None:
    """Write `config.json`, `generation_config.json` and `model.safetensors`."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", spec.hf_config(family))
    ids = {"bos_token_id": BOS, "eos_token_id": [EOS, PAD], "pad_token_id": PAD}
    write_json(directory / "generation_config.json", ids)
    model = new_model(family, seed)
    with tempfile.TemporaryDirectory() as scratch:
        # Undoes what loading does to the names and shapes of released files.
        model.save_pretrained(scratch)
        stored = load_file(Path(scratch) / "model.safetensors")
    if family.mxfp4:
        stored = mxfp4.pack_experts(stored)
    stored = {
        _renamed(name, family): a if a.dtype == torch.uint8 or name.endswith(FLOAT32)
        else a.to(DTYPES[family.dtype])
        for name, a in sorted(stored.items())
    }  # fmt: skip
    file = directory / "model.safetensors"
    save_file(stored, file, metadata={"format": "pt"})
    file.chmod(0o644)


def new_model(family: spec.Family, seed: int):
    """Return the model in float32, its weights such that `family.dtype` holds them exactly."""
    model = transformers.AutoModelForCausalLM.from_config(
        make_config(spec.hf_config(family)), dtype=torch.float32, attn_implementation="eager"
    )
    fill(model, family, seed)
    return model


def write_json(file: Path, document: dict[str, Any]) -> None:
    file.write_text(json.dumps(document, indent=1) + "\n")


def make_config(config: dict[str, Any]) -> transformers.PretrainedConfig:
    """Read a `config.json` document; quantized weights are made as plain ones first."""
    # Read from a file, since a configuration made in memory shares its lists with its source.
    with tempfile.TemporaryDirectory() as scratch:
        plain = {k: v for k, v in config.items() if k != "quantization_config"}
        write_json(Path(scratch) / "config.json", plain)
        return transformers.AutoConfig.from_pretrained(scratch)


@torch.no_grad()
def fill(model: torch.nn.Module, family: spec.Family, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tied = model.config.tie_word_embeddings
    experts = getattr(model.config, "num_local_experts", None) or 0
    named = dict(model.named_parameters())
    named |= {n: b for n, b in model.named_buffers() if n.endswith(FLOAT32)}
    conv = {f"{n}.weight" for n, m in model.named_modules() if type(m).__name__ == "Conv1D"}
    for name, parameter in sorted(named.items()):
        shape = tuple(parameter.shape)
        if ("norm" in name or ".ln_" in name) and name.endswith("weight"):
            bounds = family.post_norm if "post" in name else (0.5, 1.5)
            a = rng.uniform(*bounds, shape) - family.plus_one
        elif name.endswith(FLOAT32):
            a = rng.normal(0, 0.1, shape)
        elif name.endswith("sinks"):
            a = rng.normal(0, 1, shape)
        elif name.endswith("bias"):
            a = rng.normal(0, 0.3, shape)
        elif "embed" in name or ".wte." in name or ".wpe." in name:
            D = shape[-1]
            a = rng.normal(0, family.embed_std or (3 / math.sqrt(D) if tied else 1), shape)
        elif name == "lm_head.weight":
            a = rng.normal(0, 3 / math.sqrt(shape[-1]), shape)
        else:
            transposed = name in conv or (len(shape) == 3 and experts and _is_gpt_oss(model))
            fan_in = shape[-2] if transposed else shape[-1]
            a = rng.normal(0, 1.5 / math.sqrt(fan_in), shape)
        exact = torch.from_numpy(a).to(DTYPES[family.dtype]).to(torch.float32)
        if family.mxfp4 and len(shape) == 3:
            exact = mxfp4.round_experts(exact)
        parameter.copy_(exact)


def _is_gpt_oss(model: torch.nn.Module) -> bool:
    return model.config.model_type == "gpt_oss"


def _renamed(name: str, family: spec.Family) -> str:
    for old, new in family.rename:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
