"""The model goldens are whole, and a float64 forward pass in numpy agrees with each of them.

Knows the files of tests/golden/models and nothing of jaxinfer: what fails here is a golden, not the
engine. The scripts beside the goldens are loaded by path, for they are no package.
"""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers

MODELS = Path(__file__).parents[2] / "golden" / "models"
REAL = MODELS / "smollm2_135m.npz"
FOLDERS = sorted(path.parent for path in MODELS.glob("*/config.json"))
CHECKPOINTS = FOLDERS + sorted(MODELS.glob("*.gguf"))
PROMPTS = ("short", "medium", "long")
# Float32 rounding of the reference; the largest seen is 3e-5 on logits up to 15.
TOLERANCE = 1e-4


def load_script(name):
    spec = importlib.util.spec_from_file_location(f"golden_models_{name}", MODELS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def oracle():
    return load_script("oracle")


@pytest.fixture(params=CHECKPOINTS, ids=lambda path: path.name)
def checkpoint(request):
    return request.param


def load_golden(checkpoint):
    return np.load(MODELS / f"{checkpoint.stem}.npz", allow_pickle=False)


def test_every_checkpoint_has_a_golden():
    names = {path.stem for path in CHECKPOINTS}
    assert names == {path.stem for path in MODELS.glob("*.npz")} - {REAL.stem}
    assert len(names) >= 11


def test_golden_is_well_formed(checkpoint):
    golden = load_golden(checkpoint)
    meta = json.loads(str(golden["meta"]))
    assert {"torch", "transformers", "numpy", "gguf"} <= meta["versions"].keys()
    for prompt in PROMPTS:
        ids, logits = golden[f"{prompt}_token_ids"], golden[f"{prompt}_logits"]
        greedy, margins = golden[f"{prompt}_greedy"], golden[f"{prompt}_margins"]
        assert ids.dtype == greedy.dtype == np.int32
        assert logits.dtype == margins.dtype == np.float32
        assert logits.shape == (len(ids), 320)
        assert np.isfinite(logits).all()
        assert greedy.shape == margins.shape == (32,)
        assert greedy[0] == logits[-1].argmax()
        assert margins.min() == pytest.approx(meta["prompts"][prompt]["min_margin"])
        assert margins.min() > 1e-3, "a near-tie: no other program can be held to it"
        assert len(set(greedy.tolist())) >= 10, "a loop: it shows little"
    hidden = golden["medium_hidden_states"]
    assert hidden.dtype == np.float32
    assert hidden.shape[1] == len(golden["medium_token_ids"])


def test_oracle_agrees_with_reference(checkpoint, oracle):
    golden = load_golden(checkpoint)
    model = oracle.load(checkpoint)
    for prompt in PROMPTS:
        ids, greedy = golden[f"{prompt}_token_ids"], golden[f"{prompt}_greedy"]
        logits, hidden = oracle.forward(model, [*ids, *greedy])
        T = len(ids)
        np.testing.assert_allclose(logits[:T], golden[f"{prompt}_logits"], rtol=0, atol=TOLERANCE)
        np.testing.assert_array_equal(logits[T - 1 : -1].argmax(axis=-1), greedy)
        if prompt == "medium":
            expected = golden["medium_hidden_states"]
            np.testing.assert_allclose(hidden[:, :T], expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_folder_tokenizer_gives_the_long_prompt(folder):
    golden = load_golden(folder)
    text = json.loads(str(golden["meta"]))["prompts"]["long"]["text"]
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode(text).ids == golden["long_token_ids"].tolist()
    assert tokenizer.decode(golden["long_token_ids"].tolist()) == text


def test_folder_written_from_gguf_is_the_same_model(tmp_path, oracle):
    file = MODELS / "llama2_q8_0.gguf"
    folder = load_script("smollm2_folder").write_folder(tmp_path / "model", gguf_file=file)
    ids = load_golden(file)["medium_token_ids"]
    # The folder's rotation pairs rows H/2 apart, the file's neighbours: equal only if unpermuted.
    from_folder, _ = oracle.forward(oracle.load(folder), ids)
    from_file, _ = oracle.forward(oracle.load(file), ids)
    np.testing.assert_allclose(from_folder, from_file, rtol=0, atol=1e-9)


def test_folder_in_bfloat16_is_half_the_size(tmp_path):
    write_folder = load_script("smollm2_folder").write_folder
    sizes = {
        dtype: write_folder(tmp_path / dtype, dtype=dtype, gguf_file=MODELS / "llama2_q8_0.gguf")
        .joinpath("model.safetensors")
        .stat()
        .st_size
        for dtype in ("float32", "bfloat16")
    }
    assert sizes["bfloat16"] == pytest.approx(sizes["float32"] / 2, rel=0.02)


def test_real_golden_is_well_formed():
    golden = np.load(REAL, allow_pickle=False)
    meta = json.loads(str(golden["meta"]))
    columns = golden["columns"]
    assert columns.shape == (256,)
    assert len(meta["prompts"]) == 5
    for prompt, facts in meta["prompts"].items():
        ids, last = golden[f"{prompt}_token_ids"], golden[f"{prompt}_last_logits"]
        by_column = golden[f"{prompt}_column_logits"]
        assert ("text" in facts) != ("messages" in facts)
        assert last.shape == (49152,)
        assert by_column.shape == (len(ids), 256)
        assert last.dtype == by_column.dtype == np.float32
        np.testing.assert_array_equal(by_column[-1], last[columns])
        assert golden[f"{prompt}_greedy"].shape == (48,)
        assert golden[f"{prompt}_greedy"][0] == last.argmax()
        assert golden[f"{prompt}_margins"].min() > 1e-3
