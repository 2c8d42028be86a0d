"""Where a setting comes from: flag, environment variable, file, default, in this order."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from jaxinfer.cli import app
from jaxinfer.cli_options import attribute_docs
from jaxinfer.config import EngineConfig
from jaxinfer.server.options import ServerOptions
from tests.unit.cli.test_cli import OTHER_VALUES as ENGINE_VALUES

# A legal value other than the default, for every field.
OPTION_VALUES: dict[str, Any] = {
    "host": "0.0.0.0",
    "port": 9000,
    "uds": "/tmp/some.sock",
    "ssl_certfile": "cert.pem",
    "api_key": ("one", "two"),
    "api_key_file": "keys.txt",
    "allowed_origins": ("https://a.example", "https://b.example"),
    "allowed_methods": ("GET",),
    "allowed_headers": ("authorization", "x-own"),
    "max_body_bytes": 1000,
    "max_header_bytes": 2000,
    "max_concurrent_streams": 7,
    "request_timeout_s": 1.5,
    "receive_timeout_s": 2.5,
    "send_timeout_s": 3.5,
    "keep_alive_timeout_s": 4.5,
    "drain_timeout_s": 5.5,
    "stall_timeout_s": 6.5,
    "sse_ping_interval_s": 7.5,
    "pooling": "mean",
    "trust_request_chat_template": True,
    "edit": ("a=a.npz", "b=b.npz"),
    "health_timeout_s": 8.5,
    "log_level": "debug",
    "log_format": "json",
    "access_log": False,
    "metrics_prefix": "jaxinfer",
    "playground": False,
    "otlp_traces_endpoint": "http://127.0.0.1:4318/v1/traces",
}
# Legal only together with others.
NOT_ALONE = {"ssl_keyfile", "ssl_ca_certs", "allow_credentials"}
VALUES = {**ENGINE_VALUES, **OPTION_VALUES}
# An empty variable counts as none, so these values have no spelling there.
NO_VARIABLE = {name for name, value in VALUES.items() if value == ""}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, ServerOptions]]:
    """Stands in for the HTTP server; returns what it was called with."""
    calls: list[tuple[EngineConfig, ServerOptions]] = []
    module = ModuleType("jaxinfer.server.run")
    module.serve = lambda config, options: calls.append((config, options))
    monkeypatch.setitem(sys.modules, "jaxinfer.server.run", module)
    return calls


def serve(*args: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, ["serve", *args], env=env, catch_exceptions=False)


def setting(served: list[Any], name: str) -> Any:
    config, options = served[-1]
    return getattr(options if name in {f.name for f in fields()} else config, name)


def fields() -> tuple[Any, ...]:
    return dataclasses.fields(ServerOptions)


def as_flags(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    values = value if isinstance(value, tuple) else (value,)
    return [word for v in values for word in (f"--{flag}", str(v))]


def as_variable(name: str, value: Any) -> dict[str, str]:
    text = " ".join(value) if isinstance(value, tuple) else str(value)
    return {f"JAXINFER_{name.upper()}": text}


def as_file(path: Path, **settings: Any) -> list[str]:
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()}
    path.write_text(yaml.safe_dump(plain))
    return ["--config", str(path)]


def test_every_option_is_covered_here_and_documented():
    names = {field.name for field in fields()}
    assert {*OPTION_VALUES} | NOT_ALONE == names
    assert {*attribute_docs(ServerOptions)} == names


def test_no_engine_setting_has_the_name_of_a_server_option():
    assert not {field.name for field in fields()} & {*EngineConfig.field_names()}


@pytest.mark.parametrize("name", VALUES)
def test_a_setting_comes_from_a_flag_a_variable_or_a_file(name: str, served, tmp_path: Path):
    value = VALUES[name]
    ways = [(as_flags(name, value), None), (as_file(tmp_path / "c.yaml", **{name: value}), None)]
    if name not in NO_VARIABLE:
        ways.append(([], as_variable(name, value)))
    for args, env in ways:
        result = serve(*args, env=env)
        assert result.exit_code == 0, result.output
        assert setting(served, name) == value


@pytest.mark.parametrize(
    ("name", "flag", "variable", "file"),
    [
        ("port", 1, 2, 3),
        ("max_num_seqs", 1, 2, 3),
        ("pooling", "mean", "last", "last"),
        ("access_log", True, False, False),
        ("overlap", False, True, True),
        ("api_key", ("a", "b"), ("c",), ("d", "e")),
        ("request_timeout_s", 1.0, 2.0, 3.0),
    ],
)
def test_flag_wins_over_variable_over_file_over_default(
    served, tmp_path, name, flag, variable, file
):
    env = as_variable(name, variable)
    config = as_file(tmp_path / "c.yaml", **{name: file})
    serve(*config, *as_flags(name, flag), env=env)
    assert setting(served, name) == flag
    serve(*config, env=env)
    assert setting(served, name) == variable
    serve(*config)
    assert setting(served, name) == file
    serve()
    record = ServerOptions() if name in {f.name for f in fields()} else EngineConfig()
    assert setting(served, name) == getattr(record, name)


def test_the_file_itself_can_be_named_by_a_variable(served, tmp_path):
    as_file(tmp_path / "c.yaml", port=1234)
    serve(env={"JAXINFER_CONFIG": str(tmp_path / "c.yaml")})
    assert setting(served, "port") == 1234


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot: 9000", "unknown setting 'prot'; did you mean 'port'?"),
        ("something: 1", "unknown setting 'something'"),
        ("config: other.yaml", "unknown setting 'config'"),
        ("help: true", "unknown setting 'help'"),
        ("port: many", "valid integer"),
        ("port: 80.5", "got 80.5"),
        ("port: true", "got True"),
        ("overlap: 7", "overlap: "),
        ("port: [1, 2]", "port takes one value, got a list"),
        ("api_key: {a: b}", "must be a plain value"),
        ("port: 1\nport: 2", "'port' occurs twice"),
        ("max-num-seqs: 1\nmax_num_seqs: 2", "occurs twice"),
        ("- port", "must be a mapping"),
        ("1: 2", "must be a mapping"),
        ("a: [", "is not YAML"),
        ("port: 70000", "port must be between 0 and 65535"),
        ("!!python/object/apply:os.system ['true']", "is not YAML"),
    ],
)
def test_a_file_with_a_mistake_is_one_line_that_names_it(served, tmp_path, text, words):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    result = serve("--config", str(path))
    assert result.exit_code == 2 and served == []
    assert result.stderr.startswith("error: ") and words in result.stderr


def test_a_file_may_be_empty_spell_names_with_dashes_and_say_null(served, tmp_path):
    path = tmp_path / "c.yaml"
    for text in ("", "# nothing\n", "max-num-seqs: 5\nport: null\napi-key: one\n"):
        path.write_text(text)
        assert serve("--config", str(path)).exit_code == 0
    assert setting(served, "max_num_seqs") == 5 and setting(served, "port") == 8000
    assert setting(served, "api_key") == ("one",)


def test_a_file_that_is_not_there_is_named(served, tmp_path):
    result = serve("--config", str(tmp_path / "none.yaml"))
    assert result.exit_code == 2 and "none.yaml cannot be read" in result.stderr


def test_a_bad_variable_is_refused_and_named(served):
    result = serve(env={"JAXINFER_PORT": "many"})
    assert result.exit_code == 2 and "port" in result.stderr and served == []


@pytest.mark.parametrize("command", ["serve", "run-batch"])
def test_help_names_the_variable_of_every_flag(command: str):
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).stdout
    words = shown.replace("\n", " ").split()
    flags = {word.rstrip(",") for word in words if word.startswith("--") and len(word) > 2}
    flags -= {"--help", "--input", "--output"}
    flags = {flag for flag in flags if not flag.startswith("--no-")}
    assert len(flags) > 20
    missing = [f for f in flags if f"JAXINFER_{f[2:].replace('-', '_').upper()}" not in shown]
    assert not missing


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", -1),
        ("max_body_bytes", 0),
        ("request_timeout_s", 0.0),
        ("drain_timeout_s", -1.0),
        ("pooling", "max"),
        ("log_format", "xml"),
        ("metrics_prefix", "x"),
        ("ssl_keyfile", "key.pem"),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(name: str, value: Any):
    with pytest.raises(ValueError, match=name):
        ServerOptions(**{name: value})


def test_whole_batches_take_whole_steps_unless_told_otherwise():
    assert EngineConfig(max_num_batched_tokens=300).for_throughput().max_num_mixed_tokens == 300
    assert EngineConfig(max_num_mixed_tokens=40).for_throughput().max_num_mixed_tokens == 40
