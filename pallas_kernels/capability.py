"""What a device can do, and which kernels it can run: the one place that knows GPU generations.

Every refusal is decided here, in words, before anything is compiled: an instruction that a GPU
lacks makes the compiler abort the process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

GENERATIONS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
"""GPU generations with tile sizes of their own: A100, L4 and RTX 40, H100 and H200, B200, RTX 50
and RTX PRO 6000."""

MAX_HEAD_DIM = 256
QUERY_DTYPES = ("bfloat16", "float16", "float32")
SCALED_DTYPES = ("int8", "float8_e4m3fn")
"""Dtypes of pages that have a scale per token and head."""

_TWINS = {
    # A10, RTX 30, Orin: 100 KB of shared memory, as the L4 has.
    (8, 6): "sm_89",
    (8, 7): "sm_80",
    # B300; GB10.
    (10, 3): "sm_100",
    (11, 0): "sm_100",
    (12, 1): "sm_120",
}


@dataclass(frozen=True)
class Device:
    """A device as far as kernels care.

    Attributes:
        kind: Its name.
        compute_capability: (major, minor) of an NVIDIA GPU; None for anything else.
    """

    kind: str
    compute_capability: tuple[int, int] | None = None

    @property
    def generation(self) -> str | None:
        """The one of `GENERATIONS` whose tiles fit; None where there are no kernels for it."""
        if self.compute_capability is None:
            return None
        major, minor = self.compute_capability
        own = _TWINS.get((major, minor), f"sm_{major}{minor}")
        return own if own in GENERATIONS else None

    @property
    def has_fp8(self) -> bool:
        """Whether it converts float8 values."""
        return self.compute_capability is not None and self.compute_capability >= (8, 9)


def device_of(device: jax.Device) -> Device:
    """Describe a JAX device."""
    capability = getattr(device, "compute_capability", None)
    if device.platform not in ("gpu", "cuda") or capability is None:
        return Device(device.device_kind)
    major, _, minor = str(capability).partition(".")
    return Device(device.device_kind, (int(major), int(minor or 0)))


def current_device() -> Device:
    """Describe the device that a trace made now is for.

    That is `jax.default_device` where it is set (as when compiling for a GPU that is not there),
    else the first one.
    """
    default = jax.config.jax_default_device
    return device_of(default if isinstance(default, jax.Device) else jax.devices()[0])


def why_not_triton(
    device: Device, *, q_dtype: Any, kv_dtype: Any, head_dim: int, page_size: int
) -> str | None:
    """Say why the portable GPU kernels cannot do this; None if they can."""
    if device.generation is None:
        return f"needs an NVIDIA GPU of {', '.join(GENERATIONS)}; this device is {device.kind}"
    return why_never(q_dtype, kv_dtype, head_dim, page_size) or _why_not_fp8(device, kv_dtype)


def why_never(q_dtype: Any, kv_dtype: Any, head_dim: int, page_size: int) -> str | None:
    """Say why no device can do this with the portable GPU kernels; None if one can."""
    q_name, kv_name = jnp.dtype(q_dtype).name, jnp.dtype(kv_dtype).name
    if q_name not in QUERY_DTYPES:
        return f"takes queries of {', '.join(QUERY_DTYPES)}, got {q_name}"
    if kv_name not in (*QUERY_DTYPES, *SCALED_DTYPES):
        return f"takes pages of {', '.join((*QUERY_DTYPES, *SCALED_DTYPES))}, got {kv_name}"
    if head_dim > MAX_HEAD_DIM:
        return f"takes head dims up to {MAX_HEAD_DIM}, got {head_dim}"
    if page_size & (page_size - 1):
        return f"takes pages of a power of two of tokens, got {page_size}"
    return None


def _why_not_fp8(device: Device, kv_dtype: Any) -> str | None:
    name = jnp.dtype(kv_dtype).name
    if name.startswith("float8") and not device.has_fp8:
        major, minor = device.compute_capability or (0, 0)
        return (
            f"cannot read {name} pages on {device.kind}: float8 needs compute capability 8.9, this "
            f"one has {major}.{minor}; use int8 or bfloat16 pages"
        )
    return None
