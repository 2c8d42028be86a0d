"""Whole steps of a Llama-shaped model with random weights, each against its floor.

The programs are those that serve; only the engine around them is missing, so what is timed is what
the device does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.gpu_timing import (
    Budget,
    Ceilings,
    Table,
    ms,
    percent,
    random_values,
    reported,
    seconds,
)
from jaxinfer.batch import ScheduledRow, StepPlan
from jaxinfer.kv_cache import KVCache, make_cache
from jaxinfer.models import ModelConfig, Transformer, flat_parameters
from jaxinfer.models.llama import llama_config
from jaxinfer.page_tables import PageTables
from jaxinfer.request import Request
from jaxinfer.runner_config import RunnerConfig, cache_shape
from jaxinfer.sampling_batch import SamplingPacker, neutral_bias, neutral_mask
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.sharding import logical, make_mesh, parameter_shardings, replicated
from jaxinfer.step_programs import StepPrograms

LLAMA_8B: Mapping[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128_256,
    "max_position_embeddings": 8192,
    "rope_theta": 500_000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The steps that are timed.

    Attributes:
        hf: The model's config.
        batches: Of decode steps.
        context: Tokens of each sequence of a decode step.
        prompt: Tokens of a prefill step.
    """

    hf: Mapping[str, Any]
    batches: tuple[int, ...] = (1, 16, 64, 256)
    context: int = 1024
    prompt: int = 2048
    page_size: int = 16

    @property
    def steps(self) -> tuple[tuple[str, tuple[tuple[int, int], ...]], ...]:
        """Name and (start, new tokens) of each row."""
        decode = [
            (f"decode, batch {n}, context {self.context}", ((self.context - 1, 1),) * n)
            for n in self.batches
        ]
        return (*decode, (f"prefill, {self.prompt} tokens", ((0, self.prompt),)))

    def config(self, impl: str, batches: tuple[int, ...]) -> RunnerConfig:
        """The shapes of a server that runs them."""
        tokens = max(self.context * max(batches), self.prompt)
        return _Buckets(
            max_num_seqs=max(batches),
            max_num_batched_tokens=max(self.prompt, *batches),
            max_model_len=max(self.context, self.prompt),
            num_pages=tokens // self.page_size,
            page_size=self.page_size,
            max_logprobs=1,
            dtype=jnp.dtype(jnp.bfloat16),
            attention_impl=impl,
            sizes=(*batches, self.prompt),
        )


@dataclass(frozen=True, kw_only=True)
class _Buckets(RunnerConfig):
    """Shapes of the timed steps and of no other."""

    sizes: tuple[int, ...]

    @property
    def token_buckets(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.sizes)))

    @property
    def row_buckets(self) -> tuple[int, ...]:
        return tuple(sorted({*self.sizes[:-1], 1}))


class Model:
    """A model with random weights, ready to step.

    Args:
        workload: What it will be asked.
        impl: Of attention.
        batches: Those of the workload's that memory has room for.
        weights: Of another one, to be shared; None draws them.
    """

    def __init__(
        self,
        workload: Workload,
        impl: str,
        batches: tuple[int, ...],
        weights: Mapping[str, jax.Array] | None = None,
    ):
        self.model_config: ModelConfig = llama_config(workload.hf)
        self.config = workload.config(impl, batches)
        mesh = make_mesh()
        model = nnx.eval_shape(lambda: Transformer(self.model_config, jnp.bfloat16))
        _, state = nnx.split(model)
        self.weights = weights or _random_weights(flat_parameters(state), mesh)
        config = self.config
        shape = cache_shape(self.model_config, (), config.page_size, config.page_dtype)
        shardings = (logical(mesh, None, "kv_heads"), replicated(mesh))
        self._make_cache = partial(make_cache, shape, config.group_pages, shardings)
        self._make_last = partial(
            jnp.zeros, (config.max_num_seqs,), jnp.int32, device=replicated(mesh)
        )
        self.cache: KVCache = self._make_cache()
        self._last = self._make_last()
        self.programs = StepPrograms(model, self.weights, mesh, config, self.cache)
        self._packer = SamplingPacker(self.model_config.vocab_size)
        self._tables = PageTables(len(config.group_pages), config.max_pages)

    def recover(self) -> None:
        """Make anew what a step that failed has taken along: what it was donated."""
        if any(x.is_deleted() for x in jax.tree.leaves((self.cache, self._last))):
            self.cache, self._last = self._make_cache(), self._make_last()

    def compile(self, tokens: int, rows: int) -> None:
        """Compile what a step of so many tokens and sampled rows needs."""
        for key in (("backbone", tokens), ("sampler", rows)):
            self.programs.compiled[key]

    def step(self, rows: tuple[tuple[int, int], ...]) -> Callable[[], jax.Array]:
        """Return a function that dispatches one step, backbone to sampled tokens."""
        plan = _plan(rows, self.config.page_size)
        T, B, V = plan.num_tokens, len(rows), self.model_config.vocab_size
        packed = jnp.asarray(self.config.layout(T).pack(plan, self._tables))
        sampling = jnp.asarray(self._packer.pack(plan.rows, B).rows)
        neutral = [jnp.asarray(x) for x in (neutral_bias(B, V), neutral_mask(B, V))]
        table = jnp.zeros((B, self.config.max_pages), jnp.int32)
        programs = self.programs
        backbone, sampler = programs.compiled["backbone", T], programs.compiled["sampler", B]

        def dispatch() -> jax.Array:
            self.cache, hidden, _ = backbone(
                programs.backbone.leaves, self.cache, packed, self._last
            )
            sampled, self._last = sampler(
                programs.head.leaves, hidden, self.cache.token_ids, sampling, *neutral, table
            )
            return sampled.token_ids

        return dispatch

    def floor(self, rows: tuple[tuple[int, int], ...]) -> tuple[float, float]:
        """Return the bytes that a step has to read, and the FLOPs of its matrix products."""
        c = self.model_config
        matrices = sum(x.size for path, x in self.weights.items() if "embed" not in path)
        head = c.vocab_size * c.hidden_size
        tokens, samples = sum(new for _, new in rows), len(rows)
        keys = sum(start + new for start, new in rows)
        layer_kv = 2 * 2 * c.num_key_value_heads * c.head_dim
        num_bytes = 2 * matrices + c.num_hidden_layers * layer_kv * keys
        pairs = sum(new * start + new * (new + 1) // 2 for start, new in rows)
        attention = 4 * c.num_hidden_layers * c.num_attention_heads * c.head_dim * pairs
        return num_bytes, 2 * (matrices - head) * tokens + 2 * head * samples + attention


def measure_model(
    table: Table,
    budget: Budget,
    ceilings: Ceilings,
    workload: Workload,
    *,
    impl: str,
    memory_bytes: float,
) -> None:
    """Print the time of each step, its floor, and what XLA's attention takes."""
    batches = _that_fit(workload, memory_bytes)
    ours = Model(workload, impl, batches)
    steps = [step for step in workload.steps if len(step[1]) in (*batches, 1)]
    with ThreadPoolExecutor(max(1, len(steps))) as pool:
        jobs = [pool.submit(ours.compile, _tokens(rows), len(rows)) for _, rows in steps]
        for (name, rows), job in zip(steps, jobs, strict=True):
            _measure_step(table, budget, ceilings, ours, name, rows, job.result)
    others = tuple(n for n in (16,) if n in batches)
    if budget.left() < 60 or not others:
        return
    # Its cache makes room for another of the same weights.
    weights = ours.weights
    del ours
    xla = Model(workload, "xla", others, weights)
    for name, rows in steps:
        if len(rows) in others and budget.left() > 30:
            label = f"{name}, XLA attention"
            _measure_step(table, budget, ceilings, xla, label, rows, lambda: None)


def _measure_step(
    table: Table,
    budget: Budget,
    ceilings: Ceilings,
    model: Model,
    name: str,
    rows: tuple[tuple[int, int], ...],
    ready: Callable[[], None],
) -> None:
    with reported(table, "model", name) as failed:
        ready()
        if budget.left() < 0:
            table.row("model", name, "", "", "", "no time")
            return
        took = seconds(model.step(rows), at_least=0.3)
        num_bytes, flops = model.floor(rows)
        floor = ceilings.floor(num_bytes, flops)
        tokens = len(rows) if _tokens(rows) == len(rows) else _tokens(rows)
        table.row(
            "model",
            name,
            ms(took),
            f"{tokens / took:.0f} tokens/s",
            percent(floor / took),
            f"{took / floor:.2f} × floor of {ms(floor)} "
            f"({num_bytes / 1e9:.3g} GB, {flops / 1e12:.3g} TFLOP)",
        )
    if failed:
        model.recover()


def _tokens(rows: tuple[tuple[int, int], ...]) -> int:
    return sum(new for _, new in rows)


def _that_fit(workload: Workload, memory_bytes: float) -> tuple[int, ...]:
    """Return the batches whose keys and values fit beside the weights."""
    c = llama_config(workload.hf)
    model = nnx.eval_shape(lambda: Transformer(c, jnp.bfloat16))
    weights = sum(2 * math.prod(p.shape) for p in flat_parameters(nnx.split(model)[1]).values())
    one = 4 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * workload.context
    room = 0.8 * memory_bytes - weights
    return tuple(n for n in workload.batches if n * one <= room)


def _random_weights(
    parameters: Mapping[str, nnx.Variable], mesh: jax.sharding.Mesh
) -> dict[str, jax.Array]:
    """Return weights whose activations stay finite: norms of one, matrices scaled by fan-in."""
    shardings = parameter_shardings(mesh, parameters)
    weights = {}
    for i, (path, p) in enumerate(parameters.items()):
        if len(p.shape) == 1:
            x = jnp.ones(p.shape, p.dtype)
        else:
            x = random_values(p.shape, p.dtype, i) * jnp.asarray(p.shape[0] ** -0.5, p.dtype)
        weights[path] = jax.device_put(x, shardings[path])
    return weights


def _plan(rows: tuple[tuple[int, int], ...], page_size: int) -> StepPlan:
    """Return a plan of rows with pages of their own; prompts are any tokens."""
    scheduled, first_page = [], 0
    for i, (start, new) in enumerate(rows):
        end = start + new
        request = Request(
            request_id=str(i),
            prompt_token_ids=np.resize(np.arange(1, 97), end).tolist(),
            params=SamplingParams(temperature=0.0),
            seed=i,
            max_total_tokens=end + 1,
        )
        num_pages = -(-end // page_size)
        request.page_ids = list(range(first_page, first_page + num_pages))
        first_page += num_pages
        scheduled.append(
            ScheduledRow(
                request=request, start=start, num_scheduled_tokens=new, samples=True, epoch=0
            )
        )
    return StepPlan(rows=tuple(scheduled))
