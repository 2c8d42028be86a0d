"""Compiling the kernels: once, whole or not at all, and with a reason where it cannot be."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.cpu_kernels import BuildError, build
from jaxinfer.errors import ConfigError
from jaxinfer.resolution import resolve
from tests.engines import config_of

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, build.COMPILERS)), reason="there is no C++ compiler"
)

SETTINGS = {"max_model_len": 64, "num_pages": 16}

# Notes that it ran, takes its time, and makes an empty file of what it was asked for.
FAKE_COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "fake 1.0"; exit; fi
case "$*" in *-shared*) echo linked >> "$0.log"; sleep 0.3;; esac
while [ $# -gt 1 ]; do if [ "$1" = -o ]; then : > "$2"; fi; shift; done
"""

BUILD_WITH_FAKE = """
import sys
from jaxinfer.cpu_kernels import build
build.COMPILERS = (sys.argv[1],)
compiler = build.find_compiler()
sys.stdout.write(str(build.cached_library(compiler, build.digest_of(compiler))))
"""


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    build.load_library.cache_clear()
    yield
    build.load_library.cache_clear()


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_plain_xla_serves_and_one_line_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert resolve(EngineConfig(**SETTINGS), config_of("llama3")).kernels == "xla"
    (line,) = [record.getMessage() for record in caplog.records]
    assert "there is no C++ compiler" in line


@pytest.mark.usefixtures("no_compiler")
def test_kernels_that_were_asked_for_are_not_silently_left_out() -> None:
    with pytest.raises(ConfigError, match=r"no C\+\+ compiler"):
        resolve(EngineConfig(kernels="cpu", **SETTINGS), config_of("llama3"))


def test_nothing_is_compiled_where_none_are_wanted(no_compiler: None) -> None:
    assert resolve(EngineConfig(kernels="xla", **SETTINGS), config_of("llama3")).kernels == "xla"


def test_what_the_compiler_says_is_passed_on(tmp_path: Path) -> None:
    broken = tmp_path / "broken.cc"
    broken.write_text("int main() { return nothing; }")
    compiler = build.find_compiler()
    with pytest.raises(BuildError, match="nothing"):
        build.run([compiler, "-c", str(broken), "-o", str(tmp_path / "broken.o")])


def test_processes_that_start_at_once_compile_once(tmp_path: Path) -> None:
    compiler = tmp_path / "fake-compiler"
    compiler.write_text(FAKE_COMPILER)
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    command = [sys.executable, "-c", BUILD_WITH_FAKE, str(compiler)]
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    processes = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    paths = {process.communicate(timeout=120)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    (path,) = paths
    assert Path(path).is_file()
    assert (tmp_path / "fake-compiler.log").read_text() == "linked\n"


def test_a_home_that_cannot_be_written_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_the_way = tmp_path / "cache"
    in_the_way.write_text("a file where a folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(in_the_way))
    monkeypatch.setattr(build.tempfile, "tempdir", str(tmp_path))
    assert build.cache_dir().parent == tmp_path


def test_other_flags_make_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = build.find_compiler()
    before = build.digest_of(compiler)
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    assert build.digest_of(compiler) != before


def test_auto_is_bfloat16_where_the_kernels_run() -> None:
    def resolved(**settings: str) -> tuple[str, str, str]:
        config = resolve(EngineConfig(**SETTINGS, **settings), config_of("llama3"))
        return config.dtype, config.kv_cache_dtype, config.kernels

    assert resolved() == ("bfloat16", "bfloat16", "cpu")
    assert resolved(quantization="int8") == ("bfloat16", "bfloat16", "cpu")
    assert resolved(dtype="float32") == ("float32", "float32", "cpu")
    assert resolved(kv_cache_dtype="float32") == ("float32", "float32", "cpu")
    # Plain XLA multiplies thin batches of bfloat16 many times slower than float32.
    assert resolved(kernels="xla") == ("float32", "float32", "xla")
    assert resolved(kv_cache_dtype="int8") == ("float32", "int8", "xla")


def test_auto_is_float32_without_a_compiler(no_compiler: None) -> None:
    assert resolve(EngineConfig(**SETTINGS), config_of("llama3")).dtype == "float32"
