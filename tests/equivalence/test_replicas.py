"""Two replicas of two devices each give the tokens of one device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.errors import ConfigError
from jaxinfer.loading import load, load_replicas

ROOT = Path(__file__).parents[2]


def test_two_replicas_of_two_devices_give_the_tokens_of_one() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "tests.equivalence.two_replicas"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    report = json.loads(process.stdout)
    assert report["two"] == report["one"]
    assert report["devices"] == [[0, 1], [2, 3]]
    assert min(report["used"]) > 0 and report["pages"] == [64, 64]


def test_more_replicas_than_devices_is_an_error() -> None:
    with pytest.raises(ConfigError, match="each need 6; this process sees 1"):
        load_replicas(EngineConfig(data_parallel_size=3, tensor_parallel_size=2))


def test_a_face_of_one_engine_refuses_several() -> None:
    with pytest.raises(ConfigError, match="data_parallel_size=2 needs a face"):
        load(EngineConfig(data_parallel_size=2))
