"""From a checkpoint's tensors into a model's parameters, one at a time, straight into place.

Where several devices share a parameter, each is given its own part, and no other is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.errors import ModelError
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.deferred import Deferred
from jaxinfer.models.family import Family, Weight
from jaxinfer.models.head_layout import relayout


@runtime_checkable
class TensorInfo(Protocol):
    """What is known of a tensor before it is read."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...


@runtime_checkable
class TensorSource(Protocol):
    """The bytes seam, as `checkpoints.Checkpoint` offers it: HF names and layouts."""

    def names(self) -> list[str]: ...
    def info(self, name: str) -> TensorInfo: ...
    def read(self, name: str) -> np.ndarray: ...


@dataclass(frozen=True)
class Recipe:
    """How parameters of a changed model are made from those that its family knows.

    Attributes:
        targets: Dotted paths in the changed model.
        sources: Dotted paths in the original.
        make: Values of the sources, float32 → values of the targets.
    """

    targets: tuple[str, ...]
    sources: tuple[str, ...]
    make: Callable[..., Sequence[np.ndarray]]


def as_it_is(path: str) -> Recipe:
    """A parameter that is not changed."""
    return Recipe((path,), (path,), lambda values: (values,))


class _WithoutPrefix:
    """A source whose names may or may not carry a prefix, as one whose names do not."""

    def __init__(self, source: TensorSource, prefix: str):
        self._source = source
        self._full_names = {name.removeprefix(prefix): name for name in source.names()}

    def names(self) -> list[str]:
        return list(self._full_names)

    def info(self, name: str) -> TensorInfo:
        return self._source.info(self._full_names[name])

    def read(self, name: str) -> np.ndarray:
        return self._source.read(self._full_names[name])


@dataclass(frozen=True)
class _Filling:
    """One parameter and the tensors that fill it."""

    path: str
    sources: tuple[str, ...]
    weight: Weight

    def shape(
        self, shapes: Sequence[tuple[int, ...]], config: ModelConfig
    ) -> tuple[int, ...] | None:
        """The parameter's shape by the sources' `shapes`; None if they do not go together."""
        parts = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        try:
            return jax.eval_shape(lambda *p: self.weight.assemble(jnp, p, config), *parts).shape
        except (TypeError, ValueError):
            return None

    def read(self, source: TensorSource, config: ModelConfig, dtype: Any) -> np.ndarray:
        """Return the values, as a view where the tensors' own order is another."""
        parts = [source.read(name).astype(dtype, copy=False) for name in self.sources]
        return self.weight.assemble(np, parts, config)

    def deferred(self, source: TensorSource, config: ModelConfig, dtype: Any) -> Deferred:
        """Return the values to be read in parts."""
        if self.weight.packed:  # decoded as a whole
            whole = self.read(source, config, dtype)
            return Deferred.of(lambda: whole, whole.shape, dtype)
        parts = [
            Deferred.of(partial(source.read, name), source.info(name).shape, dtype)
            for name in self.sources
        ]
        return self.weight.assemble(np, parts, config)


def flat_parameters(state: nnx.State) -> dict[str, nnx.Variable]:
    """Return the parameters by dotted path, in the order of the state's leaves."""
    return {
        ".".join(str(part) for part in path): variable
        for path, variable in nnx.to_flat_state(state)
    }


def load_weights(
    source: TensorSource,
    family: Family,
    config: ModelConfig,
    state: nnx.State,
    shardings: Mapping[str, jax.sharding.Sharding],
    recipes: Sequence[Recipe] = (),
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    put: Callable[[np.ndarray, jax.sharding.Sharding], jax.Array] = jax.device_put,
) -> dict[str, jax.Array]:
    """Read every parameter of a model into its sharding.

    Host memory peaks at the largest parameter beyond what is already on the devices. Of a parameter
    that several share, each process reads what its own hold.

    Args:
        source: The checkpoint.
        family: Whose table of weights applies.
        config: The model's; as stored, it decides which parameters exist.
        state: Abstract parameters of the model as stored and as the family knows it: shapes and
            dtypes.
        shardings: Where each of the model's parameters goes, by dotted path.
        recipes: What the model has instead of parameters of `state`.
        on_progress: Called with bytes of `state` done and in all.
        put: Brings an array to the devices.

    Returns:
        Arrays by dotted path, in the order of the tensors' reading.

    Raises:
        ModelError: Tensors are missing, unexpected or misshapen; all are listed.
    """
    if family.optional_prefix:
        source = _WithoutPrefix(source, family.optional_prefix)
    parameters = flat_parameters(state)
    stored = config.as_stored()
    fillings = _fillings(family, stored)
    _check(source, family, stored, parameters, fillings)
    sizes = {path: int(np.prod(p.shape)) * p.dtype.itemsize for path, p in parameters.items()}
    done, total = 0, sum(sizes.values())
    arrays = {}
    used = {path for recipe in recipes for path in recipe.sources}
    for recipe in (*recipes, *(as_it_is(path) for path in parameters if path not in used)):
        changed = recipe.targets != recipe.sources
        shared = not changed and len(shardings[recipe.targets[0]].device_set) > 1
        values = []
        for path in recipe.sources:
            dtype = np.float32 if changed else parameters[path].dtype
            read = fillings[path].deferred if shared else fillings[path].read
            values.append(relayout(config, path, read(source, stored, dtype)))
        for path, made in zip(recipe.targets, recipe.make(*values), strict=True):
            if shared:
                arrays[path] = _place_parts(made, shardings[path])
            else:
                arrays[path] = put(np.ascontiguousarray(made), shardings[path])
        done += sum(sizes[path] for path in recipe.sources)
        on_progress(done, total)
    return arrays


def _place_parts(values: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """Give each device of this process its part of `Deferred` values, reading each part once."""
    devices = defaultdict(list)
    for device, index in sharding.addressable_devices_indices_map(values.shape).items():
        assert index is not None
        spans = (part.indices(size) for part, size in zip(index, values.shape, strict=True))
        devices[tuple((start, stop) for start, stop, _ in spans)].append(device)
    placed = []
    for box, same in devices.items():
        part = np.ascontiguousarray(values.read(box))
        placed += [jax.device_put(part, device) for device in same]
    return jax.make_array_from_single_device_arrays(values.shape, sharding, placed)


def _fillings(family: Family, config: ModelConfig) -> dict[str, _Filling]:
    fillings = {}
    for weight in family.weights:
        if weight.when(config):
            for filling in _expand(weight, config):
                fillings[filling.path] = filling
    return fillings


def _expand(weight: Weight, config: ModelConfig) -> list[_Filling]:
    counts = {
        "{head}": config.num_attention_heads,
        "{kv_head}": config.num_key_value_heads,
        "{expert}": config.moe.num_experts if config.moe else 0,
    }
    sources = list(weight.sources)
    for mark, count in counts.items():
        sources = [
            source.replace(mark, str(n))
            for source in sources
            for n in range(count if mark in source else 1)
        ]
    per_layer = "{i}" in weight.target
    return [
        _Filling(
            weight.target.replace("{i}", str(i)),
            tuple(source.replace("{i}", str(i)) for source in sources),
            weight,
        )
        for i in range(config.num_hidden_layers if per_layer else 1)
        if not per_layer or weight.in_layer(config, i)
    ]


def _check(
    source: TensorSource,
    family: Family,
    config: ModelConfig,
    parameters: Mapping[str, nnx.Variable],
    fillings: Mapping[str, _Filling],
) -> None:
    """Compare names and shapes before any weight is read, and report every fault at once."""
    unmapped = sorted(set(parameters) ^ set(fillings))
    assert not unmapped, f"family {family.name}: model and weight table differ in {unmapped}"
    present = set(source.names())
    faults = []
    used: set[str] = set()
    # Layers are alike, and asking jax takes 3 ms.
    known: dict[tuple[Any, ...], tuple[int, ...] | None] = {}
    for path, filling in fillings.items():
        used.update(filling.sources)
        missing = [name for name in filling.sources if name not in present]
        faults += [f"missing: {name}" for name in missing]
        if missing:
            continue
        faults += _quantized(source, filling)
        expected = tuple(parameters[path].shape)
        shapes = tuple(tuple(source.info(name).shape) for name in filling.sources)
        key = (id(filling.weight), shapes)
        if key not in known:
            known[key] = filling.shape(shapes, config)
        if expected != known[key]:
            named = zip(filling.sources, shapes, strict=True)
            found = ", ".join(f"{name} {list(shape)}" for name, shape in named)
            faults.append(f"misshapen: {found}; expected to make up {path} {list(expected)}")
    # Behind the last layer, some checkpoints keep layers that draft tokens.
    drafts = (f"model.layers.{config.num_hidden_layers}.",) if family.drafts else ()
    tied = _tied_heads(family, config) & present
    faults += [
        f"unexpected: {name}"
        for name in sorted(present - used - tied)
        if not name.endswith(family.ignored) and not name.startswith(drafts)
    ]
    if faults:
        raise ModelError(
            f"the checkpoint does not fit a {family.name} model of this config "
            f"({len(faults)} faults):\n  " + "\n  ".join(faults)
        )
    (embedding,) = fillings["embed.embedding"].sources
    for head in tied:
        _check_tied(source, head, embedding)


# Of whole numbers and of one byte: they mean something only together with scales.
_CODES = ("int", "uint", "bool", "float8", "I8", "I16", "I32", "I64")


def _quantized(source: TensorSource, filling: _Filling) -> list[str]:
    """Faults of tensors that hold codes where weights are wanted."""
    dtypes = {name: source.info(name).dtype for name in filling.sources}
    return [
        f"quantized: {name} is stored as {dtype}, which is not supported here"
        for name, dtype in dtypes.items()
        if dtype.startswith(_CODES) and not filling.weight.packed
    ]


def _tied_heads(family: Family, config: ModelConfig) -> set[str]:
    """Names under which a tied model's checkpoint may carry its head all the same."""
    if not config.tie_word_embeddings:
        return set()
    heads = (weight for weight in family.weights if weight.target == "lm_head.kernel")
    return {name for head in heads for name in head.sources}


def _check_tied(source: TensorSource, head: str, embedding: str) -> None:
    """Raise if a head that need not be there says something else than the embedding."""
    ours, theirs = source.read(head), source.read(embedding)
    if ours.shape != theirs.shape or not np.array_equal(ours, theirs):
        raise ModelError(
            f"the config ties the head to the embedding, but the checkpoint's {head} differs from "
            f"{embedding}; if the head is trained, set tie_word_embeddings to false in the config, "
            f"else remove it from the checkpoint"
        )
