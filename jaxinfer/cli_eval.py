"""`jaxinfer eval`: flags in, a table of what smaller number types cost in quality out."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from jaxinfer.cli_options import engine_options
from jaxinfer.config import EngineConfig
from jaxinfer.errors import ConfigError

# The variants are made of these; the rest plays no part when a text is read.
_VARIED = ("dtype", "quantization", "kv_cache_dtype")
_NOT_USED = (
    "max_num_seqs", "num_decode_steps", "enable_prefix_caching", "scheduling_policy", "overlap",
    "warmup", "seed", "max_logprobs", "max_waiting", "served_model_name",
)  # fmt: skip

DEFAULT_VARIANTS = ("bfloat16", "int8", "int8+bfloat16")


@engine_options(leave_out=(*_VARIED, *_NOT_USED))
def evaluate(
    *,
    config: EngineConfig,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            help="What to compare with float32: a dtype, int8 for weights, kv: and a dtype for KV "
            "pages, joined by +, as int8+bfloat16+kv:int8. May be given several times."
            f"  [default: {', '.join(DEFAULT_VARIANTS)}]"
        ),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="The text to read.  [default: one of 2,000 tokens]")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Read no more of it.", min=2)] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file.")
    ] = None,
) -> None:
    """Perplexity, KL divergence and next-token agreement of number types against float32."""
    from jaxinfer.evaluation import evaluate as run
    from jaxinfer.evaluation import quality_table

    variants = [parse_variant(text) for text in variant or DEFAULT_VARIANTS]
    results = run(
        config,
        variants,
        text=None if text is None else text.read_text(encoding="utf-8"),
        max_tokens=max_tokens,
        on_progress=lambda name: typer.echo(f"reading as {name} ...", err=True),
    )
    typer.echo(f"{results[0].num_tokens} tokens")
    typer.echo(quality_table(results))
    if json_path is not None:
        rows = [dataclasses.asdict(result) for result in results]
        json_path.write_text(json.dumps(rows, indent=2) + "\n")


def parse_variant(text: str) -> dict[str, str | None]:
    """Return the settings that a variant's name stands for."""
    settings: dict[str, str | None] = {}
    for part in text.split("+"):
        kind, _, value = part.rpartition(":")
        if kind == "kv":
            settings["kv_cache_dtype"] = value
        elif part in ("float32", "bfloat16"):
            settings["dtype"] = part
        elif part == "int8":
            settings["quantization"] = part
        else:
            raise ConfigError(
                f"expected float32, bfloat16, int8 or kv:DTYPE, joined by +, got {text!r}"
            )
    return settings
