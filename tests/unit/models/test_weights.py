"""Which tensors a checkpoint may and must have: told before any of them is used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxinfer.errors import ModelError
from jaxinfer.model_source import ModelSource, load_model
from jaxinfer.models import family_of
from jaxinfer.sharding import make_mesh
from tests.engines import FAMILIES, GOLDEN


class Copy:
    """A golden checkpoint whose config and tensors a test may change."""

    def __init__(self, name: str, folder: Path):
        golden = GOLDEN if (GOLDEN / name).exists() else FAMILIES
        self.folder = folder / name
        shutil.copytree(golden / name, self.folder)
        self.config = json.loads((self.folder / "config.json").read_text())
        self.tensors = {n: a.astype(np.float32) for n, a in load_file(self._weights).items()}

    @property
    def _weights(self) -> Path:
        return self.folder / "model.safetensors"

    def load(self) -> dict:
        (self.folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, self._weights)
        source = ModelSource.open(str(self.folder))
        config = family_of(source.config).translate(source.config)
        return load_model(source, config, make_mesh(), jnp.dtype(jnp.float32))[1]


def test_missing_misshapen_and_unexpected_tensors_are_listed_at_once(tmp_path: Path) -> None:
    copy = Copy("llama2", tmp_path)
    del copy.tensors["model.norm.weight"]
    copy.tensors["model.layers.0.mlp.down_proj.weight"] = np.zeros((3, 5), np.float32)
    copy.tensors["model.layers.0.self_attn.q_proj.weight_scale"] = np.ones(1, np.float32)
    with pytest.raises(ModelError) as caught:
        copy.load()
    message = str(caught.value)
    assert "3 faults" in message
    assert "missing: model.norm.weight" in message
    assert "misshapen: model.layers.0.mlp.down_proj.weight [3, 5]" in message
    assert "unexpected: model.layers.0.self_attn.q_proj.weight_scale" in message


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.bool_, ml_dtypes.float8_e4m3fn])
def test_codes_in_place_of_weights_are_refused(tmp_path: Path, dtype: type) -> None:
    """As in a quantized checkpoint whose config does not say so."""
    copy = Copy("llama2", tmp_path)
    name = "model.layers.0.mlp.down_proj.weight"
    copy.tensors[name] = copy.tensors[name].astype(dtype)
    with pytest.raises(ModelError, match=f"quantized: {name} is stored as {np.dtype(dtype).name}"):
        copy.load()


def test_no_weight_is_read_when_one_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Copy("llama2", tmp_path)
    del copy.tensors["model.norm.weight"]
    monkeypatch.setattr(
        "checkpoints.safetensors_folder.SafetensorsFolder.read",
        lambda self, name: pytest.fail(f"{name} was read"),
    )
    with pytest.raises(ModelError, match="1 faults"):
        copy.load()


@pytest.mark.parametrize(
    ("name", "embedding", "head"),
    [
        ("qwen2", "model.embed_tokens.weight", "lm_head.weight"),
        ("gpt2", "wte.weight", "lm_head.weight"),
        ("gpt_neox", "gpt_neox.embed_in.weight", "embed_out.weight"),
    ],
)
def test_a_tied_head_may_be_stored_if_it_is_the_embedding(
    tmp_path: Path, name: str, embedding: str, head: str
) -> None:
    copy = Copy(name, tmp_path)
    copy.config["tie_word_embeddings"] = True
    copy.tensors[head] = copy.tensors[embedding].copy()
    assert "lm_head.kernel" not in copy.load()
    copy.tensors[head][0, 0] += 1
    with pytest.raises(ModelError, match=f"{head} differs .*tie_word_embeddings"):
        copy.load()
    copy.config["tie_word_embeddings"] = False
    assert "lm_head.kernel" in copy.load()
