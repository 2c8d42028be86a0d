"""Linear layers on the CPU kernels against plain jnp, on each instruction set there is."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer import cpu_kernels
from tests.kernels.cpu import CPU_ISAS, isa_or_skip

# Both sum in float32, in another order. Of bfloat16 both round the normed input, which may fall to
# either side of a tie; so may an input that is made int8, to 1/127 of its block's largest.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "int8": 2e-2}


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer and its input."""

    rows: int
    inputs: int
    outputs: int
    fmt: str = "float32"
    norm: bool = False
    gate: str | None = None
    residual: bool = False
    bias: bool = False
    dtype: str = "float32"
    out_dtype: str | None = None
    seed: int = 0

    def arguments(self) -> tuple[jax.Array, jax.Array, dict]:
        """Return the input, the packed weight, and what else `linear` takes."""
        rng = np.random.default_rng(self.seed)

        def normal(*shape: int) -> np.ndarray:
            return rng.normal(size=shape).astype(np.float32)

        weight = normal(self.outputs, self.inputs)
        bias = normal(self.outputs) if self.bias else None
        if self.gate is not None:
            weight = cpu_kernels.interleave(weight, normal(self.outputs, self.inputs))
            bias = None if bias is None else cpu_kernels.interleave(bias, normal(self.outputs))
        dtype = self.out_dtype or self.dtype
        residual = normal(self.rows, self.outputs) if self.residual else None
        options = {
            "fmt": self.fmt,
            "out_features": self.outputs,
            "norm": jnp.asarray(normal(self.inputs)) if self.norm else None,
            "eps": 1e-5,
            "gate": self.gate,
            "residual": None if residual is None else jnp.asarray(residual, dtype),
            "out_dtype": self.out_dtype,
        }
        packed = jnp.asarray(cpu_kernels.pack(weight, self.fmt, bias))
        return jnp.asarray(normal(self.rows, self.inputs), self.dtype), packed, options


@st.composite
def cases(draw: st.DrawFn) -> Case:
    return Case(
        rows=draw(st.integers(1, 64)),
        inputs=draw(st.sampled_from([1, 3, 63, 64, 65, 96, 130]) | st.integers(1, 200)),
        outputs=draw(st.sampled_from([1, 15, 16, 31, 32, 33, 64]) | st.integers(1, 150)),
        fmt=draw(st.sampled_from(list(cpu_kernels.FORMATS))),
        norm=draw(st.booleans()),
        gate=draw(st.sampled_from([None, "silu", "gelu", "gelu_pytorch_tanh"])),
        residual=draw(st.booleans()),
        bias=draw(st.booleans()),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        out_dtype=draw(st.sampled_from([None, "float32", "bfloat16"])),
        seed=draw(st.integers(0, 999)),
    )


def check(case: Case, isa: str) -> None:
    x, packed, options = case.arguments()
    out = cpu_kernels.linear(x, packed, isa=isa_or_skip(isa), **options)
    expected = cpu_kernels.reference_linear(x, packed, **options)
    assert out.dtype == expected.dtype
    out, expected = np.asarray(out, np.float64), np.asarray(expected, np.float64)
    rounding = 1e-2 if "bfloat16" in (case.out_dtype, case.dtype) else 0.0
    scale = np.abs(expected).max() + 1e-6
    np.testing.assert_allclose(out / scale, expected / scale, atol=TOLERANCE[case.fmt] + rounding)


@pytest.mark.parametrize("isa", CPU_ISAS)
@settings(max_examples=12)
@given(case=cases())
def test_layers_equal_the_reference(isa: str, case: Case) -> None:
    check(case, isa)


@pytest.mark.parametrize("isa", CPU_ISAS)
@pytest.mark.parametrize("fmt", list(cpu_kernels.FORMATS))
def test_enough_rows_and_panels_for_every_way_to_share_them(isa: str, fmt: str) -> None:
    check(Case(rows=401, inputs=100, outputs=530, fmt=fmt, norm=True, residual=True), isa)


@pytest.mark.parametrize("isa", CPU_ISAS)
def test_int8_is_exact_where_nothing_is_rounded(isa: str) -> None:
    """Whole numbers with a 127 in each block and row are their own int8."""
    rng = np.random.default_rng(0)
    x, weight = (rng.integers(-127, 128, (n, 130)).astype(np.float32) for n in (7, 40))
    for values in (x, weight):
        values[:, [0, 64, 128]] = 127
    packed = jnp.asarray(cpu_kernels.pack(weight, "int8"))
    out = cpu_kernels.linear(
        jnp.asarray(x), packed, fmt="int8", out_features=40, isa=isa_or_skip(isa)
    )
    np.testing.assert_array_equal(np.asarray(out), x @ weight.T)


@pytest.mark.parametrize("isa", CPU_ISAS)
@pytest.mark.parametrize("fmt", list(cpu_kernels.FORMATS))
def test_a_row_is_bitwise_the_same_whatever_its_neighbours(isa: str, fmt: str) -> None:
    x, packed, options = Case(rows=40, inputs=200, outputs=70, fmt=fmt, norm=True).arguments()
    isa = isa_or_skip(isa)
    together = np.asarray(cpu_kernels.linear(x, packed, isa=isa, **options))
    for rows in (1, 2, 5, 13):
        alone = np.asarray(cpu_kernels.linear(x[:rows], packed, isa=isa, **options))
        np.testing.assert_array_equal(alone, together[:rows])


@pytest.mark.parametrize("isa", CPU_ISAS)
@pytest.mark.parametrize("fmt", list(cpu_kernels.FORMATS))
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so_and_in_its_row(isa: str, fmt: str, poison: float) -> None:
    x, packed, options = Case(rows=9, inputs=130, outputs=40, fmt=fmt).arguments()
    isa = isa_or_skip(isa)
    clean = np.asarray(cpu_kernels.linear(x, packed, isa=isa, **options))
    out = np.asarray(cpu_kernels.linear(x.at[4, 70].set(poison), packed, isa=isa, **options))
    assert not np.isfinite(out[4]).any()
    np.testing.assert_array_equal(np.delete(out, 4, 0), np.delete(clean, 4, 0))


@pytest.mark.parametrize("fmt", list(cpu_kernels.FORMATS))
def test_rows_of_a_packed_weight_are_those_packed(fmt: str) -> None:
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(70, 37)).astype(np.float32)
    bias = rng.normal(size=70).astype(np.float32)
    packed = cpu_kernels.pack(weight, fmt, bias)
    assert packed.shape == cpu_kernels.packed_shape(fmt, 70, 37)
    unpacked, unpacked_bias = cpu_kernels.unpack(packed, fmt, 70, 37)
    error = {"int8": np.abs(weight).max() / 127 / 2, "bfloat16": 0.02, "float32": 0}[fmt]
    np.testing.assert_allclose(unpacked, weight, atol=error * 1.001)
    np.testing.assert_array_equal(unpacked_bias, bias)
    ids = jnp.asarray([0, 31, 32, 69], jnp.int32)
    rows = cpu_kernels.embed(
        jnp.asarray(packed), ids, fmt=fmt, in_features=37, dtype=jnp.dtype(jnp.float32)
    )
    np.testing.assert_array_equal(np.asarray(rows), unpacked[ids])


def test_unknown_instruction_sets_are_refused_by_name() -> None:
    isa_or_skip("portable")
    x, packed, options = Case(rows=1, inputs=8, outputs=8).arguments()
    with pytest.raises(Exception, match="sse9"):
        jax.block_until_ready(cpu_kernels.linear(x, packed, isa="sse9", **options))
