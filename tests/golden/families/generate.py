"""Make the tiny checkpoints of every other family and their goldens, from fixed seeds.

    PYTHONPATH=tests/golden/models /tmp/goldens/bin/python tests/golden/families/generate.py [NAME]

The environment is the one of `models/generate.py`; so are the vocabulary, the prompts and what a
golden holds. Here is no second implementation to check the reference by: it is held to its own run
with a cache, token by token, and each feature of a configuration to moving the logits (`teeth`).

    tokenizer/             tokenizer.json, tokenizer_config.json: one copy for all checkpoints
    NAME/                  config.json, generation_config.json, model.safetensors
    NAME.gguf              a GGUF file (`GGUF_FAMILIES`)
    NAME.npz               its golden, for each prompt P of short (5 tokens), medium (24), long (49)
                           or, where RoPE depends on the length, short, medium, crossing (49) and
                           long (72):
        P_token_ids        [T] int32
        P_logits           [T, V] float32, at every position of the prompt; not of crossing
        P_greedy           [32] int32, each from an uncached forward pass over all before it
        P_margins          [32] float32, how far each winner's logit was above the second
        medium_hidden_states   [L + 1, T, D] float32: what enters the first layer, then what each
                           layer leaves, before the final norm
        meta               JSON: versions, seed, smallest margin, and for each prompt
                           `cached_difference`, how far the reference's cached run is from its own
                           uncached one; `routing_gap`, the smallest in any router; `teeth`
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dense
import family_gguf
import moe
import numpy as np
import run
import spec
import tiny
import torch
import transformers
import weights
from reference import Run

HERE = Path(__file__).parent
NUM_NEW_TOKENS = 32
MIN_MARGIN = 4e-3
MIN_DISTINCT = 10
MIN_ROUTING_GAP = 1e-4
MAX_CACHED_DIFFERENCE = 5e-5
# Five times what a test allows. The two kinds of GELU are no further apart than that.
MIN_TOOTH = 1e-3
# Logits and hidden states are rounded to multiples of it: below the noise between two float32
# programs, and a tenth less to store.
STEP = 2.0**-16
PACKAGES = ("torch", "transformers", "numpy", "safetensors", "tokenizers")
FAMILIES = (*dense.FAMILIES, *moe.FAMILIES)

logger = logging.getLogger("goldens")


def main() -> None:
    names = [family.name for family in (*FAMILIES, *family_gguf.GGUF_FAMILIES)]
    parser = argparse.ArgumentParser(description="Make the goldens of the families.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(names)}")
    args = parser.parse_args()
    if unknown := set(args.names) - set(names):
        parser.error(f"no golden is named {', '.join(sorted(unknown))}")
    logging.basicConfig(format="%(message)s")
    logger.setLevel(logging.INFO)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    tokenizer = tiny.make_tokenizer()
    write_tokenizer(tokenizer)
    for family in FAMILIES:
        if family.name in (args.names or names):
            make(family, prompts_of(family, tiny.prompts(tokenizer)))
    for family in family_gguf.GGUF_FAMILIES:
        if family.name in (args.names or names):
            prompts = prompts_of(family.family, tiny.prompts(tokenizer))
            make_gguf(family, tokenizer, prompts)


def write_tokenizer(tokenizer) -> None:
    directory = HERE / "tokenizer"
    directory.mkdir(exist_ok=True)
    (directory / "tokenizer.json").write_text(tokenizer.to_str() + "\n")
    document = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tiny.SPECIAL_TOKENS[tiny.BOS],
        "eos_token": tiny.SPECIAL_TOKENS[tiny.EOS],
        "pad_token": tiny.SPECIAL_TOKENS[tiny.PAD],
        "chat_template": tiny.CHAT_TEMPLATE,
        "model_max_length": 256,
    }
    weights.write_json(directory / "tokenizer_config.json", document)


def prompts_of(family: spec.Family, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    if not family.depends_on_length:
        return prompts
    crossing, longer = prompts["long"], prompts["long"] + prompts["medium"][1:]
    assert len(crossing) < spec.ORIGINAL_LENGTH < min(len(longer), len(crossing) + NUM_NEW_TOKENS)
    return prompts | {"crossing": crossing, "long": longer}


def make(family: spec.Family, prompts: dict[str, list[int]]) -> None:
    """Write the first seed's checkpoint whose transcripts are varied and free of near-ties."""
    directory = HERE / family.name
    with tempfile.TemporaryDirectory() as scratch:
        for seed in itertools.count():
            weights.write_folder(Path(scratch), family, seed)
            runs, gap = run_all(family, lambda: run.load_folder(Path(scratch)), prompts)
            if runs is not None:
                break
        shutil.copytree(scratch, directory, dirs_exist_ok=True)
        directory.chmod(0o755)
    meta = {"seed": seed, "dtype": family.dtype, "routing_gap": gap}
    meta["teeth"] = bite(family, directory, prompts["long"], runs["long"].logits)
    _save(family, directory, lambda: run.load_folder(directory), prompts, runs, meta)


def make_gguf(family: family_gguf.GGUFFamily, tokenizer, prompts: dict[str, list[int]]) -> None:
    """Write the first seed's file that does, its golden of the numbers a reader gets back."""
    source = family.family

    def load(seed: int):
        model = weights.new_model(source, seed)
        for parameter in model.parameters():
            exact = family_gguf.stored(parameter.detach().numpy(), family.kind)
            parameter.data.copy_(torch.from_numpy(exact))
        return model.eval()

    for seed in itertools.count(1000):
        runs, _ = run_all(source, lambda seed=seed: load(seed), prompts)
        if runs is not None:
            break
    file = HERE / f"{family.name}.gguf"
    arrays = {n: p.detach().numpy() for n, p in weights.new_model(source, seed).named_parameters()}
    family_gguf.write_gguf(file, family, arrays, tokenizer)
    meta = {"seed": seed, "kind": family.kind.name}
    _save(family, file, lambda: load(seed), prompts, runs, meta)


def run_all(family: spec.Family, load: Callable[[], Any], prompts: dict[str, list[int]]):
    """Return the runs of all prompts and the smallest routing gap, or None if one is unfit."""
    runs, smallest = {}, float("inf")
    model = load()
    for name, ids in prompts.items():
        if family.depends_on_length:
            # The reference keeps the frequencies of the longest sequence it has met.
            model = load()
        with run.routing_gaps() as gaps:
            runs[name] = run.run(model, ids, NUM_NEW_TOKENS)
        smallest = min([smallest, *gaps])
        greedy = runs[name].greedy
        if (
            runs[name].margins.min() < MIN_MARGIN
            or len(set(greedy.tolist())) < MIN_DISTINCT
            or greedy.min() < len(tiny.SPECIAL_TOKENS)
            or smallest < MIN_ROUTING_GAP
        ):
            return None, 0.0
    return runs, smallest if np.isfinite(smallest) else None


def bite(family: spec.Family, directory: Path, ids: list[int], expected) -> dict[str, float]:
    """Return how far each change of the configuration moves the logits; all must."""
    moved = {}
    for change in family.teeth:
        logits = run.forward(run.load_folder(directory, change, strict=False), ids).numpy()
        key = json.dumps(change)
        moved[key] = float(np.abs(logits - expected).max())
        assert moved[key] > MIN_TOOTH, f"{family.name}: {key} moves the logits by {moved[key]}"
    return moved


def _save(
    family: spec.Family | family_gguf.GGUFFamily,
    path: Path,
    load: Callable[[], Any],
    prompts: dict[str, list[int]],
    runs: dict[str, Run],
    meta: dict[str, Any],
) -> None:
    arrays: dict[str, np.ndarray] = {"medium_hidden_states": _rounded(runs["medium"].hidden_states)}
    facts = {}
    for name, result in runs.items():
        facts[name] = check(getattr(family, "family", family), load(), prompts[name], result)
        arrays |= {
            f"{name}_token_ids": np.asarray(prompts[name], np.int32),
            f"{name}_greedy": result.greedy,
            f"{name}_margins": result.margins,
        }
        if name != "crossing":
            arrays[f"{name}_logits"] = _rounded(result.logits)
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    text = json.dumps({"versions": versions, **meta, "prompts": facts}, sort_keys=True)
    # Renamed into place, so that an interrupted run leaves the old golden whole.
    with tempfile.TemporaryDirectory(dir=HERE) as scratch:
        file = Path(scratch) / f"{family.name}.npz"
        np.savez_compressed(file, meta=np.array(text), **arrays)
        file.rename(HERE / file.name)
    size = sum(f.stat().st_size for f in ([path] if path.is_file() else path.iterdir()))
    golden = (HERE / f"{family.name}.npz").stat().st_size
    spread = float(runs["long"].logits.std())
    logger.info("%s: %d + %d B, spread %.2f", family.name, size, golden, spread)
    logger.info("  %s\n  %s", meta, facts)


def _rounded(a: np.ndarray) -> np.ndarray:
    return (np.round(a / STEP) * STEP).astype(np.float32)


def check(family: spec.Family, model, prompt: list[int], result: Run) -> dict[str, Any]:
    """Hold the reference to its own run with a cache, where the two are the same function."""
    T = len(prompt)
    cached = run.token_by_token(model, prompt + result.greedy.tolist())
    difference = float(np.abs(cached[:T] - result.logits).max())
    agrees = bool((cached[T - 1 : -1].argmax(-1) == result.greedy).all())
    if not family.depends_on_length:
        assert difference < MAX_CACHED_DIFFERENCE, f"{family.name}: cached, off by {difference}"
        assert agrees, f"{family.name}: the reference disagrees with itself"
    return {
        "min_margin": float(result.margins.min()),
        "cached_difference": difference,
        "cached_greedy_agrees": agrees,
    }


if __name__ == "__main__":
    main()
