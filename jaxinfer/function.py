"""The served model as a pure function: for `grad`, `vmap`, `jit` and `jax.checkpoint`.

No pages, no batch, no request: one sequence of tokens in, logits out, from the very arrays that the
engine serves with. What serves and what is differentiated are one model: the same modules, the same
taps; only the attention's keys come from the sequence instead of pages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.attention_weights import softmax_weights, visible_keys
from jaxinfer.edits import FOREVER, Change, Edit, resolve
from jaxinfer.engine import Engine
from jaxinfer.errors import InvalidRequestError
from jaxinfer.hook_tap import HookTap, hook_points
from jaxinfer.hooks import CapturedChunk, Captures, Hooks, match_names
from jaxinfer.model_runner import ModelRunner
from jaxinfer.pure_module import PureModule
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.step_programs import StepPrograms
from pallas_kernels.shapes import Array, Float, Int

if TYPE_CHECKING:
    from jaxinfer.llm import LLM

type Params = Mapping[str, jax.Array]


class WholeAttend:
    """`jaxinfer.nn.attention.AttendWithWeights` over one whole sequence, without a cache.

    Args:
        positions: int32 [T], ascending, of all tokens there are.
    """

    def __init__(self, positions: Int[Array, " T"]):
        self._positions = positions
        self._keys: dict[int, Array] = {}

    def __call__(
        self,
        layer: int,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"] | None,
        **how: Any,
    ) -> Float[Array, "T N H"]:
        self._keys[layer] = k
        v = k if v is None else v
        T, N, H = q.shape
        K = k.shape[1]
        weights = self._weights(q, k, **how).astype(v.dtype).reshape(T, K, N // K, T)
        out = jnp.einsum("TKGS,SKH->TKGH", weights, v, preferred_element_type=jnp.float32)
        return out.reshape(T, N, H).astype(q.dtype)

    def weights(
        self,
        layer: int,
        q: Float[Array, "T N H"],
        tokens: Int[Array, " C"] | None,
        num_keys: int | None,
        **how: Any,
    ) -> Float[Array, "C N S"]:
        weights = self._weights(q, self._keys[layer], **how)
        weights = weights if tokens is None else weights[tokens]
        return weights if num_keys is None else weights[..., :num_keys]

    def _weights(self, q: Array, k: Array, *, sliding_window: int | None, **how: Any) -> Array:
        T = q.shape[0]

        def one(query: Array, index: Array) -> Array:
            return softmax_weights(query, k, visible_keys(index, T, sliding_window), **how)

        return jax.vmap(one)(q, jnp.arange(T, dtype=jnp.int32))


@dataclass(frozen=True)
class ModelFunction:
    """A model as a function of its parameters.

    Attributes:
        params: path → array, those that serve; a pytree to differentiate by, or to put others in.
        vocab_size: V.
        max_model_len: The positions that the engine was set up for.
    """

    params: dict[str, jax.Array]
    vocab_size: int
    max_model_len: int
    _backbone: PureModule
    _head: PureModule
    _serve: Callable[[Params, Sequence[int]], np.ndarray]

    def apply(
        self,
        params: Params,
        tokens: Int[Array, " T"],
        *,
        capture: Sequence[str] | str | None = None,
        edits: Sequence[Edit | Change] | Edit | Change = (),
    ) -> Any:
        """Return the logits of one sequence; `jax.vmap` maps it over a batch of equal lengths.

        Args:
            params: As `self.params`.
            tokens: int32 [T] or a list. Causal: tokens behind the last one that matters change
                nothing before them, so that sequences can be padded there.
            capture: Names, as for `LLM.generate`; static under jit.
            edits: As for `LLM.generate`. They are pytrees once `resolve`d: differentiate by their
                values, or make edits of traced arrays inside the function.

        Returns:
            float32 [T, V]; with `capture`, also a dict name → [T, ...].

        Raises:
            InvalidRequestError: Tokens, parameters, a name or an edit do not fit.
        """
        token_ids = self._checked(tokens)
        missing = [path for path in self.params if path not in params]
        if missing:
            raise InvalidRequestError(
                f"params lacks {missing[0]!r} and {len(missing) - 1} others of the model's "
                f"{len(self.params)}; start from `self.params`",
                "params",
            )
        positions = jnp.arange(token_ids.shape[0], dtype=jnp.int32)
        asked = () if capture is None else match_names(_several(capture), self.points)
        changes = self.resolve(edits)
        _check_reach(changes, token_ids.shape[0])
        tap = HookTap(frozenset(asked), positions=positions, edits=((changes, None),))
        hidden = self._run(params, token_ids, positions, tap)
        logits = self._head(tuple(params[path] for path in self._head.paths))(hidden)
        if capture is None:
            return logits
        captured = {**tap.captured, "logits": logits}
        return logits, {name: captured[name] for name in asked}

    def unembed(self, params: Params, stream: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Return the logits that the head would give for a residual stream: the logit lens.

        Args:
            params: As `self.params`.
            stream: What a layer left, such as a capture of "layers.3.resid_post", or what several
                did, stacked.
        """
        model = self._backbone(tuple(params[path] for path in self._backbone.paths))
        head = self._head(tuple(params[path] for path in self._head.paths))
        rows = jnp.asarray(stream)
        logits = head(model.final_norm(rows.reshape(-1, rows.shape[-1])))
        return logits.reshape(*rows.shape[:-1], -1)

    def as_served(self, params: Params, tokens: Sequence[int]) -> np.ndarray:
        """Return the logits float32 [T, V] that an engine like this would serve with `params`.

        Not to be traced: it runs the engine's own programs, in an engine made for it. With
        `deterministic=True` they are bitwise those of any request with these tokens.

        Raises:
            NotImplementedError: The engine's weights are packed for the C++ kernels.
        """
        return self._serve(params, tokens)

    def resolve(self, edits: Sequence[Edit | Change] | Edit | Change) -> tuple[Change, ...]:
        """Return edits as pytrees of arrays of the shapes of what they change.

        Raises:
            InvalidRequestError: One does not fit.
        """
        done: list[Change] = []
        for edit in _several(edits):
            done += [edit] if isinstance(edit, Change) else resolve([edit], self.points, None)
        return tuple(done)

    def _checked(self, tokens: Any) -> jax.Array:
        """Return token ids as int32 [T]; traced ones may still lie outside of the vocabulary."""
        ids = tokens if isinstance(tokens, jax.Array) else np.asarray(tokens)
        if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
            raise InvalidRequestError(
                "tokens must be the ids of one sequence, whole numbers [T] with T > 0 (jax.vmap "
                f"maps over several), got {ids.dtype} {list(ids.shape)}",
                "tokens",
            )
        if not isinstance(ids, jax.core.Tracer):
            known = np.asarray(ids)
            if known.min() < 0 or known.max() >= self.vocab_size:
                raise InvalidRequestError(
                    f"tokens: ids must lie in [0, {self.vocab_size}), got {known.min()} to "
                    f"{known.max()}",
                    "tokens",
                )
        return jnp.asarray(ids, jnp.int32)

    @cached_property
    def points(self) -> dict[str, jax.ShapeDtypeStruct]:
        """All that can be captured and edited: name → shape [T, ...] and dtype."""
        params = {path: jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in self.params.items()}

        def run(tap: Any) -> jax.Array:
            zeros = {path: jnp.zeros(x.shape, x.dtype) for path, x in params.items()}
            positions = jnp.zeros(1, jnp.int32)
            return self._run(zeros, positions, positions, tap)

        return hook_points(run, self.vocab_size)

    def _run(self, params: Params, token_ids: Array, positions: Array, tap: Any) -> Array:
        model = self._backbone(tuple(params[path] for path in self._backbone.paths))
        return model(token_ids, positions, WholeAttend(positions), tap)


def functional(llm: LLM) -> ModelFunction:
    """Return a served model as a pure function, on the arrays that serve it.

    Logits equal the served ones up to the order of summation, as long as keys and values are cached
    in the type of activations.

    An engine with C++ kernels (`kernels="cpu"`, the default on CPU) has its weights in an order
    that only those can read: the checkpoint is then read again, which takes its memory twice; load
    with `kernels="xla"` to avoid it. Rounding to int8 has no slope: with `quantization="int8"` the
    gradients are zero behind the first product.

    Args:
        llm: Not shut down.

    Raises:
        CheckpointError: The checkpoint is needed and gone.
    """
    programs = _programs(llm)
    backbone, head = programs.backbone, programs.head
    if _is_packed(backbone):
        backbone, head = _unpacked(llm)
    params = dict(zip(backbone.paths, backbone.leaves, strict=True))
    params.update(zip(head.paths, head.leaves, strict=True))
    return ModelFunction(
        params=params,
        vocab_size=programs.vocab_size,
        max_model_len=llm.engine.max_model_len,
        _backbone=backbone,
        _head=head,
        _serve=_Replay(llm),
    )


def log_probs(logits: Float[Array, "T V"], tokens: Int[Array, " T"]) -> Float[Array, " T_minus_1"]:
    """Return the log-probability of each token but the first, given those before it."""
    every = jax.nn.log_softmax(logits[:-1], axis=-1)
    return jnp.take_along_axis(every, jnp.asarray(tokens)[1:, None], axis=1)[:, 0]


class _Replay:
    """Runs one sequence at a time through programs of the shapes that an engine has.

    Args:
        llm: Whose; nothing else of it is kept.
    """

    def __init__(self, llm: LLM):
        programs = _programs(llm)
        self._refused = _is_packed(programs.backbone)
        pages = 1 + programs.config.max_pages  # for one sequence, and no more
        self._shapes = dataclasses.replace(
            programs.config,
            num_pages=pages,
            num_window_pages=pages if programs.config.windows else 0,
        )
        self._config = dataclasses.replace(
            llm.engine.config,
            num_pages=pages,
            num_window_pages=pages,
            enable_prefix_caching=False,
        )
        leaves = cast("tuple[jax.Array, ...]", programs.backbone.abstract)
        self._model, self._mesh = programs.backbone(leaves), programs.mesh
        self._vocab_size = programs.vocab_size
        self._runner: ModelRunner | None = None

    def __call__(self, params: Params, tokens: Sequence[int]) -> np.ndarray:
        if self._refused:
            raise NotImplementedError(
                'as_served needs the weights as they are; load the model with kernels="xla"'
            )
        if self._runner is None:
            config = self._model.config
            self._runner = ModelRunner(config, self._model, params, self._mesh, self._shapes)
        self._runner.fill(params)
        engine = Engine(
            self._config, self._runner, vocab_size=self._vocab_size, eos_token_ids=frozenset()
        )
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        engine.add_request("replay", tokens, sampling, hooks=Hooks(capture=("logits",)))
        chunks: list[CapturedChunk] = []
        while engine.has_unfinished():
            for output in engine.step():
                chunks += output.captured
        engine.close()
        return Captures.join(chunks, ("logits",), len(tokens)).arrays["logits"]


def _check_reach(changes: Sequence[Change], T: int) -> None:
    """Refuse patches behind the last of T tokens: they would do nothing."""
    for change in changes:
        positions = change.values.get("positions")
        if positions is None or isinstance(positions, jax.core.Tracer):
            continue
        known = np.asarray(positions)
        behind = known[(known >= T) & (known != FOREVER)]
        if len(behind):
            raise InvalidRequestError(
                f"patch of {change.at}: position {behind[0]} lies behind the last of {T} tokens",
                "edits",
            )


def _programs(llm: LLM) -> StepPrograms:
    return cast("ModelRunner", llm.engine.runner).programs


def _is_packed(backbone: PureModule) -> bool:
    """Whether weights are in an order that only the C++ kernels know."""
    return any(leaf.dtype == jnp.uint32 for leaf in backbone.leaves)


def _unpacked(llm: LLM) -> tuple[PureModule, PureModule]:
    """Read the model of a packed one again, as XLA multiplies it."""
    from jaxinfer.model_source import ModelSource, load_model
    from jaxinfer.models import family_of
    from jaxinfer.sharding import make_mesh

    config = llm.config
    source = ModelSource.open(config.model)
    model_config = family_of(source.config).translate(source.config)
    model_config = model_config.for_length(llm.engine.max_model_len)
    model, parameters = load_model(
        source,
        model_config,
        make_mesh(),
        jnp.dtype(config.dtype),
        quantization=config.quantization,
        kernels="xla",
    )
    head = PureModule.of(model.head(), parameters, rename=("projection", model.head_path))
    return PureModule.of(model, parameters), head


def _several(x: Any) -> tuple[Any, ...]:
    return (x,) if isinstance(x, str | Edit | Change) else tuple(x)
