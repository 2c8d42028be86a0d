"""One model in three forms: each gives the reference implementation's logits and transcripts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxinfer.convert import convert
from jaxinfer.llm import LLM
from jaxinfer.sampling_params import SamplingParams
from tests.engines import GOLDEN, Work, logits_of, run_tokens
from tests.golden.models.real_prompts import PROMPTS
from tests.golden.models.smollm2_folder import write_folder
from tests.real.model import RealModel

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

# float32 against float32 in another order of summation; the bound.
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN / "smollm2_135m.npz") as data:
        return dict(data)


@pytest.fixture(scope="module", params=["gguf", "safetensors", "orbax"])
def form(request: pytest.FixtureRequest, real: RealModel, tmp_path_factory) -> RealModel:
    """Return the model loaded from one of its forms, with the programs compiled already."""
    if request.param == "gguf":
        return real
    path: Path = tmp_path_factory.mktemp("checkpoints") / request.param
    if request.param == "safetensors":
        write_folder(path, dtype="float32")
    else:
        convert(None, str(path), dtype="float32")
    model = RealModel.load(str(path), like=real)
    shutil.rmtree(path)  # half a gigabyte; all of it is in memory now
    return model


def test_every_prompt_has_a_golden(golden) -> None:
    assert set(json.loads(str(golden["meta"]))["prompts"]) == set(PROMPTS)


def test_weights_are_those_of_the_gguf_file(form: RealModel, real: RealModel) -> None:
    assert form.parameters.keys() == real.parameters.keys()
    for name, expected in real.parameters.items():
        np.testing.assert_array_equal(*jax.device_get((form.parameters[name], expected)), name)


def test_text_becomes_the_same_token_ids(form: RealModel, golden) -> None:
    for name, prompt in PROMPTS.items():
        if "text" in prompt:
            token_ids = form.tokenizer.encode(prompt["text"])
        else:
            token_ids = form.tokenizer.encode_chat(prompt["messages"])
        assert token_ids == golden[f"{name}_token_ids"].tolist()


@pytest.mark.parametrize("chunk", [512, 32], ids="chunks of {}".format)
def test_logits_equal_the_reference(form: RealModel, golden, chunk: int) -> None:
    with form.engine() as engine:
        for prompt in PROMPTS:
            logits = logits_of(engine, golden[f"{prompt}_token_ids"], chunk)
            error = np.abs(logits[-1] - golden[f"{prompt}_last_logits"]).max()
            columns = logits[:, golden["columns"]]
            error = max(error, np.abs(columns - golden[f"{prompt}_column_logits"]).max())
            assert error <= TOLERANCE, f"{prompt}: {error}"


def test_greedy_transcripts_equal_the_reference(form: RealModel, golden) -> None:
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    work = {p: Work(tuple(golden[f"{p}_token_ids"].tolist()), params) for p in PROMPTS}
    with form.engine() as engine:
        tokens = run_tokens(engine, work)
    assert tokens == {p: golden[f"{p}_greedy"].tolist() for p in PROMPTS}


def test_it_knows_the_capital_of_france(form: RealModel) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    with form.engine() as engine, LLM.from_loaded(form.loaded(engine)) as llm:
        (answer,) = llm.chat(question, SamplingParams(temperature=0, max_tokens=32))
        assert llm.stats.compilations_after_warmup == 0
    assert answer.outputs[0].text == "The capital of France is Paris."
    assert answer.outputs[0].finish_reason == "stop"
