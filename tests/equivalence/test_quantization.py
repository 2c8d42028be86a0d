"""Ways to multiply: C++ kernels and plain XLA give the same, int8 nearly the same as float32."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.errors import ConfigError
from jaxinfer.packed import PackedBlock, PackedEmbedding, PackedLinear
from jaxinfer.quant import Int8Linear
from jaxinfer.resolution import resolve
from jaxinfer.surgery import modules_of
from tests.engines import config_of, loaded, logits_of, make_engine
from tests.kernels.cpu import isa_or_skip

# One of each kind of layer; and whether its blocks run whole on the kernels.
MODELS = {
    "llama3": True,
    "qwen3": True,  # norms of queries and keys
    "gemma2": False,  # norms behind, caps, windows
    "gpt2": False,  # centered norms, biases, a plain feed-forward
    "gpt_oss": False,  # experts, sinks
    "deepseek_v3": False,  # latents
    "cohere": False,  # parallel block, interleaved rotation
}
TOKENS = (np.arange(45) * 7 + 3) % 250


def logits(name: str, **settings) -> np.ndarray:
    return logits_of(
        make_engine(name, buckets=(1, 32), max_model_len=96, **settings), TOKENS, chunk=32
    )


def spread(x: np.ndarray, reference: np.ndarray) -> float:
    """Return the root mean square of the difference, in standard deviations of the reference."""
    return float(np.sqrt(np.mean((x - reference) ** 2)) / reference.std())


@pytest.mark.parametrize("name", MODELS)
def test_kernels_equal_plain_xla(name: str) -> None:
    isa_or_skip("portable")
    model = loaded(name, "float32", None, "cpu")[2]
    assert bool([*modules_of(model, PackedBlock)]) == MODELS[name]
    assert [*modules_of(model, PackedLinear)]
    assert spread(logits(name, kernels="cpu"), logits(name, kernels="xla")) < 1e-5


@pytest.mark.parametrize("name", ["llama3", "gpt2"])
def test_int8_on_the_kernels_equals_int8_in_plain_xla(name: str) -> None:
    isa_or_skip("portable")
    assert [*modules_of(loaded(name, "float32", "int8", "xla")[2], Int8Linear)]
    cpu, xla = (logits(name, quantization="int8", kernels=kernels) for kernels in ("cpu", "xla"))
    # An input next to a tie may be rounded to either side, and then everything behind it moves.
    assert spread(cpu, xla) < 0.06


@pytest.mark.parametrize("kernels", ["cpu", "xla"])
def test_int8_stays_near_float32(kernels: str) -> None:
    isa_or_skip("portable")
    int8 = logits("smollm2", quantization="int8", kernels=kernels)
    float32 = logits("smollm2", kernels="xla")
    assert 1e-4 < spread(int8, float32) < 0.1


def test_the_tied_head_is_int8_too() -> None:
    isa_or_skip("portable")
    model = loaded("smollm2", "float32", "int8", "cpu")[2]
    assert type(model.embed) is PackedEmbedding
    assert model.embed.fmt == "int8"


def test_several_devices_run_without_the_kernels() -> None:
    config = config_of("llama3")
    settings = {"max_model_len": 64, "num_pages": 16, "tensor_parallel_size": 2}
    assert resolve(EngineConfig(**settings), config).kernels == "xla"
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2"):
        resolve(EngineConfig(kernels="cpu", **settings), config)
