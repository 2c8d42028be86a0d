"""Which implementation computes: what each device can do, and how the rest is refused."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from jaxinfer import resolution
from jaxinfer.config import ATTENTION_IMPLS, EngineConfig
from jaxinfer.errors import ConfigError
from jaxinfer.resolution import resolve
from pallas_kernels.capability import IMPLEMENTATIONS, Device, Problem, choose, device_of
from tests.engines import loaded

PROBLEM = Problem(dtype=jnp.bfloat16, kv_dtype=jnp.bfloat16, head_dim=128, page_size=16)
CPU = Device("cpu")
A100, H100 = Device("NVIDIA A100", (8, 0)), Device("NVIDIA H100", (9, 0))


@dataclasses.dataclass
class FakeDevice:
    platform: str
    device_kind: str
    compute_capability: str


def test_the_settings_offer_every_implementation() -> None:
    assert ATTENTION_IMPLS == IMPLEMENTATIONS


@pytest.mark.parametrize(
    ("capability", "generation"),
    [
        ("7.5", None),
        ("8.0", "sm_80"),
        ("8.6", "sm_89"),
        ("8.9", "sm_89"),
        ("9.0", "sm_90"),
        ("10.0", "sm_100"),
        ("10.3", "sm_100"),
        ("12.0", "sm_120"),
        ("12.1", "sm_120"),
    ],
)
def test_a_gpu_has_the_tiles_of_its_generation(capability: str, generation: str | None) -> None:
    assert device_of(FakeDevice("gpu", "some GPU", capability)).generation == generation


def test_a_cpu_has_no_generation() -> None:
    assert device_of(jax.devices("cpu")[0]).generation is None


def test_auto_takes_kernels_where_there_are_some() -> None:
    assert choose("auto", H100, PROBLEM) == "triton"
    assert choose("pallas", H100, PROBLEM) == "triton"
    assert choose("auto", CPU, PROBLEM) == "xla"
    assert choose("auto", Device("Tesla T4", (7, 5)), PROBLEM) == "xla"


def test_hopper_has_kernels_of_its_own() -> None:
    assert choose("mosaic", H100, PROBLEM) == "mosaic"
    for device, words in ((A100, "9.0 .* has 8.0"), (CPU, "needs an NVIDIA GPU")):
        with pytest.raises(NotImplementedError, match=words):
            choose("mosaic", device, PROBLEM)


@pytest.mark.parametrize("impl", ["auto", "pallas", "triton", "interpret"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head_dim": 576}, "head dims up to 256, got 576"),
        ({"page_size": 12}, "power of two of tokens, got 12"),
        ({"kv_dtype": jnp.int16}, "got int16"),
        ({"dtype": jnp.int8}, "got int8"),
    ],
)
def test_what_no_kernel_does_is_xla_or_refused(impl: str, change: dict, words: str) -> None:
    problem = dataclasses.replace(PROBLEM, **change)
    assert choose("xla", H100, problem) == "xla"
    if impl == "auto":
        assert choose("auto", H100, problem) == "xla"
    else:
        with pytest.raises(NotImplementedError, match=words):
            choose(impl, H100, problem)


def test_plain_attention_loads_no_kernel_compiler() -> None:
    """A jaxlib may lack them, and one of them is to be removed."""
    code = (
        "import sys, jaxinfer.engine, pallas_kernels.capability as c; "
        "assert c.choose('auto', c.current_device(), "
        "c.Problem(dtype='float32', kv_dtype='float32', head_dim=64, page_size=16)) == 'xla'; "
        "sys.exit(sorted(m for m in sys.modules if m.startswith('jax.experimental.pallas')) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_float8_pages_are_refused_before_a_compiler_aborts_over_them() -> None:
    problem = dataclasses.replace(PROBLEM, kv_dtype=jnp.float8_e4m3fn)
    assert choose("pallas", H100, problem) == "triton"
    assert choose("interpret", CPU, problem) == "interpret"
    with pytest.raises(NotImplementedError, match="compute capability 8.9, and it has 8.0"):
        choose("pallas", A100, problem)


def test_an_engine_on_a_cpu_refuses_kernels_in_one_sentence() -> None:
    _, model_config, _, _ = loaded("smollm2")
    config = EngineConfig(attention_impl="pallas", num_pages=64, max_model_len=64)
    with pytest.raises(ConfigError, match="'pallas' needs an NVIDIA GPU .* 'cpu'; use 'xla'"):
        resolve(config, model_config)


@pytest.mark.parametrize("tensor_parallel_size", [1, 3])
def test_pages_out_of_the_kernels_reach_are_refused_or_left_out(
    monkeypatch: pytest.MonkeyPatch, tensor_parallel_size: int
) -> None:
    """One-byte pages of 2 to 4 GiB a layer and device, before anything is loaded or traced."""
    monkeypatch.setattr(resolution, "current_device", lambda: H100)
    _, model_config, _, _ = loaded("smollm2")
    heads = model_config.num_key_value_heads // tensor_parallel_size
    most = 2**31 // (heads * 16 * model_config.head_dim)
    config = EngineConfig(
        kv_cache_dtype="int8",
        num_pages=most,
        max_num_seqs=10**6,
        max_num_batched_tokens=10**6,
        tensor_parallel_size=tensor_parallel_size,
    )
    more = dataclasses.replace(config, num_pages=most + most // 9)
    # Keys and values of two layers, and their scales.
    automatic = dataclasses.replace(config, num_pages=None, kv_cache_memory_bytes=4 * 3 * 2**30)
    assert resolve(config, model_config).num_pages == most
    assert resolve(automatic, model_config).num_pages == most
    with pytest.raises(ConfigError, match=f"cannot address; take at most {most} or at least"):
        resolve(more, model_config)
    for change in ({"attention_impl": "xla"}, {"kv_cache_dtype": "bfloat16"}):
        other = dataclasses.replace(more, **change)
        assert resolve(other, model_config).num_pages == more.num_pages


def test_an_unknown_implementation_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="auto, xla, pallas"):
        EngineConfig(attention_impl="cudnn")
