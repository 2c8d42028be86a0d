"""The default model, compiled once, and engines of any settings over it.

An engine's settings say what the scheduler may do; the programs only have to be large enough. So
one set of them serves chunks of 32 and of 512 tokens, a large pool and a small one.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.config import EngineConfig
from jaxinfer.engine import Engine
from jaxinfer.loading import LoadedModel, tokenizer_of
from jaxinfer.model_runner import ModelRunner
from jaxinfer.model_source import ModelSource, load_model
from jaxinfer.models import ModelConfig, family_of
from jaxinfer.resolution import resolve, runner_config
from jaxinfer.sharding import make_mesh
from jaxinfer.tokenizer import Tokenizer

SETTINGS = EngineConfig(
    dtype="float32",
    max_model_len=1024,
    max_num_seqs=16,
    max_num_batched_tokens=512,
    page_size=16,
    num_pages=512,
    warmup=False,
)
"""512 pages of 16 tokens are more than 16 of the tests' requests can use; 360 MiB."""


@dataclasses.dataclass(frozen=True)
class RealModel:
    """A checkpoint with its programs."""

    source: ModelSource
    model_config: ModelConfig
    parameters: Mapping[str, jax.Array]
    tokenizer: Tokenizer
    config: EngineConfig
    runner: ModelRunner

    @classmethod
    def load(cls, name: str | None = None, *, like: RealModel | None = None) -> RealModel:
        """Load a checkpoint and compile; or take the programs of `like`, of the same sizes."""
        source = ModelSource.open(name)
        model_config = family_of(source.config).translate(source.config)
        config = resolve(SETTINGS, model_config)
        mesh = make_mesh()
        model, parameters = load_model(
            source, model_config, mesh, jnp.dtype(config.dtype), kernels=config.kernels
        )
        runner = ModelRunner(
            model_config, model, parameters, mesh, runner_config(config, model_config)
        )
        if like is not None:
            # Weights are arguments of the programs; only sizes and constants are built in.
            assert _float32_constants(model_config) == _float32_constants(like.model_config)
            runner.programs.compiled = like.runner.programs.compiled
        # Whatever is compiled later is a defect to these tests.
        runner.warmup()
        runner.finish_warmup()
        return cls(source, model_config, parameters, tokenizer_of(source), config, runner)

    @contextlib.contextmanager
    def engine(self, **settings: Any) -> Iterator[Engine]:
        """Yield a warm engine with these settings changed; its pages hold what others left."""
        config = dataclasses.replace(self.config, **settings)
        engine = Engine(
            config,
            self.runner,
            vocab_size=self.model_config.vocab_size,
            eos_token_ids=self.tokenizer.eos_token_ids,
        )
        engine.warmed_up()
        try:
            yield engine
        finally:
            engine.close()

    def loaded(self, engine: Engine) -> LoadedModel:
        """Return what a face is built from."""
        return LoadedModel(
            engine=engine,
            tokenizer=self.tokenizer,
            config=engine.config,
            model_config=self.model_config,
            name="smollm2",
            generation_config=self.source.generation_config,
        )


def _float32_constants(config: ModelConfig) -> ModelConfig:
    # A GGUF file holds 1e-5 in float32, a `config.json` in float64 or what came from a float32.
    eps = float(np.float32(config.norm.eps))
    return dataclasses.replace(config, norm=dataclasses.replace(config.norm, eps=eps))
