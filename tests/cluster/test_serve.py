"""Two replicas on Ray Serve: what a lost one costs, and what placing by prefix gains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="the extra `ray` is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]


def run(module: str, *args: str) -> dict:
    """Run a module in a process of its own, for Ray leaves threads behind; return its report."""
    process = subprocess.run(
        [sys.executable, "-m", module, *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_raylet_start_wait_time_s": "300",
        },
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def report() -> dict:
    return run("tests.cluster.drive_serve")


def test_a_replica_that_is_killed_fails_its_own_requests_and_they_may_be_sent_again(report):
    killed = report["killed"]
    assert killed["replicas"] == 2
    # 40 were under way, half of them there; all others were answered, and rightly.
    assert 1 <= len(killed["failed"]) <= 30
    for status, retry_after, message in killed["failed"]:
        assert status == 503 and retry_after and "the same request may succeed" in message
    assert killed["texts"] == ["Grüße, Wö"]
    assert set(killed["again"]) == {200}


def test_the_whole_api_goes_through_the_front(report):
    pages = report["pages"]
    assert pages["models"] == "tiny" and pages["bad"] == [400, "max_tokens"]
    assert pages["kind"].startswith("text/event-stream") and pages["end"] == "data: [DONE]"
    assert len(pages["request_id"].split(",")) == 1


def test_placing_by_prefix_finds_more_in_the_caches_than_round_robin(report):
    assert report["prefix"] > report["round-robin"] + 0.1


def test_replicas_grow_with_the_queue_and_are_replaced_without_a_lost_request(report):
    scaled = report["scaled"]
    assert scaled["before"] == 1 and scaled["grown"] == 2
    assert scaled["after"] >= scaled["grown"] + 2  # new processes with the new settings
    assert scaled["statuses"] == [200]
