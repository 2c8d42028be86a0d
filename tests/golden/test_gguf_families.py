"""A family's GGUF file gives the weights and the configuration of its safetensors.

Equal tensors and an equal `ModelConfig` mean equal logits, and those of the safetensors are held
to the reference by `test_families.py`: no model runs here.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from checkpoints import open_checkpoint
from jaxinfer.models.registry import family_of
from tests.golden import gguf_conversion

FAMILIES = Path(__file__).parent / "families"

# What the file does not say, and readers take as released models have it.
UNSAID = {
    "gemma2": {"query_pre_attn_scalar": 16},
    "gpt_oss": {"swiglu_limit": 7.0},
    "gpt_oss_bf16": {"swiglu_limit": 7.0},
}

NAMES = [
    "gemma", "gemma2", "smollm3", "olmo2", "olmo3", "granite", "glm4", "cohere", "cohere_qk_norm",
    "cohere2", "stablelm", "stablelm_parallel", "gpt_neox", "gpt_neox_sequential", "gpt2",
    "mixtral", "qwen3_moe", "olmoe", "gpt_oss_bf16", "gpt_oss", "deepseek_v2_lite", "deepseek_v2",
    "deepseek_v3",
]  # fmt: skip


def source_of(name):
    checkpoint = open_checkpoint(FAMILIES / name)
    return checkpoint.config | UNSAID.get(name, {}), {
        name: checkpoint.read(name) for name in checkpoint.names()
    }


def settled(config):
    """Every value of a `ModelConfig`, floats as close as float32 keeps them."""
    values = dataclasses.asdict(family_of(config).translate(config))
    return json.loads(json.dumps(values), parse_float=lambda text: float(f"{float(text):.6g}"))


@pytest.fixture(scope="module", params=NAMES)
def both(request, tmp_path_factory):
    config, weights = source_of(request.param)
    path = tmp_path_factory.mktemp("gguf") / f"{request.param}.gguf"
    checkpoint = open_checkpoint(gguf_conversion.write_gguf(path, config, weights))
    yield config, weights, checkpoint
    checkpoint.close()


def test_every_tensor_comes_back_bit_for_bit(both):
    _, weights, checkpoint = both
    packed = {name for name in weights if name.endswith(("_blocks", "_scales"))}
    unpacked = {name.removesuffix("_blocks") for name in packed if name.endswith("_blocks")}
    assert sorted(checkpoint.names()) == sorted((weights.keys() - packed) | unpacked)
    for name in weights.keys() - packed:
        read = checkpoint.read(name)
        assert checkpoint.info(name).shape == read.shape
        np.testing.assert_array_equal(read, weights[name].astype(np.float32), err_msg=name)
    for name in unpacked:
        read = checkpoint.read(name)
        assert checkpoint.info(name).shape == read.shape
        expected = unpacked_mxfp4(weights[f"{name}_blocks"], weights[f"{name}_scales"])
        np.testing.assert_array_equal(read, expected, err_msg=name)


def test_the_configuration_means_the_same_model(both):
    config, _, checkpoint = both
    # A GGUF file's blocks are decoded on reading.
    config = {key: value for key, value in config.items() if key != "quantization_config"}
    assert settled(checkpoint.config) == settled(config)


def unpacked_mxfp4(blocks, scales):
    """[E, out, in / 32, 16] of two codes a byte, and their exponents: [E, in, out]."""
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    values = np.concatenate([magnitudes, -magnitudes])[codes]
    values = np.ldexp(values, scales[..., None].astype(np.int32) - 127)
    return values.reshape(*blocks.shape[:2], -1).swapaxes(1, 2)


def test_deepseeks_older_files_hold_one_matrix_for_keys_and_values(tmp_path, monkeypatch):
    config, weights = source_of("deepseek_v2_lite")
    monkeypatch.delitem(gguf_conversion._CONVERSIONS, "deepseek_v2")
    path = gguf_conversion.write_gguf(tmp_path / "older.gguf", config, weights)
    checkpoint = open_checkpoint(path)
    assert sorted(checkpoint.names()) == sorted(weights)
    assert settled(checkpoint.config) == settled(config)
