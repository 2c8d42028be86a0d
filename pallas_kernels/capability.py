"""What a device can do, and which kernels it can run: the one place that knows GPU generations.

Every refusal is decided here, in words, before anything is compiled: an instruction that a GPU
lacks makes the compiler abort the process.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp

GENERATIONS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
"""GPU generations with tile sizes of their own: A100, L4 and RTX 40, H100 and H200, B200, RTX 50
and RTX PRO 6000."""

KERNELS = ("triton", "mosaic")
"""Kernels by preference: the portable ones, and those for Hopper, which have yet to be timed."""

IMPLEMENTATIONS = ("auto", "xla", "pallas", *KERNELS, "interpret")
"""Names of attention implementations. "auto": kernels where the device has them, else XLA. "xla":
plain jnp. "pallas": kernels, the first of `KERNELS` that the device has. "interpret": the portable
ones by Pallas' interpreter, on any device; slow, for tests."""

MAX_HEAD_DIM = 256
FLOAT_DTYPES = ("bfloat16", "float16", "float32")
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


def device_of(device: Any) -> Device:
    """Describe a `jax.Device`."""
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


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What of an attention call decides who can compute it.

    Attributes:
        dtype: Of the queries.
        kv_dtype: Of the pages.
        head_dim: H.
        page_size: Tokens per page.
    """

    dtype: Any
    kv_dtype: Any
    head_dim: int
    page_size: int

    @classmethod
    def of(cls, q: jax.Array, k_pages: jax.Array) -> Problem:
        """Describe a call by its arrays [T, N, H] and [num_pages, K, page_size, H]."""
        _, _, page_size, head_dim = k_pages.shape
        return cls(dtype=q.dtype, kv_dtype=k_pages.dtype, head_dim=head_dim, page_size=page_size)


def choose(impl: str, device: Device, problem: Problem) -> str:
    """Return who computes: "xla", "interpret" or one of `KERNELS`.

    Args:
        impl: One of `IMPLEMENTATIONS`.
        device: Where.
        problem: What.

    Raises:
        NotImplementedError: What was forced cannot be had here; says why and what can.
    """
    if impl not in IMPLEMENTATIONS:
        raise NotImplementedError(
            f"attention implementation {impl!r} is not available; use one of "
            f"{', '.join(IMPLEMENTATIONS)}"
        )
    if impl == "xla":
        return impl
    wanted = KERNELS if impl in ("auto", "pallas") else (impl,)
    refusals = []
    for name in wanted:
        refusal = _REFUSALS[name](device, problem)
        if refusal is None:
            return name
        refusals.append(refusal)
    if impl == "auto":
        return "xla"
    raise NotImplementedError(
        f"attention implementation {impl!r} {refusals[0]}; use 'xla', or 'auto' to take what there "
        "is"
    )


def most_elements(num_elements: int, dtype: Any) -> int:
    """Return how many elements of an array the portable GPU kernels reach: all, or the first 2**31.

    Their offsets count elements. They have 32 bits, sign included, unless the array has more than
    2**32 bytes: of one-byte numbers those behind 2 GiB are out of reach until there are 4 GiB.
    """
    has_long_offsets = num_elements * jnp.dtype(dtype).itemsize > 2**32
    return num_elements if has_long_offsets else min(num_elements, 2**31)


def _why_not_triton(device: Device, problem: Problem) -> str | None:
    """Say why the portable kernels cannot do this on this device; None if they can."""
    if device.generation is None:
        return _no_gpu(device)
    name = jnp.dtype(problem.kv_dtype).name
    if name.startswith("float8") and not device.has_fp8:
        major, minor = device.compute_capability or (0, 0)
        return (
            f"cannot read {name} pages on {device.kind!r}: that takes compute capability 8.9, and "
            f"it has {major}.{minor}; int8 pages would do"
        )
    return _why_not_interpreted(device, problem)


def _why_not_mosaic(device: Device, problem: Problem) -> str | None:
    """Say why the kernels for Hopper cannot do this on this device; None if they can."""
    if device.generation is None:
        return _no_gpu(device)
    # Their compiler is loaded only where it could be of use.
    from pallas_kernels.mosaic import refusal

    return refusal(device.compute_capability, **asdict(problem))


def _why_not_interpreted(_: Device, problem: Problem) -> str | None:
    """Say why the portable kernels can do this nowhere; None if they can."""
    dtype, kv_dtype = jnp.dtype(problem.dtype).name, jnp.dtype(problem.kv_dtype).name
    if dtype not in FLOAT_DTYPES:
        return f"takes queries of {', '.join(FLOAT_DTYPES)}, got {dtype}"
    if kv_dtype not in (*FLOAT_DTYPES, *SCALED_DTYPES):
        return f"takes pages of {', '.join((*FLOAT_DTYPES, *SCALED_DTYPES))}, got {kv_dtype}"
    if problem.head_dim > MAX_HEAD_DIM:
        return f"takes head dims up to {MAX_HEAD_DIM}, got {problem.head_dim}"
    if problem.page_size & (problem.page_size - 1):
        return f"takes pages of a power of two of tokens, got {problem.page_size}"
    return None


def _no_gpu(device: Device) -> str:
    return (
        f"needs an NVIDIA GPU of generation {', '.join(GENERATIONS)}, and the device here is "
        f"{device.kind!r}"
    )


_REFUSALS = {
    "triton": _why_not_triton,
    "mosaic": _why_not_mosaic,
    "interpret": _why_not_interpreted,
}
