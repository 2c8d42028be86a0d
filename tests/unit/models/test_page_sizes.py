"""Memory for pages goes where it is needed: whole sequences, and windows."""

import dataclasses
import logging

import jax
import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.errors import ConfigError
from jaxinfer.footprint import estimated_temporaries, weight_bytes
from jaxinfer.kv_cache import CacheShape, make_cache
from jaxinfer.models import ModelConfig, lay_out_heads
from jaxinfer.resolution import resolve, runner_config
from jaxinfer.step_programs import cache_shape

GEMMA_3_270M = ModelConfig(
    vocab_size=262_144,
    hidden_size=640,
    intermediate_size=2048,
    num_hidden_layers=18,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=256,
    max_position_embeddings=32_768,
    sliding_windows=tuple(None if (layer + 1) % 6 == 0 else 512 for layer in range(18)),
)
ALL_WINDOWS = dataclasses.replace(GEMMA_3_270M, sliding_windows=(512,) * 18)
NO_WINDOWS = dataclasses.replace(GEMMA_3_270M, sliding_windows=())
GIB = 2**30


def sizes(model, **settings):
    """Return pages of whole sequences, of windows, and the bytes of all of them."""
    config = resolve(EngineConfig(dtype="bfloat16", **settings), model)
    shapes = runner_config(config, model)
    shape = cache_shape(model, shapes.windows, shapes.page_size, shapes.page_dtype)
    size = sum(shape.page_bytes(group) * n for group, n in enumerate(shapes.group_pages))
    return config.num_pages, shapes.num_window_pages, size


@pytest.mark.parametrize(
    "model", [GEMMA_3_270M, ALL_WINDOWS, NO_WINDOWS], ids=["mixed", "all", "no"]
)
@pytest.mark.parametrize("budget", [GIB // 2, GIB, 8 * GIB, 200 * GIB])
def test_pages_use_the_memory_and_no_more(model, budget):
    whole, windows, size = sizes(model, kv_cache_memory_bytes=budget)
    assert size <= budget
    # No more than 32 sequences can use: 2048 pages each, or 66 for a window and a chunk.
    assert whole <= 32 * 2048
    assert windows <= 32 * 66
    if model is not NO_WINDOWS and budget >= 8 * GIB:
        assert windows == 32 * 66
    full = whole == 32 * 2048 and (windows == 32 * 66 or model is NO_WINDOWS)
    assert full or size > 0.99 * budget


def test_windows_leave_room_for_longer_contexts():
    whole, windows, _ = sizes(GEMMA_3_270M, kv_cache_memory_bytes=GIB)
    everything, none, _ = sizes(NO_WINDOWS, kv_cache_memory_bytes=GIB)
    assert none == 0
    assert whole > 3 * everything
    assert windows > everything / 3


def test_pages_of_windows_follow_the_pages_that_are_asked_for():
    assert sizes(GEMMA_3_270M, num_pages=3000)[:2] == (3000, 32 * 66)
    assert sizes(GEMMA_3_270M, num_pages=2048)[:2] == (2048, 2048)
    assert sizes(GEMMA_3_270M, num_pages=3000, num_window_pages=100)[:2] == (3000, 100)


def test_a_window_that_hides_nothing_has_no_pages_of_its_own():
    whole, windows, _ = sizes(GEMMA_3_270M, num_pages=3000, max_model_len=512)
    assert (whole, windows) == (3000, 0)


class Device:
    """A GPU, as far as its memory goes."""

    platform = "gpu"
    device_kind = "one of somebody's"

    def __init__(self, limit: int, in_use: int = 0):
        self.memory_stats = lambda: {"bytes_limit": limit, "bytes_in_use": in_use}


def test_weights_and_programs_are_taken_off_before_pages_are_counted(monkeypatch):
    """They are not loaded yet, and yet they will be."""
    monkeypatch.setattr("jaxinfer.resolution.jax.default_backend", lambda: "gpu")
    asked = EngineConfig(dtype="bfloat16", attention_impl="xla", max_model_len=4096)
    held = sum(weight_bytes(asked, GEMMA_3_270M).values())
    held += max(estimated_temporaries(asked, GEMMA_3_270M).values())
    assert held > 0.9 * GIB / 2
    page = {}
    for limit, in_use in ((held + GIB, 0), (held + GIB + 5, 5), (held + GIB // 2, 0)):
        device = Device(limit, in_use)
        monkeypatch.setattr("jaxinfer.memory.jax.devices", lambda device=device: [device])
        _, _, page[limit] = sizes(GEMMA_3_270M, attention_impl="xla", max_model_len=4096)
        assert 0.79 < page[limit] / (limit - in_use - held) <= 0.8
    monkeypatch.setattr("jaxinfer.memory.jax.devices", lambda: [Device(held)])
    with pytest.raises(ConfigError, match=r"take \d\.\d+ GiB of each device.*take more devices"):
        resolve(asked, GEMMA_3_270M)


def test_devices_that_share_a_layer_hold_a_part_of_the_weights():
    layout = lay_out_heads(NO_WINDOWS, 4)
    one, four = (
        sum(weight_bytes(EngineConfig(dtype="bfloat16", tensor_parallel_size=n), model).values())
        for n, model in ((1, NO_WINDOWS), (4, layout))
    )
    assert 0.25 < four / one < 0.28


def test_a_context_too_long_is_lowered_or_refused(caplog):
    with caplog.at_level(logging.WARNING):
        whole, windows, size = sizes(GEMMA_3_270M, kv_cache_memory_bytes=2**27)
    assert "max_model_len lowered" in caplog.text
    assert size <= 2**27 and whole and windows
    with pytest.raises(ConfigError, match="needs 2048 pages"):
        sizes(GEMMA_3_270M, kv_cache_memory_bytes=2**27, max_model_len=32_768)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8_e4m3"])
def test_one_byte_a_number_holds_almost_twice_the_pages(kv_cache_dtype):
    """Per vector of 256 numbers: 256 bytes and a scale of 4 instead of 512."""
    settings = {"kv_cache_memory_bytes": GIB, "max_model_len": 16_384}
    whole, _, size = sizes(NO_WINDOWS, kv_cache_dtype=kv_cache_dtype, **settings)
    before, _, _ = sizes(NO_WINDOWS, kv_cache_dtype="bfloat16", **settings)
    assert whole / before == pytest.approx(512 / 260, rel=1e-3)
    assert 0.99 * GIB < size <= GIB
    assert sizes(NO_WINDOWS, kv_cache_dtype="float32", **settings)[0] == pytest.approx(
        before / 2, rel=1e-3
    )


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "int8", "float32"])
@pytest.mark.parametrize("latent", [False, True])
def test_page_bytes_are_those_of_the_arrays(kv_cache_dtype, latent):
    shape = CacheShape(
        layer_groups=(0, 1, 0),
        num_kv_heads=3,
        head_dim=8,
        page_size=4,
        dtype=kv_cache_dtype,
        has_values=not latent,
    )
    cache = make_cache(shape, (5, 7), (None, None))
    arrays = jax.tree.leaves(cache)
    assert sum(x.nbytes for x in arrays) == 5 * shape.page_bytes(0) + 7 * shape.page_bytes(1)
