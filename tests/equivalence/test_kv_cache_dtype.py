"""Pages of other dtypes: what they cost in precision, and that nothing else depends on them.

A token's keys and values are quantized by themselves when they are written, and every later token,
of the same step or not, reads what was stored. So the ways to the same tokens stay the same.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.errors import ConfigError
from jaxinfer.resolution import resolve
from jaxinfer.sampling_params import SamplingParams
from tests.engines import Work, loaded, logits_of, make_engine, run_alone, run_tokens

LOGIT_ERROR = {"float16": 2e-3, "bfloat16": 1.2e-2, "int8": 2.5e-2, "fp8_e4m3": 1e-1}
"""Root mean square error of logits over that of the logits, of a float32 model with random weights.

Measured: 0.0009, 0.007, 0.018, 0.083. The format's own error of a number near the largest of its
vector: 2**-12, 2**-9, 1/254, 2**-4.
"""

PROMPT = np.random.default_rng(0).integers(3, 300, 120).astype(np.int32)


@functools.cache
def logits(model: str, kv_cache_dtype: str) -> np.ndarray:
    engine = make_engine(model, buckets=(64,), kv_cache_dtype=kv_cache_dtype)
    return logits_of(engine, PROMPT, 64)


@pytest.mark.parametrize(
    ("model", "kv_cache_dtype"), [*(("smollm2", name) for name in LOGIT_ERROR), ("gemma3", "int8")]
)
def test_logits_differ_by_no_more_than_the_format_costs(model: str, kv_cache_dtype: str) -> None:
    exact, given = logits(model, "float32"), logits(model, kv_cache_dtype)
    error = np.sqrt(((given - exact) ** 2).mean() / (exact**2).mean())
    # And it does something: pages of the model's own dtype would give an error of 0.
    assert LOGIT_ERROR[kv_cache_dtype] / 10 < error < LOGIT_ERROR[kv_cache_dtype]


def test_quantized_pages_give_the_same_tokens_alone_batched_chunked_and_cached() -> None:
    rng = np.random.default_rng(1)
    common = tuple(int(t) for t in rng.integers(3, 300, 40))
    work = {}
    for i in range(6):
        prompt = common + tuple(int(t) for t in rng.integers(3, 300, 7 * i + 1))
        params = SamplingParams(max_tokens=12, temperature=float(i % 2))
        work[f"r{i}"] = Work(prompt, params, seed=i)
    how = {"kv_cache_dtype": "int8", "buckets": (16, 64)}
    alone = run_alone(
        make_engine("smollm2", overlap=False, enable_prefix_caching=False, **how), work
    )
    assert len({tuple(tokens) for tokens in alone.values()}) > 3
    assert run_tokens(make_engine("smollm2", **how), work) == alone
    assert run_tokens(make_engine("smollm2", max_num_batched_tokens=16, **how), work) == alone
    assert run_tokens(make_engine("smollm2", num_pages=24, max_model_len=192, **how), work) == alone


def test_kernels_that_write_and_read_quantized_pages_give_the_tokens_of_xla() -> None:
    """The whole engine with the portable GPU kernels, interpreted."""
    work = {
        f"r{i}": Work(tuple(PROMPT[: 5 + 9 * i].tolist()), SamplingParams(max_tokens=4))
        for i in range(2)
    }
    how = {"kv_cache_dtype": "int8", "buckets": (8,), "max_num_batched_tokens": 8}
    how |= {"max_model_len": 64, "num_pages": 32}
    tokens = run_tokens(make_engine("smollm2", attention_impl="xla", **how), work)
    assert run_tokens(make_engine("smollm2", attention_impl="interpret", **how), work) == tokens


def test_pages_with_scales_are_refused_for_latent_attention_by_name() -> None:
    _, model_config, _, _ = loaded("deepseek_v2_lite")
    with pytest.raises(ConfigError, match="kv_cache_dtype=int8 is not supported for latent"):
        resolve(EngineConfig(kv_cache_dtype="int8", num_pages=64), model_config)
    resolve(EngineConfig(kv_cache_dtype="bfloat16", num_pages=64), model_config)
