"""The benchmarks themselves on a tiny model: that they run, and say what they did."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jaxinfer import loading
from jaxinfer.bench.report import write_report
from jaxinfer.bench.scheduler import run_scheduler
from jaxinfer.bench.server_process import engine_flags
from jaxinfer.cli import app
from jaxinfer.config import EngineConfig
from tests.engines import GOLDEN

TINY = ("--model", str(GOLDEN / "smollm2"), "--kernels", "xla", "--num-pages", "64")
FEW = (*TINY, "--max-num-batched-tokens", "2", "--num-decode-steps", "1")


def run(*args: str) -> str:
    result = CliRunner().invoke(app, ["bench", *args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def offline(tmp_path_factory) -> tuple[str, dict]:
    """Return table and figures of one run, with as few programs as can be."""
    out = tmp_path_factory.mktemp("offline") / "out.json"
    args = ["--json", str(out), "--prompt-tokens", "6", "--new-tokens", "4", "--repeats", "1"]
    load = loading.load
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "load", lambda c: load(replace(c, max_num_batched_tokens=2), False))
        table = run("offline", *TINY, "--batch", "1,2", "--num-decode-steps", "2", *args)
    return table, json.loads(out.read_text())


def test_offline_measures_each_batch(offline):
    table, result = offline
    assert [point["batch"] for point in result["points"]] == [1, 2]
    for point in result["points"]:
        assert point["prefill_tok_s"]["median"] > 0
        assert f"| {point['batch']} | " in table
        assert point["decode_of_read_rate"] > 0
    assert result["settings"]["num_decode_steps"] == 2
    assert result["settings"]["enable_prefix_caching"] is False
    assert result["ceilings"]["product_gop_s"] > 1


def test_the_page_holds_every_figure_and_needs_no_network(offline, tmp_path: Path):
    pytest.importorskip("plotly")
    _, result = offline
    write_report(tmp_path / "page.html", [result])
    page = (tmp_path / "page.html").read_text()
    assert result["machine"]["device"] in page
    assert page.count("Plotly.newPlot(") >= 3
    # Whatever the plotting code could fetch, nothing here asks it to.
    markup = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"<(link|img|iframe)|\bsrc\s*=", markup)
    assert not re.search(r"<script[^>]+src", page)


def test_a_page_takes_every_kind_of_result(tmp_path: Path):
    pytest.importorskip("plotly")
    result = run_scheduler(num_requests=2, prompt_tokens=4, num_steps=3)
    write_report(tmp_path / "page.html", [result])
    assert "schedule" in (tmp_path / "page.html").read_text()


def test_the_parts_of_a_step_add_up():
    parts = run_scheduler(num_requests=4, prompt_tokens=20, num_steps=1)["parts"]
    sum_us = parts.pop("sum")["wall_us"]
    assert set(parts) == {"schedule", "pack", "update"}
    assert sum_us == pytest.approx(sum(part["wall_us"] for part in parts.values()))


@pytest.mark.parametrize("batch", ["", "0", "1,x"])
def test_batches_are_whole_numbers(batch):
    result = CliRunner().invoke(app, ["bench", "offline", "--batch", batch])
    assert result.exit_code == 2 and "whole numbers" in result.output


def test_a_servers_flags_are_what_differs_from_the_defaults():
    config = EngineConfig(dtype="bfloat16", max_num_seqs=4, overlap=False)
    flags = engine_flags(config)
    assert flags == ["--dtype", "bfloat16", "--max-num-seqs", "4", "--no-overlap"]


@pytest.mark.slow
def test_a_later_start_is_measured_beside_the_first(tmp_path: Path):
    out = tmp_path / "out.json"
    run("startup", *FEW, "--max-num-seqs", "1", "--repeats", "1", "--json", str(out))
    first, later = json.loads(out.read_text())["points"]
    for point in (first, later):
        parts = ("python_s", "import_s", "load_s", "generate_s")
        assert point["first_token_s"] == pytest.approx(sum(point[p] for p in parts), rel=0.05)
        assert point["surprises"] == 0


@pytest.mark.slow
def test_a_server_is_started_loaded_and_ended(tmp_path: Path):
    out = tmp_path / "out.json"
    work = ("--requests", "4", "--prompt-tokens", "6", "--new-tokens", "3", "--text-prompts")
    run("serve", *FEW, "--max-num-seqs", "2", *work, "--concurrency", "2", "--json", str(out))
    (server,) = json.loads(out.read_text())["servers"]
    assert server["name"] == "jaxinfer" and server["failed"] == 0
    assert server["requests"] == 4
