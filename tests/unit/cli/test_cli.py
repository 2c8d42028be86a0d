"""The command line, over the real `AsyncEngine` around a fake engine."""

from __future__ import annotations

import dataclasses
import errno
import io
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, NoReturn

import pytest
import typer
from typer.testing import CliRunner, Result

from checkpoints import CheckpointError
from jaxinfer.async_engine import AsyncEngine
from jaxinfer.cli import app
from jaxinfer.cli_options import attribute_docs
from jaxinfer.config import EngineConfig
from jaxinfer.errors import InvalidRequestError
from jaxinfer.request import FinishReason
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.server.options import ServerOptions
from jaxinfer.terminal import read_line, read_prompt
from tests.unit.faces.fakes import FakeEngine, loaded


def run(*args: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, args, input=stdin, catch_exceptions=False)


@pytest.fixture
def serve_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Stands in for the HTTP server; returns what it was called with."""
    calls: list[dict[str, Any]] = []
    server = ModuleType("jaxinfer.server.run")
    server.serve = lambda config, options: calls.append({"config": config, "options": options})
    monkeypatch.setitem(sys.modules, "jaxinfer.server.run", server)
    return calls


class Engines:
    """Makes the engines that commands ask for; what they do is set before the command runs."""

    def __init__(self) -> None:
        self.fake = FakeEngine(script="an answer")
        self.fake.add_request = partial(self._add_request, self.fake.add_request)
        self.scripts: list[str] = []  # what the first requests produce
        self.generation_config: dict[str, Any] = {}
        self.prompts: list[str] = []
        self.params: list[SamplingParams] = []
        self.config: EngineConfig | None = None
        self.error: Exception | None = None

    def from_config(self, config: EngineConfig) -> AsyncEngine:
        if self.error is not None:
            raise self.error
        self.config = config
        return AsyncEngine(loaded(self.fake, generation_config=self.generation_config))

    def _add_request(
        self,
        add_request: Callable[..., None],
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        **rest: Any,
    ) -> None:
        self.prompts.append(bytes(prompt_token_ids).decode())
        self.params.append(params)
        if self.scripts:
            self.fake.script = [*self.scripts.pop(0).encode()]
        add_request(request_id, prompt_token_ids, params, **rest)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    engines = Engines()
    monkeypatch.setattr(AsyncEngine, "from_config", engines.from_config)
    return engines


# A legal value other than the default, for every field.
OTHER_VALUES: dict[str, Any] = {
    "model": "some/model",
    "tokenizer": "some/tokenizer",
    "dtype": "float32",
    "kv_cache_dtype": "int8",
    "max_model_len": 100,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_num_mixed_tokens": 32,
    "num_decode_steps": 2,
    "page_size": 32,
    "num_pages": 77,
    "num_window_pages": 44,
    "kv_cache_memory_bytes": 1 << 20,
    "enable_prefix_caching": False,
    "scheduling_policy": "priority",
    "overlap": False,
    "deterministic": True,
    "warmup": False,
    "seed": 3,
    "max_logprobs": 5,
    "max_waiting": 9,
    "served_model_name": "name",
    "compilation_cache_dir": "",
    "tensor_parallel_size": 2,
    "data_parallel_size": 2,
    "num_hosts": 2,
    "host_rank": 1,
    "coordinator_address": "10.0.0.1:8476",
    "host_timeout_s": 7.5,
    "expert_parallel": 2,
    "attention_impl": "xla",
    "quantization": "int8",
    "kernels": "xla",
}


def test_serve_without_flags_is_the_config_without_arguments(serve_calls):
    assert run("serve").exit_code == 0
    (call,) = serve_calls
    assert call["config"] == EngineConfig()
    assert call["options"] == ServerOptions()


def test_every_setting_is_covered_here():
    # Functions have no spelling on a command line.
    assert {*OTHER_VALUES} == {*EngineConfig.field_names()} - {"logits_processors"}


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_every_setting_is_a_flag(name: str, serve_calls):
    value = OTHER_VALUES[name]
    flag = name.replace("_", "-")
    args = [f"--no-{flag}"] if value is False else [f"--{flag}", str(value)]
    args = [f"--{flag}"] if value is True else args
    assert run("serve", *args).exit_code == 0
    assert serve_calls[0]["config"] == dataclasses.replace(EngineConfig(), **{name: value})


def test_every_setting_has_a_sentence_in_the_help():
    docs = attribute_docs(EngineConfig)
    assert {*docs} == {*EngineConfig.field_names()}
    shown = " ".join(run("serve", "--help").stdout.split())
    del docs["logits_processors"]  # no flag of it
    for text in docs.values():
        # The help breaks lines, also after a hyphen.
        assert text.replace("`", "")[:30].replace("-", "") in shown.replace("- ", "").replace(
            "-", ""
        )


@pytest.mark.parametrize("command", ["serve", "generate", "chat", "convert"])
def test_help_teaches_by_example(command: str):
    assert f"\n    jaxinfer {command}" in run(command, "--help").stdout


def test_bad_setting_is_one_line_and_exit_code_2(serve_calls):
    result = run("serve", "--page-size", "3")
    assert result.exit_code == 2
    assert result.stderr == "error: page_size must be a power of two, got 3\n"
    assert serve_calls == []


def test_unreadable_model_is_one_line_and_exit_code_2(engines: Engines):
    engines.error = CheckpointError("model.gguf: not a GGUF file; give another")
    result = run("generate", "hello")
    assert result.exit_code == 2
    assert result.stderr == "error: model.gguf: not a GGUF file; give another\n"


def test_a_bug_of_ours_is_not_dressed_up_as_bad_input(engines: Engines):
    engines.error = ValueError("a bug")
    with pytest.raises(ValueError, match="a bug"):
        run("generate", "hello")


def test_generate_streams_the_answer_and_tells_how_fast_it_was(engines: Engines):
    result = run("generate", "hello")
    assert result.exit_code == 0
    assert result.stdout == "an answer\n"
    assert "10 tokens, first after " in result.stderr
    assert "tokens/s" in result.stderr


def test_generate_uses_the_chat_template_unless_told_otherwise(engines: Engines):
    run("generate", "hello", "--system", "be kind")
    run("generate", "hello", "--raw")
    assert engines.prompts == ["system: be kind\nuser: hello\nassistant: ", "hello"]


def test_generate_reads_stdin(engines: Engines):
    run("generate", "-", "--raw", stdin="from a file")
    assert engines.prompts == ["from a file"]


def test_generate_passes_on_how_to_sample(engines: Engines):
    run("generate", "hi", "--max-tokens=3", "--temperature=0.5", "--top-p=0.9", "--seed=7")
    (params,) = engines.params
    assert (params.max_tokens, params.temperature, params.top_p, params.seed) == (3, 0.5, 0.9, 7)


def test_model_without_a_recommendation_is_greedy(engines: Engines):
    run("generate", "hi")
    assert engines.params[0].greedy


def test_flags_win_over_the_models_recommendation(engines: Engines):
    engines.generation_config = {"temperature": 0.6, "top_k": 20}
    run("generate", "hi", "--top-p", "0.8")
    (params,) = engines.params
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 20, 0.8)


def test_answer_that_is_cut_says_so(engines: Engines):
    assert "cut at the limit" in run("generate", "hi", "--max-tokens", "2").stderr


def test_generate_refuses_a_prompt_that_cannot_be_served(engines: Engines):
    result = run("generate", "", "--raw")
    assert result.exit_code == 2
    assert result.stderr == "error: prompt must not be empty\n"


def test_generate_for_one_person_runs_one_sequence(engines: Engines):
    run("generate", "hi", "--model", "some/model")
    assert engines.config == EngineConfig(model="some/model", max_num_seqs=1)


def test_chat_remembers_and_reset_forgets(engines: Engines):
    result = run("chat", "--system", "S", stdin="one\ntwo\n/reset\nthree\n/exit\n")
    assert result.exit_code == 0
    assert engines.prompts == [
        "system: S\nuser: one\nassistant: ",
        "system: S\nuser: one\nassistant: an answer\nuser: two\nassistant: ",
        "system: S\nuser: three\nassistant: ",
    ]


def test_end_of_input_ends_the_chat(engines: Engines):
    assert run("chat", stdin="one\n").exit_code == 0
    assert len(engines.prompts) == 1


def test_unknown_chat_command_is_not_sent_to_the_model(engines: Engines):
    result = run("chat", stdin="/rest\n")
    assert engines.prompts == []
    assert "/reset" in result.stderr


def test_conversation_that_outgrows_the_context_leaves_the_chat_usable(engines: Engines):
    result = run("chat", "--max-tokens", "20", stdin=f"{'x' * 2000}\nshort\n")
    assert result.exit_code == 0
    assert "error: " in result.stderr
    assert engines.prompts == ["user: short\nassistant: "]


@pytest.fixture
def ctrl_c_at_the_first_word(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the first answer so long that only ctrl-C ends it, and presses that once it shows."""
    engines.fake.max_model_len = 100_000
    engines.scripts = ["on and on " * 9_000, "an answer"]
    echo = typer.echo
    pressed = []

    def echo_then_press(message: str = "", **kwargs: Any) -> None:
        echo(message, **kwargs)
        if message.startswith("o") and not pressed:
            pressed.append(True)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(typer, "echo", echo_then_press)


def test_ctrl_c_stops_the_answer_and_not_the_chat(engines: Engines, ctrl_c_at_the_first_word):
    result = run("chat", "--max-tokens", "90000", stdin="one\ntwo\n")
    assert result.exit_code == 0
    assert [reason for _, reason in engines.fake.aborted] == [FinishReason.ABORT]
    assert result.stdout.endswith("an answer\n> \n")
    # What was said until then is remembered.
    assert engines.prompts[1].startswith("user: one\nassistant: o")


def test_ctrl_c_ends_generate_with_the_shells_exit_code(engines: Engines, ctrl_c_at_the_first_word):
    result = run("generate", "one", "--max-tokens", "90000")
    assert result.exit_code == 130
    assert result.stdout.startswith("o")
    assert "tokens, first after" in result.stderr


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Stands in for `jaxinfer.convert`; returns what it was called with."""
    calls: list[tuple[Any, ...]] = []
    module = ModuleType("jaxinfer.convert")

    def convert(source: str, destination: str, *, dtype: str, on_progress: Any) -> None:
        if source == "broken.gguf":
            raise CheckpointError("broken.gguf: the file ends too early")
        on_progress(1, 2)
        calls.append((source, destination, dtype))

    module.convert = convert
    monkeypatch.setitem(sys.modules, "jaxinfer.convert", module)
    return calls


def test_convert_names_its_result(conversions):
    result = run("convert", "model.gguf", "folder", "--dtype", "float32")
    assert conversions == [("model.gguf", "folder", "float32")]
    assert "jaxinfer serve --model folder" in result.stdout


def test_convert_of_a_damaged_file_is_exit_code_2(conversions):
    result = run("convert", "broken.gguf", "folder")
    assert result.exit_code == 2
    assert "error: broken.gguf: the file ends too early\n" in result.stderr
    assert result.stdout == ""


def test_models_lists_what_is_supported():
    result = run("models")
    assert result.exit_code == 0
    assert "LlamaForCausalLM" in result.stdout


def test_version_names_what_it_stands_on():
    lines = run("version").stdout.splitlines()
    assert [line.split()[0] for line in lines] == [
        "Python", "jaxinfer", "jax", "jaxlib", "flax", "numpy",
    ]  # fmt: skip


def test_answer_is_cut_where_the_context_ends(engines: Engines):
    engines.fake.max_model_len = 12
    result = run("generate", "12345678", "--raw", "--max-tokens", "500")
    assert result.exit_code == 0
    assert result.stdout == "an a\n"
    assert "cut at the limit" in result.stderr


@pytest.mark.parametrize("stdin", [None, io.StringIO("")], ids=["closed", "empty"])
def test_generate_without_a_prompt_on_stdin_is_exit_code_2(engines: Engines, monkeypatch, stdin):
    monkeypatch.setattr(sys, "stdin", stdin)
    with pytest.raises(InvalidRequestError, match="no prompt on stdin") as caught:
        read_prompt()
    assert caught.value.param == "prompt"
    assert run("generate", "-").exit_code == 2


def test_generate_refuses_stdin_that_is_no_text(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), "utf-8"))
    with pytest.raises(InvalidRequestError, match="cannot be read as text"):
        read_prompt()


def test_chat_ends_where_there_is_no_stdin(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    assert read_line() == "/exit"


@pytest.mark.parametrize("flags", [["--temperature=-1"], ["--max-tokens=0"], ["--top-p=nan"]])
@pytest.mark.parametrize("command", [["generate", "hi"], ["chat"]])
def test_bad_sampling_flags_are_told_before_a_model_is_loaded(engines: Engines, command, flags):
    engines.error = AssertionError("loaded")
    assert run(*command, *flags).exit_code == 2


def test_generate_without_stdout_ends_in_one_line(engines: Engines, monkeypatch):
    def full(text: str = "", **style: Any) -> None:
        if not style.get("err"):
            raise OSError(errno.ENOSPC, "No space left on device")
        sys.stderr.write(f"{text}\n")

    monkeypatch.setattr("jaxinfer.terminal.typer.echo", full)
    monkeypatch.setattr("jaxinfer.terminal.typer.secho", full)
    result = run("generate", "hi")
    assert result.exit_code == 1
    assert result.stderr == "error: the answer cannot be written: No space left on device\n"


def test_an_answer_that_failed_is_exit_code_1(engines: Engines, monkeypatch):
    add_request = engines.fake.add_request

    def add_and_fail(request_id: str, *args: Any, **kwargs: Any) -> None:
        add_request(request_id, *args, **kwargs)
        engines.fake.fail_next.add(request_id)

    monkeypatch.setattr(engines.fake, "add_request", add_and_fail)
    result = run("generate", "hi")
    assert result.exit_code == 1 and "logits held a NaN" in result.stderr


def test_ctrl_c_while_the_model_loads_ends_at_once(engines: Engines, monkeypatch):
    stopped, codes = threading.Event(), []

    def never_ready(config: EngineConfig) -> AsyncEngine:
        # To the thread that waits, as the kernel does: one raised here would not wake it.
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        stopped.wait(10)
        raise AssertionError("nobody waits for it")

    def exit_now(code: int) -> NoReturn:
        codes.append(code)
        raise SystemExit(code)

    monkeypatch.setattr(AsyncEngine, "from_config", never_ready)
    monkeypatch.setattr("jaxinfer.cli_talk._exit_now", exit_now)
    result = run("generate", "hi")
    stopped.set()
    assert (codes, result.exit_code) == ([130], 130)
