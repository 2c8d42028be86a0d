"""`/metrics`: vLLM's names, zeros from the start, numbers that follow what happened."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxinfer.metrics import EngineStats
from jaxinfer.runner_config import RunnerConfig
from jaxinfer.server.engine_metrics import ENGINE_SERIES
from jaxinfer.server.options import METRICS_PREFIXES, ServerOptions
from tests.server.fakes import NAME, REPLY, make_loaded
from tests.server.serving import running_server

pytestmark = pytest.mark.timeout(60)

# What dashboards and autoscalers of vLLM read, as far as it exists here.
COUNTERS = [
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:corrupted_requests_total",
    "jaxinfer_compilations_after_warmup_total",
    "jaxinfer_compilations_total",
    "jaxinfer_step_tokens_total",
    "jaxinfer_padding_tokens_total",
    "jaxinfer_step_host_seconds_total",
    "jaxinfer_step_device_seconds_total",
    *(f"vllm:request_success_total/{r}" for r in ("stop", "length", "abort", "error")),
    *(
        f"vllm:prompt_tokens_by_source_total/{source}"
        for source in ("local_compute", "local_cache_hit")
    ),
]
GAUGES = [
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_requests_waiting_by_reason/capacity",
    "vllm:kv_cache_usage_perc",
    "vllm:engine_sleep_state/discard_all",
]
HISTOGRAMS = [
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_inference_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:request_max_num_generation_tokens",
    "vllm:request_params_max_tokens",
    "vllm:request_params_n",
    "vllm:request_prefill_kv_computed_tokens",
    "vllm:iteration_tokens_total",
]


def test_everything_is_zero_before_the_first_request(own_server):
    own_server.load()
    series = own_server.series()
    assert {name: series[name] for name in COUNTERS + GAUGES} == dict.fromkeys(
        COUNTERS + GAUGES, 0.0
    )
    assert {name: series[f"{name}_count"] for name in HISTOGRAMS} == dict.fromkeys(HISTOGRAMS, 0.0)
    assert series["http_requests_total//v1/completions/POST/2xx"] == 0


def test_numbers_follow_a_request(own_server):
    own_server.load()
    body = {"prompt": ["Hello", "World"], "n": 2, "seed": 1, "max_tokens": 100}
    usage = own_server.post("/v1/completions", body).json()["usage"]
    series = own_server.series()
    assert series["vllm:prompt_tokens_total"] == 2 * usage["prompt_tokens"]  # per sample
    assert series["vllm:generation_tokens_total"] == usage["completion_tokens"]
    assert series["vllm:request_success_total/stop"] == 4
    assert series["vllm:request_success_total/length"] == 0
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_params_n"):
        assert series[f"vllm:{name}_count"] == 2
    assert series["vllm:request_params_n_sum"] == 4
    assert series["vllm:request_params_max_tokens_sum"] == 200
    assert series["vllm:request_generation_tokens_count"] == 4
    assert series["vllm:request_generation_tokens_sum"] == usage["completion_tokens"]
    assert series["vllm:inter_token_latency_seconds_count"] > len(REPLY)
    assert series["vllm:request_prompt_tokens_sum"] == usage["prompt_tokens"]
    assert series["http_requests_total//v1/completions/POST/2xx"] == 1


def test_every_engine_counter_is_exported():
    exported = {series.field for series in ENGINE_SERIES} | {"finished", "tokens_per_step"}
    assert exported == {field.name for field in dataclasses.fields(EngineStats)}


def test_format_labels_and_trailing_slash(server):
    for path in ("/metrics", "/metrics/"):
        response = server.http.get(path)
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {f.name: f for f in text_string_to_metric_families(response.text)}
    [sample] = families["vllm:num_requests_running"].samples
    assert sample.labels == {"model_name": NAME, "engine": "0"}
    assert families["vllm:prompt_tokens"].type == "counter"
    assert "vllm:time_to_first_token_seconds" in families
    [info] = families["vllm:cache_config_info"].samples
    assert info.value == 1 and info.labels["block_size"] == "16"
    assert info.labels["num_gpu_blocks"] == "2048"


def test_paths_that_clients_invent_share_one_label(server):
    for i in range(20):
        server.http.get(f"/nothing/{i}")
        server.http.get(f"/v1/models/{i}")
        server.http.request("BREW", f"/{i}")
    names = [name for name in server.series() if name.startswith("http_requests_total")]
    assert not any("nothing" in name or "BREW" in name for name in names)
    assert server.series()["http_requests_total//v1/models/{model:path}/GET/4xx"] >= 20
    assert server.series()["http_requests_total/other/other/4xx"] >= 40


def test_metrics_answer_while_the_model_loads(own_server):
    assert own_server.http.get("/metrics").status_code == 200


def test_the_prefix_is_a_setting_and_changes_vllms_names_only(own_server):
    with running_server(ServerOptions(metrics_prefix="jaxinfer")) as other:
        names = []
        for server in (own_server, other):
            server.load()
            server.assert_works()
            names.append({name for name in server.series() if not name.startswith("process")})
    theirs, ours = names
    assert not any(name.startswith("vllm:") for name in ours)
    assert {name.replace("vllm:", "jaxinfer:") for name in theirs} == ours
    assert other.state.options.metrics_prefix == "jaxinfer"


def test_every_token_and_row_of_a_step_is_work_or_padding(own_server):
    own_server.load(max_num_seqs=8, enable_prefix_caching=False)
    body = {"prompt": ["Hello there"] * 3, "temperature": 0, "max_tokens": 5, "ignore_eos": True}
    usage = own_server.post("/v1/completions", body).json()["usage"]
    own_server.assert_idle()
    series = own_server.series()
    # The last token of a sequence is never computed: nothing comes after it.
    computed = usage["prompt_tokens"] + usage["completion_tokens"] - 3
    assert series["jaxinfer_step_tokens_total"] == computed
    assert series["jaxinfer_step_rows_total"] == usage["completion_tokens"]
    num_steps = series["jaxinfer_steps_total"]
    padded_tokens = computed + series["jaxinfer_padding_tokens_total"]
    padded_rows = usage["completion_tokens"] + series["jaxinfer_padding_rows_total"]
    assert computed < padded_tokens <= 256 * num_steps
    assert usage["completion_tokens"] < padded_rows <= 8 * num_steps
    assert series["vllm:iteration_tokens_total_count"] == num_steps
    assert series["vllm:iteration_tokens_total_sum"] == computed
    assert series["vllm:iteration_tokens_total_bucket/+Inf"] == num_steps
    assert series["vllm:iteration_tokens_total_bucket/8.0"] < num_steps


def test_time_of_steps_is_split_into_host_and_device(own_server):
    own_server.load()
    fetch, pause = own_server.runner.fetch, threading.Event()

    def slow_fetch(plan, step):
        pause.wait(0.02)
        return fetch(plan, step)

    own_server.runner.fetch = slow_fetch
    own_server.assert_works()
    own_server.assert_idle()
    series = own_server.series()
    waited_s = series["jaxinfer_step_device_seconds_total"]
    assert waited_s >= 0.02 * series["jaxinfer_steps_total"]
    assert 0 < series["jaxinfer_step_host_seconds_total"] < waited_s


def test_buckets_are_those_that_the_runner_pads_to():
    config = RunnerConfig(
        max_num_seqs=24,
        max_num_batched_tokens=300,
        max_model_len=64,
        num_pages=16,
        page_size=16,
        max_logprobs=1,
        dtype="float32",
    )
    engine = make_loaded(max_num_seqs=24, max_num_batched_tokens=300).engine
    assert engine._token_buckets == config.token_buckets
    assert engine._row_buckets == config.row_buckets
    engine.close()


DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "jaxinfer.json"


@pytest.mark.parametrize("prefix", METRICS_PREFIXES)
def test_every_name_on_the_dashboard_is_exported(prefix: str):
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [t["expr"] for p in dashboard["panels"] for t in p.get("targets", ())]
    [model] = [v["query"] for v in dashboard["templating"]["list"] if v["name"] == "model"]
    assert len(expressions) > 30
    with running_server(ServerOptions(metrics_prefix=prefix)) as server:
        server.load()
        text = server.http.get("/metrics").text
    samples = [s for f in text_string_to_metric_families(text) for s in f.samples]
    labels = {name: {k for s in samples if s.name == name for k in s.labels} for name in {
        s.name for s in samples
    }}  # fmt: skip
    for expression in [*expressions, model]:
        plain = expression.replace("${prefix}", prefix).replace("[$__rate_interval]", "")
        outside_by = re.sub(r"by \([a-z_, ]+\)", "", plain)
        names = re.findall(r"[a-z_][a-z0-9_:]*(?=\{|\)|,|$)", outside_by)
        names = [n for n in names if n != "model_name"]
        assert names and set(names) <= set(labels), (expression, set(names) - set(labels))
        grouped = {
            g.strip() for by in re.findall(r"by \(([a-z_, ]+)\)", plain) for g in by.split(",")
        }
        for name in names:
            assert grouped <= labels[name], (expression, grouped)


def test_the_dashboard_shows_every_series_of_the_engine():
    shown = DASHBOARD.read_text().replace("${prefix}", "vllm")
    for series in ENGINE_SERIES:
        assert f"{series.name}{'_total' if series.counter else ''}" in shown, series.name
