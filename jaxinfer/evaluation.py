"""What a smaller number type costs in quality: a model's distributions against float32's own.

Both read the same text over the paged cache, as a server would, in chunks. Knows text and engine;
no command line.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import jax
import numpy as np

from jaxinfer import loading
from jaxinfer.batch import ScheduledRow, StepPlan
from jaxinfer.config import EngineConfig
from jaxinfer.engine import Engine
from jaxinfer.errors import ConfigError
from jaxinfer.model_runner import ModelRunner
from jaxinfer.request import Request
from jaxinfer.sampling_params import SamplingParams

REFERENCE: dict[str, Any] = {"dtype": "float32", "quantization": None, "kv_cache_dtype": "float32"}
"""What everything is compared with."""


@dataclass(frozen=True, kw_only=True)
class Quality:
    """How a variant's distributions differ from the reference's, over all positions of a text.

    Attributes:
        name: Of the variant.
        perplexity: Of the variant on the text.
        reference_perplexity: Of the reference.
        kl_mean: Mean Kullback-Leibler divergence of the variant from the reference, nats.
        kl_p99: Its 99th percentile.
        agreement: Share of positions whose likeliest next token is the same.
        num_tokens: Positions.
    """

    name: str
    perplexity: float
    reference_perplexity: float
    kl_mean: float
    kl_p99: float
    agreement: float
    num_tokens: int


def sample_text() -> str:
    """Return the text that comes with the package: some 1,700 tokens of English."""
    return (resources.files("jaxinfer") / "evaluation_text.txt").read_text(encoding="utf-8")


def evaluate(
    config: EngineConfig,
    variants: Sequence[dict[str, Any]],
    *,
    text: str | None = None,
    max_tokens: int | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> list[Quality]:
    """Compare variants of a model with its float32 self.

    The reference's distributions stay in memory, 4 bytes for each token and entry of the
    vocabulary; models are loaded one after the other.

    Args:
        config: The model and what all variants have in common.
        variants: Settings of `EngineConfig` that make each variant.
        text: What is read; that of the package if None.
        max_tokens: Read so much of it at most.
        on_progress: Told which variant is read.

    Raises:
        ConfigError: The text is too short, or a variant cannot be had.
    """
    reference: list[np.ndarray] = []
    token_ids: list[int] = []
    results = []
    for variant in (REFERENCE, *variants):
        name = name_of(variant)
        on_progress(name if results or reference else f"{name}, the reference")
        # What is left open is not "auto" here: a variant is what it says.
        settings: dict[str, Any] = {
            **REFERENCE,
            "kv_cache_dtype": "auto",
            **variant,
            "warmup": False,
        }
        settings |= {"enable_prefix_caching": False, "max_num_seqs": 1}
        loaded = loading.load(dataclasses.replace(config, **settings), progress=False)
        try:
            if not token_ids:
                token_ids = loaded.tokenizer.encode(sample_text() if text is None else text)
                token_ids = token_ids[
                    : min(max_tokens or len(token_ids), loaded.engine.max_model_len - 1)
                ]
                if len(token_ids) < 2:
                    raise ConfigError(f"expected a text of at least 2 tokens, got {len(token_ids)}")
            log_probs = _log_probs(loaded.engine, token_ids)
            if not reference:
                reference = list(log_probs)
            else:
                results.append(_compare(name, reference, log_probs, token_ids))
        finally:
            loaded.engine.close()
    return results


def name_of(variant: dict[str, Any]) -> str:
    """Return what to call a variant: "int8 weights, bfloat16, int8 KV"."""
    dtype = variant.get("dtype", "float32")
    kv = variant.get("kv_cache_dtype", "auto")
    parts = [f"{variant['quantization']} weights"] if variant.get("quantization") else []
    parts.append(dtype)
    if kv not in ("auto", dtype):
        parts.append(f"{kv} KV")
    return ", ".join(parts)


def quality_table(results: Sequence[Quality]) -> str:
    """Return the figures as a Markdown table."""
    lines = [
        "| variant | perplexity | float32's | KL, mean | KL, p99 | same next token |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for q in results:
        lines.append(
            f"| {q.name} | {q.perplexity:.3f} | {q.reference_perplexity:.3f} | {q.kl_mean:.5f} "
            f"| {q.kl_p99:.4f} | {q.agreement:.1%} |"
        )
    return "\n".join(lines)


def _log_probs(engine: Engine, token_ids: Sequence[int]) -> Generator[np.ndarray]:
    """Yield float32 [chunk, V]: each position's log-probabilities of the next token."""
    runner = engine.runner
    assert isinstance(runner, ModelRunner), "a loaded model runs on a device"
    chunk = engine.config.max_num_batched_tokens
    head = jax.jit(lambda leaves, x: jax.nn.log_softmax(runner.programs.head(leaves)(x)))
    request = Request(
        request_id="evaluation",
        prompt_token_ids=list(token_ids),
        params=SamplingParams(),
        seed=0,
        max_total_tokens=len(token_ids) + 1,
    )
    pages = engine.scheduler.pages
    if not pages.admit(request, hashes=(), spare=0):
        raise ConfigError(f"the pages do not hold {len(token_ids)} tokens; raise num_pages")
    for start in range(0, len(token_ids), chunk):
        n = min(chunk, len(token_ids) - start)
        request.num_computed_tokens = start
        assert pages.grow(request, start + n), "admission had room for all"
        row = ScheduledRow(request, start, n, samples=False, epoch=0)
        # Always the largest bucket: one program.
        hidden = runner.forward(StepPlan(rows=(row,)), bucket=runner.config.token_buckets[-1])
        yield np.asarray(head(runner.programs.head.leaves, hidden.tokens))[:n]


def _compare(
    name: str,
    reference: Sequence[np.ndarray],
    log_probs: Iterable[np.ndarray],
    token_ids: Sequence[int],
) -> Quality:
    """Sum up position by position; the last has no next token to be surprised by."""
    divergences, same = [], 0
    own_loss = reference_loss = 0.0
    start = 0
    for theirs, ours in zip(reference, log_probs, strict=True):
        divergences.append(np.sum(np.exp(theirs) * (theirs - ours), axis=-1, dtype=np.float64))
        same += int(np.sum(theirs.argmax(-1) == ours.argmax(-1)))
        targets = np.asarray(token_ids[start + 1 : start + 1 + len(ours)])
        rows = np.arange(len(targets))
        own_loss -= float(np.sum(ours[rows, targets], dtype=np.float64))
        reference_loss -= float(np.sum(theirs[rows, targets], dtype=np.float64))
        start += len(ours)
    divergence = np.maximum(np.concatenate(divergences), 0.0)
    count = len(token_ids)
    return Quality(
        name=name,
        perplexity=math.exp(own_loss / (count - 1)),
        reference_perplexity=math.exp(reference_loss / (count - 1)),
        kl_mean=float(divergence.mean()),
        kl_p99=float(np.percentile(divergence, 99)),
        agreement=same / count,
        num_tokens=count,
    )
