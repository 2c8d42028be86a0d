"""Parts of joined tensors: the values of numpy, and nothing read beyond what they take."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import given

from jaxinfer.model_source import abstract_model
from jaxinfer.models import family_of, flat_parameters, lay_out_heads, relayout
from jaxinfer.models.deferred import Deferred
from jaxinfer.models.weights import _fillings
from jaxinfer.sharding import MESH_AXES, parameter_shardings
from tests.engines import config_of, source_of

A = np.random.default_rng(0).normal(size=(24, 6)).astype(np.float32)
B = np.random.default_rng(1).normal(size=(12, 6)).astype(np.float32)

# What families do to tensors, and what they might.
JOINS = {
    "heads grouped": lambda a, b: np.moveaxis(
        np.concatenate([p.reshape(3, -1, 2, 6) for p in (a, b, b)], axis=1), -1, 0
    ),
    "stacked": lambda a, b: np.moveaxis(np.stack([b, b]), -1, 0),
    "by turns": lambda a, b: a.reshape(2, -1, 6)[..., ::2],
    "regrouped": lambda a, b: a.reshape(6, 4, 6).reshape(3, 8, 6).reshape(-1, 6),
    "transposed, split, repeated": lambda a, b: np.repeat(
        np.split(a.T.reshape(6, 3, 4, 2), [2], axis=2)[1], 2, axis=1
    ),
    "padded": lambda a, b: np.concatenate([a.reshape(4, 6, 6), np.zeros((2, 6, 6), a.dtype)]),
    "with axes of one": lambda a, b: a.reshape(1, 24, 6, 1),
    "something unknown": lambda a, b: np.flip(np.asarray(a), 0),
}


def deferred(x: np.ndarray) -> Deferred:
    return Deferred.of(lambda: x, x.shape, x.dtype)


@pytest.mark.parametrize("join", JOINS.values(), ids=JOINS.keys())
@given(data=st.data())
def test_any_part_has_the_values_of_numpy(join, data) -> None:
    whole = join(A, B)
    made = join(deferred(A), deferred(B))
    assert made.shape == whole.shape
    ends = [data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2)) for n in whole.shape]
    box = tuple(
        (min(span), max(span)) if span[0] != span[1] else (0, n)
        for span, n in zip(ends, whole.shape, strict=True)
    )
    part = whole[tuple(slice(*span) for span in box)]
    if isinstance(made, Deferred):
        np.testing.assert_array_equal(made.read(box), part)
    else:
        np.testing.assert_array_equal(made, whole)


class Counting:
    """A tensor that notes how many elements are taken of it."""

    def __init__(self, values: np.ndarray, taken: list[int]):
        self.values, self.taken, self.flags = values, taken, values.flags

    def __getitem__(self, index) -> np.ndarray:
        part = self.values[index]
        self.taken.append(part.size)
        return part


class CountingSource:
    """A checkpoint of such tensors."""

    def __init__(self, source, taken: list[int]):
        self.source, self.taken = source, taken

    def names(self):
        return self.source.names()

    def info(self, name):
        return self.source.info(name)

    def read(self, name):
        return Counting(self.source.read(name), self.taken)


@pytest.mark.parametrize(
    ("model", "devices", "experts"),
    [
        ("llama3", 4, 1),
        ("smollm2", 4, 1),
        ("phi3", 4, 1),
        ("gpt2", 2, 1),
        ("gpt_neox", 2, 1),
        ("mixtral", 4, 2),
        ("deepseek_v3", 8, 4),
    ],
)
def test_no_device_reads_more_than_its_shard(model: str, devices: int, experts: int) -> None:
    source, stored = source_of(model), config_of(model)
    config = lay_out_heads(stored, devices)
    mesh = jax.sharding.AbstractMesh((1, experts, devices // experts), MESH_AXES)
    parameters = flat_parameters(nnx.state(abstract_model(config, "float32")[0]))
    originals = flat_parameters(nnx.state(abstract_model(stored, "float32")[0]))
    fillings = _fillings(family_of(source.config), stored)
    shardings = parameter_shardings(mesh, parameters)
    divided = 0
    for path, p in parameters.items():
        shard = shardings[path].shard_shape(p.shape)
        taken: list[int] = []
        values = fillings[path].deferred(CountingSource(source.checkpoint, taken), stored, p.dtype)
        values = relayout(config, path, values)
        assert values.shape == tuple(p.shape), path
        values.read(tuple((0, n) for n in shard))  # the first device's, which has no padding
        assert sum(taken) <= math.prod(shard), path
        divided += math.prod(shard) < originals[path].size
    assert divided >= 4 * config.num_hidden_layers
