"""What the settings leave open, decided once: number type, context length, pages of KV memory."""

from __future__ import annotations

import dataclasses
import logging

import jax
import jax.numpy as jnp

from jaxinfer.config import EngineConfig
from jaxinfer.errors import ConfigError
from jaxinfer.kv_cache import CacheShape
from jaxinfer.memory import cache_bytes
from jaxinfer.models import ModelConfig
from jaxinfer.step_programs import RunnerConfig

logger = logging.getLogger(__name__)


def resolve(config: EngineConfig, model_config: ModelConfig) -> EngineConfig:
    """Replace every "auto" and None that stands for a number by its value.

    Raises:
        ConfigError: The KV memory does not hold one sequence of the length asked for.
    """
    platform = jax.default_backend()
    dtype = config.dtype
    if dtype == "auto":
        # XLA:CPU multiplies thin bfloat16 batches 15 times slower than float32.
        dtype = "float32" if platform == "cpu" else "bfloat16"
    shape = CacheShape(
        num_layers=model_config.num_hidden_layers,
        num_kv_heads=model_config.num_key_value_heads,
        head_dim=model_config.head_dim,
        page_size=config.page_size,
        dtype=dtype,
        has_values=model_config.latent is None,
    )
    longest = model_config.max_position_embeddings
    if config.max_model_len and config.max_model_len > longest:
        raise ConfigError(
            f"max_model_len={config.max_model_len} exceeds the {longest} positions that the model "
            "was made for"
        )
    wanted = config.max_model_len or longest
    pages_each = -(-wanted // config.page_size)
    num_pages = config.num_pages
    if num_pages is None:
        most = config.max_num_seqs * pages_each  # more could never be in use at once
        budget = config.kv_cache_memory_bytes or cache_bytes(pages_each * shape.page_bytes)
        # Page bytes are those of all devices together, as is what the budget buys.
        num_pages = min(most, budget * config.tensor_parallel_size // shape.page_bytes)
    if num_pages < pages_each:
        room = num_pages * config.page_size
        if config.max_model_len or room < 2:
            raise ConfigError(
                f"a sequence of max_model_len={wanted} tokens needs {pages_each} pages of "
                f"{shape.page_bytes / 2**20:.2f} MiB, but there are {num_pages}; lower "
                "max_model_len, or raise num_pages or kv_cache_memory_bytes"
            )
        logger.warning(
            "max_model_len lowered from %d to %d: that is what the pages hold", wanted, room
        )
        wanted = room
    resolved = dataclasses.replace(config, dtype=dtype, max_model_len=wanted, num_pages=num_pages)
    logger.info(
        "%s, max_model_len %d, %d pages of %d tokens (%.2f GiB)",
        dtype,
        wanted,
        num_pages,
        config.page_size,
        num_pages * shape.page_bytes / 2**30,
    )
    return resolved


def runner_config(config: EngineConfig) -> RunnerConfig:
    """The shapes that a resolved config asks the runner for."""
    assert config.max_model_len and config.num_pages, "the config must be resolved"
    return RunnerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        num_pages=config.num_pages,
        page_size=config.page_size,
        max_logprobs=config.max_logprobs,
        dtype=jnp.dtype(config.dtype),
    )
