"""What the settings leave open, decided once: number type, context length, pages of KV memory."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jaxinfer.builtin_processors import find_processor
from jaxinfer.config import EngineConfig
from jaxinfer.cpu_kernels import BuildError, load_library
from jaxinfer.errors import ConfigError
from jaxinfer.footprint import estimated_temporaries, weight_bytes
from jaxinfer.kv_cache import CacheShape
from jaxinfer.memory import cache_bytes
from jaxinfer.models import ModelConfig
from jaxinfer.page_groups import most_window_pages
from jaxinfer.runner_config import RunnerConfig, cache_shape
from pallas_kernels import has_scales
from pallas_kernels.capability import Problem, choose, current_device, most_elements

logger = logging.getLogger(__name__)


def resolve(config: EngineConfig, model_config: ModelConfig) -> EngineConfig:
    """Replace every "auto" and None that stands for a number by its value.

    Raises:
        ConfigError: The KV memory does not hold one sequence of the length asked for.
    """
    platform = jax.default_backend()
    dtype, kernels = _dtype_and_kernels(config, platform)
    kv_cache_dtype = dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    _check_page_dtype(kv_cache_dtype, model_config)
    wanted = wanted_model_len(config, model_config)
    settled = dataclasses.replace(config, dtype=dtype, kernels=kernels)
    page_shards = _page_shards(config, model_config)

    def memory(one_sequence: int) -> int:
        held = partial(_held_bytes, settled, model_config)
        budget = config.kv_cache_memory_bytes or cache_bytes(one_sequence, held)
        # Page bytes are those of all devices together, as is what the budget buys.
        return budget * page_shards

    while True:
        pages_each = -(-wanted // config.page_size)
        windows = model_config.windows_within(wanted)
        shape = cache_shape(model_config, windows, config.page_size, page_dtype(kv_cache_dtype))
        page_bytes = [shape.page_bytes(group) for group in range(1 + len(windows))]
        attention = _attention(config, dtype, shape)
        num_pages, num_window_pages = (
            _within_reach(count, config, attention, shape)
            for count in page_counts(config, windows, pages_each, page_bytes, memory)
        )
        if num_pages >= pages_each:
            break
        room = num_pages * config.page_size
        if config.max_model_len or room < 2:
            raise ConfigError(
                f"a sequence of max_model_len={wanted} tokens needs {pages_each} pages of "
                f"{page_bytes[0] / 2**20:.2f} MiB, but there are {num_pages}; lower "
                "max_model_len, or raise num_pages or kv_cache_memory_bytes"
            )
        logger.warning(
            "max_model_len lowered from %d to %d: that is what the pages hold", wanted, room
        )
        # Again, for a shorter sequence some windows may hide nothing.
        wanted = room
    logger.info("attention: %s", attention)
    if config.deterministic:
        config = _deterministic(config)
    resolved = dataclasses.replace(
        config,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        kernels=kernels,
        max_model_len=wanted,
        max_num_mixed_tokens=_mixed_tokens(config, platform),
        num_pages=num_pages,
        num_window_pages=num_window_pages if windows else config.num_window_pages,
    )
    counts = [num_pages, *(num_window_pages for _ in windows)]
    logger.info(
        "%s, max_model_len %d, %s pages of %d tokens in %s (%.2f GiB)",
        dtype,
        wanted,
        " + ".join(map(str, counts)),
        config.page_size,
        kv_cache_dtype,
        sum(n * size for n, size in zip(counts, page_bytes, strict=True)) / 2**30,
    )
    return resolved


def wanted_model_len(config: EngineConfig, model_config: ModelConfig) -> int:
    """Return the longest sequence that is asked for, tokens: the model's if nobody says.

    Raises:
        ConfigError: The model was not made for it.
    """
    longest = model_config.max_position_embeddings
    if config.max_model_len and config.max_model_len > longest:
        raise ConfigError(
            f"max_model_len={config.max_model_len} exceeds the {longest} positions that the model "
            "was made for"
        )
    return config.max_model_len or longest


MIXED_TOKENS_CPU = 128
"""Where a step of as many tokens as elsewhere takes a quarter of a second."""


def _mixed_tokens(config: EngineConfig, platform: str) -> int:
    """Return how many tokens a step may have in which sequences decode."""
    if config.max_num_mixed_tokens is not None:
        return config.max_num_mixed_tokens
    most = config.max_num_batched_tokens
    if platform != "cpu":
        return most
    return min(most, max(MIXED_TOKENS_CPU, 2 * config.max_num_seqs))


DETERMINISTIC_TOKENS = 32
"""Fewest tokens of a deterministic step: so many rows XLA multiplies all alike."""


def _deterministic(config: EngineConfig) -> EngineConfig:
    """Fix all shapes on which an order of summation could depend."""
    rows = max(DETERMINISTIC_TOKENS, config.max_num_seqs)
    logger.info("deterministic: every step computes %d tokens", rows)
    return dataclasses.replace(
        config,
        max_num_seqs=rows,
        max_num_batched_tokens=rows,
        max_num_mixed_tokens=rows,
        num_decode_steps=1,
    )


def page_dtype(kv_cache_dtype: str) -> jnp.dtype:
    """Return the dtype that a resolved `kv_cache_dtype` names."""
    return jnp.dtype({"fp8_e4m3": "float8_e4m3fn"}.get(kv_cache_dtype, kv_cache_dtype))


def _check_page_dtype(kv_cache_dtype: str, model_config: ModelConfig) -> None:
    """Refuse to quantize what has no heads to scale one by one."""
    if model_config.latent is not None and has_scales(page_dtype(kv_cache_dtype)):
        raise ConfigError(
            f"kv_cache_dtype={kv_cache_dtype} is not supported for latent attention, whose pages "
            "are small already; leave it out, or take bfloat16"
        )


def _attention(config: EngineConfig, dtype: str, shape: CacheShape) -> str:
    """Return who computes attention; refuse what this device or model cannot have."""
    problem = Problem(
        dtype=dtype,
        kv_dtype=shape.dtype,
        head_dim=shape.head_dim,
        page_size=config.page_size,
    )
    try:
        return choose(config.attention_impl, current_device(), problem)
    except NotImplementedError as error:
        raise ConfigError(f"attention_impl: {error}") from error


def _within_reach(num_pages: int, config: EngineConfig, attention: str, shape: CacheShape) -> int:
    """Lower a number of pages to what the kernels can address, if nobody asked for it.

    Raises:
        ConfigError: Somebody did.
    """
    heads = -(-shape.num_kv_heads // config.tensor_parallel_size)
    page = heads * shape.page_size * shape.head_dim
    most = most_elements(num_pages * page, shape.dtype) // page
    if attention == "xla" or most == num_pages:
        return num_pages
    if num_pages in (config.num_pages, config.num_window_pages):
        raise ConfigError(
            f"{num_pages} pages of {jnp.dtype(shape.dtype).name} have 2 to 4 GiB a layer, which "
            f"the GPU kernels cannot address; take at most {most} or at least {2**32 // page + 1} "
            'pages, kv_cache_dtype="bfloat16", or attention_impl="xla"'
        )
    logger.warning("%d pages instead of %d: the GPU kernels address no more", most, num_pages)
    return most


def _dtype_and_kernels(config: EngineConfig, platform: str) -> tuple[str, str]:
    """Decide the number type, and whether the C++ kernels run: they want KV pages of the same.

    "auto" is bfloat16, but float32 on a CPU without the kernels: XLA:CPU multiplies thin batches of
    bfloat16 15 times slower. `docs/adr/0013-bfloat16-on-cpus.md` has the figures.
    """
    dtype = config.dtype
    if dtype == "auto":
        asked = platform == "cpu" and config.kv_cache_dtype == "float32"
        dtype = "float32" if asked else "bfloat16"
    kernels = _kernels(config, platform, same_dtype=config.kv_cache_dtype in ("auto", dtype))
    if config.dtype == "auto" and platform == "cpu" and kernels != "cpu":
        dtype = "float32"
    return dtype, kernels


def _kernels(config: EngineConfig, platform: str, *, same_dtype: bool) -> str:
    """Decide, and say, whether the C++ kernels run: on one CPU device, if they can be built.

    Raises:
        ConfigError: They were asked for and cannot run.
    """
    if config.kernels == "xla":
        return "xla"
    if platform != "cpu":
        reason = f"the device is a {platform}"
    elif config.tensor_parallel_size > 1:
        reason = f"tensor_parallel_size is {config.tensor_parallel_size}"
    elif config.attention_impl != "auto":
        reason = f"attention_impl is {config.attention_impl}"
    elif not same_dtype:
        reason = f"kv_cache_dtype is {config.kv_cache_dtype}, not that of the activations"
    else:
        try:
            logger.info("CPU kernels for %s", load_library().isa_names[0])
            return "cpu"
        except BuildError as error:
            reason = str(error)
    if config.kernels == "cpu":
        raise ConfigError(f'kernels="cpu" cannot be had: {reason}; use "auto" or "xla"')
    if platform == "cpu":
        logger.warning("without CPU kernels, several times slower: %s", reason)
    return "xla"


def _page_shards(config: EngineConfig, model_config: ModelConfig) -> int:
    """Return how many devices share a page: all, unless each holds all KV heads."""
    n = config.tensor_parallel_size
    return 1 if model_config.num_key_value_heads % n else n


def _held_bytes(config: EngineConfig, model_config: ModelConfig) -> int:
    """Return bytes of one device that are no KV pages."""
    temporaries = estimated_temporaries(config, model_config)
    return sum(weight_bytes(config, model_config).values()) + max(temporaries.values())


def page_counts(
    config: EngineConfig,
    windows: tuple[int, ...],
    pages_each: int,
    page_bytes: list[int],
    memory: Callable[[int], int],
) -> tuple[int, int]:
    """Return how many pages whole sequences get, and how many each window gets.

    A sequence of full length needs `pages_each` of the first kind, and of the second no more than
    window and chunk; so much for `max_num_seqs` is all that could be in use at once. Of memory that
    is short the windows get up to half, since short sequences need as much in every group.

    Args:
        config: The settings.
        windows: Of the model.
        pages_each: Pages of a sequence of full length.
        page_bytes: By group.
        memory: Bytes that a sequence of full length needs → bytes for all pages. Not called if the
            settings say how many pages there are.
    """
    longest = max(windows, default=0)
    chunk = config.max_num_batched_tokens
    # One to spare, since a sequence is admitted only if those that run can each take another.
    window_each = 1 + most_window_pages(longest, chunk, config.page_size)
    window_each = min(window_each, pages_each) if windows else 0
    num_pages, num_window_pages = config.num_pages, config.num_window_pages
    most, most_window = config.max_num_seqs * pages_each, config.max_num_seqs * window_each
    if num_pages is not None:
        return num_pages, num_window_pages or min(most_window, num_pages)

    one_page, one_window_page = page_bytes[0], sum(page_bytes[1:])
    budget = memory(pages_each * one_page + window_each * one_window_page)
    if windows and num_window_pages is None:
        share = max(budget // 2, budget - most * one_page) // one_window_page
        num_window_pages = min(most_window, max(window_each, share))
    left = max(budget - (num_window_pages or 0) * one_window_page, 0)
    num_pages = min(most, left // one_page)
    # More window pages than others are of no use.
    return num_pages, min(num_window_pages or 0, num_pages)


def runner_config(config: EngineConfig, model_config: ModelConfig) -> RunnerConfig:
    """The shapes that a resolved config and a model ask the runner for."""
    assert config.max_model_len and config.num_pages, "the config must be resolved"
    return RunnerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        num_pages=config.num_pages,
        page_size=config.page_size,
        max_logprobs=config.max_logprobs,
        dtype=jnp.dtype(config.dtype),
        kv_cache_dtype=page_dtype(config.kv_cache_dtype),
        windows=model_config.windows_within(config.max_model_len),
        num_window_pages=config.num_window_pages or 0,
        attention_impl="cpu" if config.kernels == "cpu" else config.attention_impl,
        num_decode_steps=config.num_decode_steps,
        deterministic=config.deterministic,
        logits_processors=tuple(map(find_processor, config.logits_processors)),
    )
