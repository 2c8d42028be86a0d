"""Serve a model of your own: an NNX module, or a pure function, with an injected `attend`.

The model says what it computes for a packed batch of tokens, and calls `attend` where a token looks
at others; pages, batching, sampling, streaming and HTTP are the engine's. Nothing here knows how
the model is made.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.config import EngineConfig
from jaxinfer.engine import Engine
from jaxinfer.errors import ConfigError, ModelError
from jaxinfer.loading import LoadedModel, tokenizer_of
from jaxinfer.model_runner import ModelRunner
from jaxinfer.model_source import ModelSource
from jaxinfer.models import ModelConfig, Transformer, flat_parameters
from jaxinfer.nn.attention import Attend
from jaxinfer.nn.tap import NO_TAP, Tap
from jaxinfer.resolution import resolve, runner_config
from jaxinfer.sharding import make_mesh, replicated
from jaxinfer.tokenizer import Tokenizer


class ServableModule(Protocol):
    """What a module must have to be served.

    A step's tokens stand behind each other in one axis T, whoever's they are: only `positions` and
    `attend` tell sequences apart. Padding has position -1; what is computed of it is thrown away.
    """

    def __call__(self, token_ids: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        """Return hidden states [T, D], in the engine's dtype.

        Args:
            token_ids: int32 [T].
            positions: int32 [T], each token's in its sequence.
            attend: `attend(layer, q [T, N, H], k [T, K, H], v [T, K, H], scale=H**-0.5,
                sliding_window=None)` stores keys and values and returns what each token gathers
                from its sequence, [T, N, H]. Once for each layer, from 0. See
                `jaxinfer.nn.attention.Attend`.

        A fourth argument named `tap` is given a `jaxinfer.nn.tap.Tap`, if the module takes one:
        what it is shown can be captured and edited.
        """
        ...

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Return float32 [B, V] for hidden states [B, D]."""
        ...


class _Served(nnx.Module):
    """A user's module with the interface of `jaxinfer.models.Transformer`."""

    head_path = "body"

    def __init__(self, body: Any, config: ModelConfig):
        self.body = body
        self.config = config
        self.takes_tap = "tap" in inspect.signature(type(body).__call__).parameters

    def __call__(
        self, token_ids: jax.Array, positions: jax.Array, attend: Attend, tap: Tap = NO_TAP
    ) -> jax.Array:
        more = {"tap": tap} if self.takes_tap else {}
        return tap("final", self.body(token_ids, positions, attend, **more))

    def head(self) -> nnx.Module:
        return _Head(self.body)


class _Head(nnx.Module):
    def __init__(self, projection: Any):
        self.projection = projection

    def __call__(self, hidden: jax.Array) -> jax.Array:
        return self.projection.logits(hidden)


class _FunctionModule(nnx.Module):
    """Two pure functions of the same parameters, as a module."""

    def __init__(self, params: Any, forward: Callable[..., Any], logits: Callable[..., Any]):
        leaves, self.treedef = jax.tree.flatten(params)
        self.leaves = nnx.List([nnx.Param(leaf) for leaf in leaves])
        self.forward, self.to_logits = forward, logits

    def _params(self) -> Any:
        return jax.tree.unflatten(self.treedef, [leaf[...] for leaf in self.leaves])

    def __call__(self, token_ids: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        return self.forward(self._params(), token_ids, positions, attend)

    def logits(self, hidden: jax.Array) -> jax.Array:
        return self.to_logits(self._params(), hidden)


def load_module(
    module: nnx.Module,
    *,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    head_dim: int,
    max_position_embeddings: int,
    tokenizer: str | Tokenizer,
    num_kv_heads: int | None = None,
    sliding_windows: tuple[int | None, ...] = (),
    name: str = "own-model",
    **settings: Any,
) -> LoadedModel:
    """Return an engine around a module: for `LLM.from_loaded`, or for a server.

    Args:
        module: A `ServableModule` with its weights in it.
        vocab_size: V.
        hidden_size: D, of what the module returns.
        num_layers: Layers that call `attend`.
        num_heads: N.
        head_dim: H, of keys and values.
        max_position_embeddings: Longest sequence that the model was made for.
        tokenizer: Where one comes from, as `EngineConfig.tokenizer`, or one.
        num_kv_heads: K; N if None.
        sliding_windows: Per layer, what it passes to `attend`; empty if it never does.
        name: In the API.
        settings: Fields of `EngineConfig`. "dtype", of the hidden states, is float32 if left out.

    Raises:
        ConfigError: A setting asks for what only models of known families can have.
        ModelError: The module does not return what it should.
    """
    for setting in ("quantization", "model"):
        if settings.get(setting) is not None:
            raise ConfigError(f"{setting} has no meaning for a module of your own; leave it out")
    if settings.get("tensor_parallel_size", 1) != 1:
        raise ConfigError("tensor_parallel_size must be 1 for a module of your own")
    sizes = ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads or num_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        sliding_windows=sliding_windows,
    )
    if isinstance(tokenizer, str):
        tokenizer = tokenizer_of(ModelSource.open(tokenizer))
    settings = {"dtype": "float32", "served_model_name": name, **settings}
    config = resolve(EngineConfig(**settings), sizes)
    mesh = make_mesh()
    model = _Served(module, sizes)
    parameters = {
        path: jax.device_put(variable[...], replicated(mesh))
        for path, variable in flat_parameters(nnx.state(model)).items()
    }
    _check(model, sizes, jnp.dtype(config.dtype))
    runner = ModelRunner(
        sizes, cast("Transformer", model), parameters, mesh, runner_config(config, sizes)
    )
    if config.warmup:
        runner.warmup()
    engine = Engine(
        config, runner, vocab_size=vocab_size, eos_token_ids=frozenset(tokenizer.eos_token_ids)
    )
    if config.warmup:
        engine.warmed_up()
    return LoadedModel(
        engine=engine,
        tokenizer=tokenizer,
        config=config,
        model_config=sizes,
        name=name,
        generation_config={},
    )


def load_function(
    forward: Callable[..., jax.Array],
    logits: Callable[..., jax.Array],
    params: Mapping[str, Any] | Any,
    **arguments: Any,
) -> LoadedModel:
    """Return an engine around two pure functions.

    Args:
        forward: `(params, token_ids, positions, attend)` → hidden states, as
            `ServableModule.__call__`.
        logits: `(params, hidden)` → float32 [B, V].
        params: A pytree of arrays.
        arguments: As for `load_module`.
    """
    return load_module(_FunctionModule(params, forward, logits), **arguments)


def _check(model: _Served, sizes: ModelConfig, dtype: Any) -> None:
    """Try the module on shapes alone, so that what is wrong is said here and not by XLA."""
    N, T = sizes.num_attention_heads, 3
    layers: list[int] = []

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, **how: Any) -> jax.Array:
        layers.append(layer)
        heads = (T, sizes.num_key_value_heads, sizes.head_dim)
        if q.shape != (T, N, sizes.head_dim) or k.shape != heads or v.shape != heads:
            raise ModelError(
                f"attend of layer {layer}: expected q {[T, N, sizes.head_dim]}, k and v "
                f"{list(heads)}, got {q.shape}, {k.shape} and {v.shape}"
            )
        return q

    def run() -> tuple[jax.Array, jax.Array]:
        ids = jnp.zeros(T, jnp.int32)
        hidden = model(ids, ids, cast("Attend", attend))
        return hidden, model.head()(hidden)

    hidden, logits = jax.eval_shape(run)
    expected = [
        ("hidden states", hidden, (T, sizes.hidden_size), dtype),
        ("logits", logits, (T, sizes.vocab_size), jnp.dtype(jnp.float32)),
    ]
    for what, got, shape, kind in expected:
        if got.shape != shape or got.dtype != kind:
            raise ModelError(
                f"{what} of {T} tokens: expected {kind.name} {list(shape)}, got {got.dtype.name} "
                f"{list(got.shape)}"
            )
    if sorted(layers) != list(range(sizes.num_hidden_layers)):
        raise ModelError(
            f"expected attend to be called once for each layer 0 to {sizes.num_hidden_layers - 1}, "
            f"got {layers}"
        )
