"""Tiny models behind the offline API, as a researcher would hold them, in few programs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jaxinfer import LLM, SamplingParams
from jaxinfer.loading import LoadedModel
from tests.engines import config_of, make_engine
from tests.unit.faces.fakes import ByteTokenizer

GOLDEN = Path(__file__).parents[1] / "golden"
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)


def folder_of(name: str) -> str:
    """Return where a golden checkpoint is."""
    folder = GOLDEN / "models" / name
    return str(folder if folder.exists() else GOLDEN / "families" / name)


def loaded_of(name: str, buckets: tuple[int, ...] = (32,), **settings) -> LoadedModel:
    """Return a golden checkpoint as loaded, with tokens that are bytes.

    Engines of equal shapes share their programs: see `tests.engines.make_engine`. XLA compiles
    what is around C++ kernels in half the time, so these are used where they can be had.
    """
    shapes = {"max_num_seqs": 4, "max_num_batched_tokens": max(buckets, default=32)}
    settings = {"model": folder_of(name), "max_model_len": 128} | settings
    engine = make_engine(name, buckets, **{**shapes, **settings})
    return LoadedModel(
        engine=engine,
        tokenizer=ByteTokenizer(),
        config=engine.config,
        model_config=config_of(name),
        name=name,
        generation_config={},
    )


def llm_of(name: str, buckets: tuple[int, ...] = (32,), **settings) -> LLM:
    """Return a golden checkpoint behind an `LLM` that takes and gives token ids."""
    return LLM.from_loaded(loaded_of(name, buckets, **settings))


def golden(name: str, what: str) -> np.ndarray:
    """Return one array of a checkpoint's goldens, or of its inner values ("hooks/...")."""
    folder, _, key = what.rpartition("/")
    found = [GOLDEN / f / f"{name}.npz" for f in ((folder,) if folder else ("models", "families"))]
    with np.load(next(path for path in found if path.exists())) as data:
        return data[key]


def prompt_of(name: str, which: str = "medium") -> list[int]:
    """Return the token ids of a golden's prompt."""
    return golden(name, f"{which}_token_ids").tolist()


def tokens(outputs) -> list[list[int]]:
    """Return the tokens of each output's first sample."""
    return [output.outputs[0].token_ids for output in outputs]
