"""`jaxinfer run-batch`: every line answered exactly once, whatever ends the runs before."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from jaxinfer import loading
from jaxinfer.cli import app
from jaxinfer.server.batch_file import BatchFileError, BatchOutput
from jaxinfer.server.run_batch import BatchStoppedError, run_batch
from tests.server.fakes import REPLY, RecitingRunner, make_loaded
from tests.server.serving import wait_until

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).parents[2]
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100, "temperature": 0}


def request(custom_id: str, body: dict[str, Any] = CHAT, url: str = "/v1/chat/completions") -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def test_every_endpoint_answers_as_it_does_over_http(files):
    source, destination = files
    write(
        source,
        request("chat"),
        request("text", {"prompt": "Hi", "max_tokens": 100, "temperature": 0}, "/v1/completions"),
        "",
        request("vector", {"input": "Hi"}, "/v1/embeddings"),
    )
    end = run_batch(source, destination, make_loaded)
    assert (end.done, end.failed, end.total) == (3, 0, 3)
    answers = {entry["custom_id"]: entry for entry in read(destination)}
    assert all(entry["error"] is None for entry in answers.values())
    assert all(entry["response"]["status_code"] == 200 for entry in answers.values())
    assert all(entry["response"]["request_id"] for entry in answers.values())
    assert answers["chat"]["response"]["body"]["choices"][0]["message"]["content"] == REPLY
    assert answers["text"]["response"]["body"]["choices"][0]["text"] == REPLY
    assert len(answers["vector"]["response"]["body"]["data"][0]["embedding"]) == 4


def test_a_bad_line_is_an_error_of_its_own(files):
    source, destination = files
    bad = {
        "not-json": "{",
        "no-url": '{"custom_id": "no-url", "method": "POST", "body": {}}',
        "get": '{"custom_id": "get", "method": "GET", "url": "/v1/completions", "body": {}}',
        "stream": request("stream", {**CHAT, "stream": True}),
        "nan": '{"custom_id": "nan", "url": "/v1/completions", "body": {"temperature": NaN}}',
        "no-id": '{"url": "/v1/completions", "body": {"prompt": "Hi"}}',
        "list": "[]",
    }
    refused = request("refused", {"messages": [], "n": 0})
    write(source, *bad.values(), refused, request("good"))
    end = run_batch(source, destination, make_loaded)
    assert (end.done, end.failed) == (len(bad) + 2, len(bad) + 1)
    entries = {entry["id"].split("_")[2]: entry for entry in read(destination)}
    for number, name in enumerate(bad, start=1):
        error = entries[str(number)]["error"]
        assert error["code"] == "invalid_line" and f"line {number}: " in error["message"], name
        assert entries[str(number)]["response"] is None
    answers = {entry["custom_id"]: entry["response"] for entry in entries.values()}
    assert answers["refused"]["status_code"] == 400
    assert answers["refused"]["body"]["error"]["param"] == "messages"
    assert answers["good"]["status_code"] == 200


# A whole process; it gets the two files as arguments.
SCRIPT = """
import sys
from pathlib import Path
from jaxinfer.server.run_batch import run_batch
from tests.server.fakes import RecitingRunner, make_loaded

def load():
    runner = RecitingRunner()
    runner.step_s = 0.002
    return make_loaded(runner, max_num_seqs=4)

run_batch(Path(sys.argv[1]), Path(sys.argv[2]), load)
"""


def test_kill_9_in_the_middle_loses_and_repeats_nothing(files):
    source, destination = files
    ids = [f"request-{i}" for i in range(200)]
    write(source, *map(request, ids))
    for num_lines in (10, 60):
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(source), str(destination)],
            cwd=ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        try:
            wait_until(
                lambda n=num_lines: (
                    destination.exists() and destination.read_bytes().count(b"\n") >= n
                ),
                timeout_s=40,
            )
            assert process.poll() is None, "it was too fast to be killed in the middle"
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(10)
    assert len(destination.read_bytes().splitlines()) < len(ids)
    end = run_batch(source, destination, make_loaded)
    assert (end.done, end.failed) == (len(ids), 0)
    assert sorted(entry["custom_id"] for entry in read(destination)) == sorted(ids)


def test_wherever_the_output_was_cut_the_next_run_completes_it(files):
    source, destination = files
    ids = ["a", "b", "c"]
    write(source, *map(request, ids))
    run_batch(source, destination, make_loaded)
    whole = destination.read_bytes()
    for cut in range(0, len(whole) + 1, 97):
        destination.write_bytes(whole[:cut])
        run_batch(source, destination, make_loaded)
        assert sorted(entry["custom_id"] for entry in read(destination)) == ids, cut


def test_a_batch_that_is_done_loads_no_model(files):
    source, destination = files
    write(source, request("a"))
    run_batch(source, destination, make_loaded)
    before = destination.read_bytes()

    def load() -> None:
        raise AssertionError("loaded")

    assert run_batch(source, destination, load).done == 1
    assert destination.read_bytes() == before


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([request("a"), request("b"), request("a")], "lines 1 and 3 have the same custom_id 'a'"),
        ([], "holds no request"),
        (None, "cannot be read"),
    ],
)
def test_an_input_that_cannot_be_told_apart_is_refused_whole(files, lines, words):
    source, destination = files
    if lines is not None:
        write(source, *lines)
    with pytest.raises(BatchFileError, match=words):
        run_batch(source, destination, make_loaded)
    assert not destination.exists()


def test_an_output_of_another_input_is_left_alone(files):
    source, destination = files
    write(source, request("a"))
    for content, words in (
        ('{"id": "batch_req_1_0000", "custom_id": "a", "response": null}\n', "not in the input"),
        ("something else\n", "is no answer of a batch"),
    ):
        destination.write_text(content)
        with pytest.raises(BatchFileError, match=words):
            run_batch(source, destination, make_loaded)
        assert destination.read_text() == content
    destination.unlink()
    run_batch(source, destination, make_loaded)
    write(source, request("a", {**CHAT, "max_tokens": 3}))  # edited, with the same custom_id
    with pytest.raises(BatchFileError, match="has changed since"):
        run_batch(source, destination, make_loaded)


def test_two_runs_cannot_write_the_same_file(files):
    source, destination = files
    write(source, request("a"))
    with (
        BatchOutput(destination, ()),
        pytest.raises(BatchFileError, match="another run"),
    ):
        run_batch(source, destination, make_loaded)


def test_an_engine_that_breaks_stops_the_run_and_spoils_no_line(files):
    source, destination = files
    ids = [f"request-{i}" for i in range(40)]
    write(source, *map(request, ids))
    runner = RecitingRunner()
    loaded = make_loaded(runner, max_num_seqs=2)

    def break_later(progress: Any) -> None:
        if progress.done == 5:
            runner.error = RuntimeError("the device is gone")

    with pytest.raises(BatchStoppedError, match="same command again"):
        run_batch(source, destination, lambda: loaded, on_progress=break_later)
    entries = read(destination)
    assert 5 <= len(entries) < len(ids)
    assert all(entry["response"]["status_code"] == 200 for entry in entries)
    assert run_batch(source, destination, make_loaded).done == len(ids)
    assert sorted(entry["custom_id"] for entry in read(destination)) == sorted(ids)


def test_the_command_tells_how_it_went(files, monkeypatch):
    source, destination = files
    monkeypatch.setattr(loading, "load", lambda config, progress: make_loaded())
    write(source, request("a"), request("b", {"messages": []}))
    args = ["run-batch", "-i", str(source), "-o", str(destination)]
    result = CliRunner().invoke(app, args, catch_exceptions=False)
    assert result.exit_code == 1
    assert result.stdout == f"wrote {destination}: 2 answers, 1 of them errors\n"
    write(source, request("a"))
    result = CliRunner().invoke(app, args, catch_exceptions=False)
    assert result.exit_code == 2 and "not in the input" in result.stderr
