"""Hopper kernels to compile, called past the entry: what it cannot ask for yet is among them."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from pallas_kernels import RaggedBatch, mosaic
from pallas_kernels.aot import Case, Program
from pallas_kernels.aot.case import WIDE

PREFILL, DECODE = "mosaic_paged_prefill", "mosaic_paged_decode"

DEFAULT = (
    "H 80, G 3, pages of 256",
    "H 256 everything",
    "H 128 eight tokens",
)


def cases() -> list[Case]:
    shapes: dict[str, dict[str, Any]] = {
        "H 128": {},
        "H 64 float16, pages of 64": {"head_dim": 64, "dtype": "float16", "page_size": 64},
        "H 80, G 3, pages of 256": {"head_dim": 80, "group": 3, "page_size": 256},
        "H 96, G 1, pages of 8, 20 tokens": {
            "head_dim": 96,
            "group": 1,
            "page_size": 8,
            "num_tokens": 20,
        },
        "H 192, G 16": {"head_dim": 192, "group": 16},
        "H 256 everything": {
            "head_dim": 256,
            "group": 2,
            "sliding_window": 4096,
            "logit_softcap": 50.0,
            "sinks": True,
        },
        "H 128 everything": {"sliding_window": 1024, "logit_softcap": 30.0, "sinks": True},
    }
    speculative = {"max_query_len": 8, "split_len": 1024}
    hopper = {"chips": ("h100",)}
    return [
        *(
            Case(
                name=f"prefill {name}",
                build=partial(_prefill, **shape),
                kernels=(PREFILL,),
                matrix={PREFILL: WIDE},
                default=name in DEFAULT,
                **hopper,
            )
            for name, shape in shapes.items()
        ),
        *(
            Case(
                name=f"decode {name}",
                build=partial(_decode, **shape),
                kernels=(DECODE,),
                matrix={DECODE: WIDE},
                default=name in DEFAULT,
                **hopper,
            )
            for name, shape in {**shapes, "H 128 eight tokens": speculative}.items()
        ),
        Case(name="prefill elsewhere", build=_prefill, chips=("a100", "b200", "rtx_pro_6000")),
        Case(name="decode elsewhere", build=_decode, chips=("a100", "b200", "rtx_pro_6000")),
    ]


def _prefill(_: Mesh, **shape: Any) -> Program:
    arguments, keywords = _arguments(**shape)
    tiles = mosaic.default_prefill_tiles(arguments[0].shape[2])
    return Program(_function(mosaic.paged_prefill, tiles=tiles, **keywords), arguments)


def _decode(_: Mesh, **shape: Any) -> Program:
    arguments, keywords = _arguments(**shape)
    tiles = mosaic.default_decode_tiles(arguments[0].shape[2])
    return Program(_function(mosaic.paged_decode, tiles=tiles, **keywords), arguments)


def _function(kernel: Any, **keywords: Any) -> Any:
    def function(q: Any, k_pages: Any, v_pages: Any, batch: RaggedBatch, sinks: Any) -> Any:
        return kernel(q, k_pages, v_pages, batch, sinks=sinks, scale=0.1, **keywords)

    return function


def _arguments(
    *,
    head_dim: int = 128,
    group: int = 4,
    page_size: int = 16,
    num_tokens: int = 512,
    dtype: str = "bfloat16",
    sinks: bool = False,
    **keywords: Any,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    K, B, P = 4, 16, 64

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    q = jax.ShapeDtypeStruct((num_tokens, K * group, head_dim), jnp.dtype(dtype))
    pages = jax.ShapeDtypeStruct((1024, K, page_size, head_dim), q.dtype)
    batch = RaggedBatch(ints(B, P), ints(B), ints(B + 1), ints(), ints())
    heads = jax.ShapeDtypeStruct((K * group,), jnp.float32) if sinks else None
    return (q, pages, pages, batch, heads), keywords
