"""Two simulated devices give the tokens of one, with the collectives that the design expects."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxinfer.errors import ConfigError
from jaxinfer.sharding import check_divisible, make_mesh
from tests.engines import loaded

ROOT = Path(__file__).parents[2]


def test_two_devices_give_the_tokens_of_one() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "tests.equivalence.two_devices"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    report = json.loads(process.stdout)
    assert report["two"] == report["one"]
    # Two sums a layer (attention output, MLP output) and one for the sharded embedding; no weight
    # is gathered and no activation moved.
    assert report["collectives"] == ["all-reduce"] * (2 * report["layers"] + 1)
    assert "tensor" in report["halved"]["layers.0.attention.qkv.kernel"]


def test_sizes_that_do_not_divide_are_all_named() -> None:
    _, config, _, _ = loaded("smollm2")  # 9 query and 3 KV heads
    with pytest.raises(ConfigError, match=r"num_attention_heads \(9\), num_key_value_heads \(3\)"):
        check_divisible(config, 2)


def test_more_devices_than_there_are_is_an_error() -> None:
    with pytest.raises(ConfigError, match="this process sees 1"):
        make_mesh(64)
