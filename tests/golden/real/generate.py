"""Make the goldens of the real models: Gemma 3's logits and transcripts, both perplexities.

    PYTHONPATH=tests/golden/models /tmp/goldens/bin/python tests/golden/real/generate.py [NAME]

The environment is that of `models/generate.py` with the packages of README.md. The reference
computes in float32 with eager attention on the dequantized weights; a transcript with a near-tie is
not kept, since no other float32 program could be held to it.

    gemma3_270m.npz        for each prompt P of prompts.py:
        P_token_ids        [T] int32, `<bos>` in front
        P_greedy           [40] int32, the greedy continuation, end-of-turn ids not heeded
        P_margins          [40] float32, how far each winner's logit was above the second
        P_column_logits    [T, 64] float32, at every position, for the vocabulary ids in `columns`
        P_logsumexp        [T] float32, over the whole vocabulary
    both files:
        text_token_ids     [N] int32, of text.txt, no `<bos>`
        text_logprobs      [M] float32, of every token that has one before it in its window, window
                           after window
        meta               JSON: versions, `file`, `sha256`, `window` (its tokens), `perplexity`
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import logging
import tempfile
from pathlib import Path

import gemma_file
import gemma_reference
import gguf
import numpy as np
import prompts
import reference
import tokenizers
import torch
import transformers
from smollm2_folder import find_gguf, read_metadata, tokenizer_json

HERE = Path(__file__).parent
NUM_NEW_TOKENS = 40
NUM_COLUMNS = 64
MIN_MARGIN = 2e-3
PACKAGES = ("torch", "transformers", "numpy", "gguf", "tokenizers")
NAMES = ("smollm2_135m", "gemma3_270m")

logger = logging.getLogger("goldens")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the goldens of the real models.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(NAMES)}")
    wanted = parser.parse_args().names or NAMES
    logging.basicConfig(format="%(message)s")
    logger.setLevel(logging.INFO)
    transformers.utils.logging.disable_progress_bar()
    torch.use_deterministic_algorithms(True)
    if "smollm2_135m" in wanted:
        make_smollm2()
    if "gemma3_270m" in wanted:
        with tempfile.TemporaryDirectory() as scratch:
            make_gemma(gemma_file.join(gemma_file.find_parts(), Path(scratch)))


def make_smollm2() -> None:
    file = find_gguf()
    meta = read_metadata(gguf.GGUFReader(file))
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(meta)))
    ids = tokenizer.encode(prompts.TEXT, add_special_tokens=False).ids
    pieces = prompts.windows(ids, prompts.SMOLLM2_WINDOW)
    model = reference.load_gguf(file)
    _save("smollm2_135m", file, {}, ids, measure(model, pieces), prompts.SMOLLM2_WINDOW)


def make_gemma(file: Path) -> None:
    meta = read_metadata(gguf.GGUFReader(file))
    bos = [meta["tokenizer.ggml.bos_token_id"]]
    vocabulary = gemma_reference.Vocabulary(meta)
    model = gemma_reference.load(file)
    size = model.config.vocab_size
    columns = np.sort(np.random.default_rng(0).choice(size, NUM_COLUMNS, replace=False))
    arrays = {"columns": columns.astype(np.int32)}
    for name, text in prompts.PROMPTS.items():
        ids = bos + vocabulary.encode(text)
        run = reference.run(model, ids, NUM_NEW_TOKENS)
        tokens = [meta["tokenizer.ggml.tokens"][i] for i in run.greedy]
        smallest = float(run.margins.min())
        logger.info("%s: %d tokens, margin %.4f, %r", name, len(ids), smallest, "".join(tokens))
        assert smallest > MIN_MARGIN, f"{name}: a near-tie, change the prompt"
        logits = torch.from_numpy(run.logits)
        arrays |= {
            f"{name}_token_ids": np.asarray(ids, np.int32),
            f"{name}_greedy": run.greedy,
            f"{name}_margins": run.margins,
            f"{name}_column_logits": run.logits[:, columns],
            f"{name}_logsumexp": logits.logsumexp(-1).numpy(),
        }
    window = model.config.sliding_window
    assert len(arrays["long_token_ids"]) > window
    assert 0 < window - len(arrays["crossing_token_ids"]) < NUM_NEW_TOKENS
    ids = vocabulary.encode(prompts.TEXT)
    pieces = prompts.windows(ids, prompts.GEMMA_WINDOW, bos)
    _save("gemma3_270m", file, arrays, ids, measure(model, pieces), prompts.GEMMA_WINDOW)


@torch.no_grad()
def measure(model, pieces: list[list[int]]) -> np.ndarray:
    """Return the log-probability of every token but the first of each piece, one after another."""
    parts = []
    for piece in pieces:
        ids = torch.tensor(piece)
        logits = model(ids[None], use_cache=False).logits[0, :-1]
        chosen = logits.gather(-1, ids[1:, None])[:, 0]
        parts.append((chosen - logits.logsumexp(-1)).numpy())
    return np.concatenate(parts)


def _save(
    name: str,
    file: Path,
    arrays: dict[str, np.ndarray],
    text_ids: list[int],
    logprobs: np.ndarray,
    window: int,
) -> None:
    meta = {
        "versions": {package: importlib.metadata.version(package) for package in PACKAGES},
        "file": file.name,
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "window": window,
        "perplexity": float(np.exp(-logprobs.mean(dtype=np.float64))),
    }
    logger.info("%s: %d tokens, perplexity %.4f", name, len(text_ids), meta["perplexity"])
    arrays |= {"text_token_ids": np.asarray(text_ids, np.int32), "text_logprobs": logprobs}
    text = json.dumps(meta, sort_keys=True)
    # Renamed into place, so that an interrupted run leaves the old golden whole.
    with tempfile.TemporaryDirectory(dir=HERE) as scratch:
        whole = Path(scratch) / f"{name}.npz"
        np.savez_compressed(whole, meta=np.array(text), **arrays)
        whole.rename(HERE / whole.name)


if __name__ == "__main__":
    main()
