"""What `jaxinfer eval` says of variants whose difference is known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from jaxinfer.cli import app
from jaxinfer.cli_eval import parse_variant
from jaxinfer.config import EngineConfig
from jaxinfer.errors import ConfigError
from jaxinfer.evaluation import Quality, evaluate, name_of, quality_table, sample_text
from tests.engines import GOLDEN, logits_of, make_engine

CONFIG = EngineConfig(
    model=str(GOLDEN / "smollm2"),
    kernels="xla",
    max_num_batched_tokens=32,
    compilation_cache_dir="",
    max_model_len=128,
)
VARIANTS = ("float32", "bfloat16", "int8", "kv:int8")


@pytest.fixture(scope="module")
def results() -> dict[str, Quality]:
    found = evaluate(CONFIG, [parse_variant(v) for v in VARIANTS], max_tokens=80)
    return dict(zip(VARIANTS, found, strict=True))


def test_float32_does_not_differ_from_itself(results):
    same = results["float32"]
    assert same.kl_mean == 0 and same.kl_p99 == 0 and same.agreement == 1
    assert same.perplexity == same.reference_perplexity


def test_rounding_costs_something_and_not_much(results):
    for name in ("bfloat16", "int8", "kv:int8"):
        assert 0 < results[name].kl_mean < 0.1, name
        assert results[name].kl_mean <= results[name].kl_p99
        assert results[name].perplexity == pytest.approx(results["float32"].perplexity, rel=0.1), (
            name
        )
    assert results["int8"].num_tokens == 80


def test_perplexity_is_that_of_the_logits(results):
    engine = make_engine("smollm2", buckets=(64,))
    token_ids = np.array(tokens_of_text()[:80])
    logits = logits_of(engine, token_ids, chunk=40).astype(np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    loss = -log_probs[np.arange(79), token_ids[1:]].mean()
    assert results["float32"].perplexity == pytest.approx(np.exp(loss), rel=1e-4)


def tokens_of_text() -> list[int]:
    from jaxinfer.loading import tokenizer_of
    from jaxinfer.model_source import ModelSource

    return tokenizer_of(ModelSource.open(CONFIG.model)).encode(sample_text())


def test_names_and_table_tell_the_variants_apart(results):
    names = [name_of(parse_variant(v)) for v in (*VARIANTS, "int8+bfloat16+kv:fp8_e4m3")]
    assert names == [
        "float32",
        "bfloat16",
        "int8 weights, float32",
        "float32, int8 KV",
        "int8 weights, bfloat16, fp8_e4m3 KV",
    ]
    table = quality_table(list(results.values()))
    assert all(f"| {name} |" in table for name in names[:4])


@pytest.mark.parametrize("text", ["", "int4", "kv", "bfloat16+"])
def test_unknown_variants_are_refused(text):
    with pytest.raises(ConfigError, match="expected float32"):
        parse_variant(text)


def test_a_text_of_ones_own_can_be_read(tmp_path: Path):
    text, out = tmp_path / "text.txt", tmp_path / "out.json"
    text.write_text("One two three four five six seven eight nine ten.")
    args = ["--model", CONFIG.model, "--kernels", "xla", "--max-num-batched-tokens", "32"]
    args += ["--variant", "bfloat16", "--text", str(text), "--json", str(out)]
    result = CliRunner().invoke(app, ["eval", *args], catch_exceptions=False)
    assert result.exit_code == 0
    (row,) = json.loads(out.read_text())
    assert 0 < row["num_tokens"] < 60 and "| bfloat16 |" in result.output
