"""Hub downloads, each in a process of its own: `huggingface_hub` reads its settings on import."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from checkpoints import open_checkpoint
from tests.unit.checkpoints import tiny_models as tiny
from tests.unit.checkpoints.hub_server import serve_hub

REPO = "tiny-org/tiny-llama"

SCRIPT = """
import sys
import checkpoints
try:
    print("path", checkpoints.resolve_source(sys.argv[1]))
except checkpoints.CheckpointError as error:
    print(type(error).__name__, error)
for model in checkpoints.installed_models():
    if model.origin == "Hugging Face cache":
        print("installed", model.name, model.size_bytes)
"""


@pytest.fixture
def folder(tmp_path):
    folder = tiny.write_llama_folder(tmp_path / "served", shards=2)
    (folder / "README.md").write_text("not needed")
    (folder / "pytorch_model.bin").write_bytes(b"not needed")
    (folder / "consolidated.safetensors").write_bytes(b"not needed")
    return folder


@pytest.fixture
def server(folder):
    with serve_hub(REPO, folder) as server:
        yield server


def start(url: str, home: Path, name: str = REPO) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment |= {"HF_ENDPOINT": url, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, name],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def resolve(url: str, home: Path, name: str = REPO) -> tuple[str, str, list[str]]:
    """First word and rest of what the script says, and the models it then finds installed."""
    out, err = start(url, home, name).communicate(timeout=60)
    assert "Traceback" not in err, err
    lines = out.splitlines()
    kind, rest = lines[0].split(" ", 1)
    return kind, rest, lines[1:]


def kill_in(name: str, server, home: Path) -> None:
    """Kill a download that stands in the middle of a file."""
    server.stall_in = name
    process = start(server.url, home)
    try:
        assert server.stalled.wait(timeout=60)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)


def test_only_the_needed_files_are_fetched_and_the_model_opens(server, tmp_path):
    kind, path, installed = resolve(server.url, tmp_path / "home")
    assert kind == "path"
    checkpoint = open_checkpoint(path)
    for name, array in tiny.llama_weights().items():
        np.testing.assert_array_equal(checkpoint.read(name), array)
    assert checkpoint.text.chat_template
    fetched = {p.name for p in Path(path).iterdir()}
    assert fetched == set(server.file_names()) - {
        "README.md",
        "pytorch_model.bin",
        "consolidated.safetensors",
    }
    assert installed[0].startswith(f"installed {REPO} ")


def test_without_a_connection_the_cache_serves(server, tmp_path):
    _, path, _ = resolve(server.url, tmp_path / "home")
    assert resolve("http://127.0.0.1:9", tmp_path / "home")[:2] == ("path", path)
    kind, message, _ = resolve("http://127.0.0.1:9", tmp_path / "empty")
    assert kind == "DownloadError"
    assert "Check the connection" in message


def test_a_killed_download_leaves_nothing_that_passes_for_whole(server, tmp_path):
    shard = "model-00001-of-00002.safetensors"
    kill_in(shard, server, tmp_path / "home")
    left = [p for p in (tmp_path / "home").rglob("*") if p.name == shard]
    assert left == []
    assert resolve("http://127.0.0.1:9", tmp_path / "home")[0] == "DownloadError"
    server.stall_in = None
    server.resume.set()
    kind, path, _ = resolve(server.url, tmp_path / "home")
    assert kind == "path"
    assert (Path(path) / shard).read_bytes() == (server.folder / shard).read_bytes()


def test_a_missing_shard_is_missed_without_a_connection(server, tmp_path):
    _, path, _ = resolve(server.url, tmp_path / "home")
    (Path(path) / "model-00002-of-00002.safetensors").unlink()
    assert resolve("http://127.0.0.1:9", tmp_path / "home")[0] == "DownloadError"


def test_weights_come_last(server, tmp_path):
    """Killed with whole weights but no tokenizer, the cache would seem whole."""
    kill_in("tokenizer.json", server, tmp_path / "home")
    assert not [r for r in server.requests if r.endswith(".safetensors")]
    assert resolve("http://127.0.0.1:9", tmp_path / "home")[0] == "DownloadError"


@pytest.mark.parametrize(
    ("refusal", "name", "kind", "message"),
    [
        (None, "tiny-org/other", "SourceNotFoundError", "hub has no model of that name"),
        (None, f"{REPO}@v9", "SourceNotFoundError", "has no revision 'v9'"),
        (None, f"{REPO}:Q4_0", "SourceNotFoundError", "neither safetensors nor GGUF"),
        ((403, "GatedRepo"), REPO, "DownloadError", "hf auth login"),
        ((401, "RepoNotFound"), REPO, "SourceNotFoundError", "hf auth login"),
    ],
)
def test_each_refusal_has_its_name(server, tmp_path, refusal, name, kind, message):
    server.refuse_with = refusal
    got_kind, got_message, installed = resolve(server.url, tmp_path / "home", name)
    assert got_kind == kind
    assert message in got_message
    assert installed == []


def test_one_gguf_is_chosen_and_several_are_listed(tmp_path):
    folder = tmp_path / "served"
    folder.mkdir()
    tiny.write_llama_gguf(folder / "tiny.F16.gguf")
    with serve_hub(REPO, folder) as server:
        kind, path, _ = resolve(server.url, tmp_path / "home")
        assert (kind, Path(path).name) == ("path", "tiny.F16.gguf")
        assert open_checkpoint(path).config["model_type"] == "llama"
        tiny.write_llama_gguf(folder / "tiny.F32.gguf", np.float32)
        kind, message, _ = resolve(server.url, tmp_path / "second")
        assert kind == "SourceNotFoundError"
        assert f"{REPO}:tiny.F16.gguf" in message
        kind, path, _ = resolve(server.url, tmp_path / "second", f"{REPO}:f32")
        assert Path(path).name == "tiny.F32.gguf"
