"""Which kernels are compiled: every kernel, dtype, head dim and feature at least once by default.

By default means: for every chip in the docs' table, and for some chips in turn in the default test
run. Programs are those that a step runs: attention of a packed batch (decode rows and chunks of
prompts in one program), and the writing of its keys and values.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from pallas_kernels.aot.case import NARROW, WIDE, Case, Program
from pallas_kernels.aot.chips import CHIPS
from pallas_kernels.attention import paged_attention
from pallas_kernels.capability import FLOAT_DTYPES, SCALED_DTYPES, device_of
from pallas_kernels.kv_pages import KVPages, has_scales
from pallas_kernels.kv_write import write_kv
from pallas_kernels.ragged_batch import RaggedBatch
from pallas_kernels.tiles import TileKey, decode_tiles

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
CHIPS_PER_CASE = 2
"""How many chips the default test run compiles a case for."""

NUM_TOKENS, NUM_ROWS, MAX_PAGES, NUM_PAGES, PAGE_SIZE = 512, 16, 512, 4096, 16

PREFILL, DECODE, COMBINE = "paged_prefill", "paged_decode_splits", "paged_decode_combine"
DECODE_WHOLE = "paged_decode"
WRITE = "write_kv"
HOPPER_PREFILL, HOPPER_DECODE = "mosaic_paged_prefill", "mosaic_paged_decode"


@dataclass(frozen=True, kw_only=True)
class Attention:
    """One compiled kind of attention.

    Attributes:
        dtype: Of queries.
        kv_dtype: Of pages; None for that of queries.
        head_dim: H.
        group: Query heads per key/value head.
        num_kv_heads: K.
        window: Keys visible to a token.
        softcap: Bound of the scores.
        sinks: Heads have sinks.
        deterministic: Splits at fixed positions.
        num_pages: Of the pool.
        impl: See `pallas_kernels.paged_attention`.
        chips: See `Case`.
        default: See `Case`.
        sample: See `Case`.
    """

    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    head_dim: int = 128
    group: int = 4
    num_kv_heads: int = 4
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    deterministic: bool = False
    num_pages: int = NUM_PAGES
    impl: str = "triton"
    chips: tuple[str, ...] = tuple(CHIPS)
    default: bool = False
    sample: tuple[str, ...] | None = None

    @property
    def name(self) -> str:
        """E.g. "attention bfloat16, int8 pages, H 128, G 4, window"."""
        parts = [f"{'' if self.impl == 'triton' else f'{self.impl} '}attention {self.dtype}"]
        parts += [f"{self.kv_dtype} pages"] if self.kv_dtype else []
        parts += [f"H {self.head_dim}", f"G {self.group}"]
        flags = ("window", "softcap", "sinks", "deterministic")
        parts += [name for name in flags if getattr(self, name)]
        parts += [f"{self.num_pages} pages"] if self.num_pages > NUM_PAGES else []
        return ", ".join(parts)

    def case(self) -> Case:
        """Compile it for its chips."""
        if self.impl == "mosaic":
            matrix = {HOPPER_PREFILL: WIDE, HOPPER_DECODE: WIDE}
            kernels = tuple(matrix)
        else:
            # What a short window shows is not worth dividing.
            is_whole = self.window is not None and self.window <= 128
            decode = (DECODE_WHOLE,) if is_whole else (DECODE, COMBINE)
            kernels = (PREFILL, *decode)
            # Of float32 both occur: some chips have wide instructions for three passes of TF32.
            matrix = {} if self.dtype == "float32" else {PREFILL: WIDE, decode[0]: NARROW}
        return Case(
            name=self.name,
            build=self._build,
            kernels=kernels,
            chips=self.chips,
            matrix=matrix,
            default=self.default,
            sample=self.sample,
        )

    def _build(self, _: Mesh) -> Program:
        K, H = self.num_kv_heads, self.head_dim
        pages = abstract_pages(self.kv_dtype or self.dtype, K, H, self.num_pages)
        q = jax.ShapeDtypeStruct((NUM_TOKENS, K * self.group, H), jnp.dtype(self.dtype))
        sinks = jax.ShapeDtypeStruct((K * self.group,), q.dtype) if self.sinks else None
        attend = partial(
            paged_attention,
            scale=H**-0.5,
            sliding_window=self.window,
            logit_softcap=self.softcap,
            deterministic=self.deterministic,
            impl=self.impl,
        )

        def program(q: Any, pages: Any, batch: RaggedBatch, sinks: Any) -> jax.Array:
            return attend(
                q,
                pages.k_pages,
                pages.v_pages,
                batch,
                sinks=sinks,
                k_scales=pages.k_scales,
                v_scales=pages.v_scales,
            )

        return Program(program, (q, pages, abstract_batch(), sinks))


def cases() -> list[Case]:
    """The default ones, which together name everything once; then all combinations."""
    hopper = Attention(impl="mosaic", chips=("h100",))
    # They take four times as long as the others.
    unsampled = replace(hopper, sample=())
    covering = [
        Attention(),
        Attention(head_dim=64, group=8, num_kv_heads=8, window=128, sinks=True),
        Attention(head_dim=80, group=1, dtype="float16"),
        Attention(head_dim=96, dtype="float32"),
        Attention(head_dim=192, group=16),
        Attention(head_dim=256, group=2, window=4096, softcap=50.0),
        Attention(kv_dtype="int8"),
        Attention(kv_dtype="float8_e4m3fn", deterministic=True),
        # Beyond 4 GiB an array takes offsets of 64 bits.
        Attention(num_pages=2**18 + 1),
        # What the portable kernels do everywhere, these do on Hopper only.
        replace(hopper, chips=("a100", "h100", "b200")),
        replace(hopper, head_dim=64, group=8, window=128, sinks=True),
        replace(hopper, head_dim=80, group=1, dtype="float16"),
        replace(unsampled, head_dim=96),
        replace(unsampled, head_dim=192, group=16),
        replace(unsampled, head_dim=256, group=2, window=4096, softcap=50.0),
    ]
    pages = (None, *SCALED_DTYPES)
    plain = [
        Attention(dtype=dtype, kv_dtype=kv_dtype, head_dim=H)
        for dtype, kv_dtype, H in itertools.product(FLOAT_DTYPES, pages, HEAD_DIMS)
    ]
    adorned = [replace(a, window=1024, softcap=30.0, sinks=True, group=8) for a in plain]
    attention = {a.name: a for a in (*plain, *adorned)}
    attention |= {a.name: replace(a, default=True) for a in covering}
    return _deal_chips(
        [
            *(a.case() for a in attention.values()),
            *(_several_tokens(dtype, H) for dtype in FLOAT_DTYPES for H in HEAD_DIMS),
            *(_write(dtype) for dtype in pages),
        ]
    )


def _deal_chips(cases: list[Case]) -> list[Case]:
    """Give each default case of all chips some to be tested on, and each chip its turn."""
    chips = itertools.cycle(CHIPS)
    return [
        replace(case, sample=tuple(itertools.islice(chips, CHIPS_PER_CASE)))
        if case.default and len(case.chips) == len(CHIPS)
        else case
        for case in cases
    ]


def _several_tokens(dtype: str, H: int) -> Case:
    """Decode of rows with up to 8 tokens each, as speculative decoding verifies them."""
    is_default = (dtype, H) == ("bfloat16", 128)
    K, group = 4, 4 if is_default else 8

    def build(mesh: Mesh) -> Program:
        q = jax.ShapeDtypeStruct((NUM_TOKENS, K * group, H), jnp.dtype(dtype))
        pages = abstract_pages(dtype, K, H)
        # Loaded late, like every kernel.
        from pallas_kernels.triton.decode import paged_decode

        generation = device_of(mesh.devices.flat[0]).generation
        assert generation is not None
        tiles = decode_tiles(TileKey.of(generation, H, dtype, dtype))
        function = partial(paged_decode, scale=H**-0.5, max_query_len=8, tiles=tiles)
        return Program(function, (q, pages.k_pages, pages.v_pages, abstract_batch()))

    return Case(
        name=f"decode of 8 tokens, {dtype}, H {H}, G {group}",
        build=build,
        kernels=(DECODE, COMBINE),
        # 64 rows fill a warpgroup where it has four warps for itself, which varies.
        matrix={DECODE: NARROW} if is_default else {},
        default=is_default,
    )


def _write(kv_dtype: str | None) -> Case:
    def build(_: Mesh) -> Program:
        pages = abstract_pages(kv_dtype or "bfloat16", 4, 128)
        new = jax.ShapeDtypeStruct((NUM_TOKENS, 4, 128), jnp.bfloat16)
        slots = jax.ShapeDtypeStruct((NUM_TOKENS,), jnp.int32)
        function = jax.jit(partial(write_kv, impl="triton"), donate_argnums=2)
        return Program(function, (new, new, pages, slots))

    return Case(name=f"write {kv_dtype or 'bfloat16'} pages", build=build, kernels=(WRITE,))


def abstract_pages(
    dtype: str, num_kv_heads: int, head_dim: int, num_pages: int = NUM_PAGES
) -> KVPages:
    """Return pages as shapes, with scales where the dtype has them."""
    shape = (num_pages, num_kv_heads, PAGE_SIZE, head_dim)

    def zeros() -> KVPages:
        kinds = [jnp.zeros(shape, jnp.dtype(dtype)) for _ in range(2)]
        scales = [jnp.zeros(shape[:3], jnp.float32) for _ in range(2) if has_scales(dtype)]
        return KVPages(*kinds, *scales)

    return jax.eval_shape(zeros)


def abstract_batch() -> RaggedBatch:
    """Return a step's metadata as shapes."""
    ints = partial(jnp.zeros, dtype=jnp.int32)
    return jax.eval_shape(
        lambda: RaggedBatch(
            page_table=ints((NUM_ROWS, MAX_PAGES)),
            seq_lens=ints((NUM_ROWS,)),
            query_start_loc=ints((NUM_ROWS + 1,)),
            num_decode_rows=ints(()),
            num_rows=ints(()),
        )
    )
