"""`/metrics`: vLLM's names, zeros from the start, numbers that follow what happened."""

from __future__ import annotations

import dataclasses

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxinfer.metrics import EngineStats
from jaxinfer.server.engine_metrics import ENGINE_SERIES
from tests.server.fakes import NAME, REPLY

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
