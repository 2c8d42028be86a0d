"""`LLM` over a committed tiny checkpoint."""

from __future__ import annotations

from typing import Any

from jaxinfer.llm import LLM
from jaxinfer.loading import LoadedModel, tokenizer_of
from tests.engines import config_of, make_engine, source_of


def tiny_llm(name: str = "smollm2", buckets: tuple[int, ...] = (8, 64), **settings: Any) -> LLM:
    """Return an `LLM` whose programs those of equal shapes share, as `make_engine` says."""
    engine = make_engine(name, buckets, **settings)
    return LLM.from_loaded(
        LoadedModel(
            engine=engine,
            tokenizer=tokenizer_of(source_of(name)),
            config=engine.config,
            model_config=config_of(name),
            name=name,
            generation_config={},
        )
    )
