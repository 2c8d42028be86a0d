"""Two processes load one model: neither ever holds more than its half and one tensor."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROCESSES = 2

# The allocator's, and what Python objects take.
SLACK_BYTES = 16 * 2**20

D, F, V, LAYERS, N = 1024, 4096, 16_384, 6, 8
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": D,
    "intermediate_size": F,
    "num_attention_heads": N,
    "num_key_value_heads": N,
    "num_hidden_layers": LAYERS,
    "vocab_size": V,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of 224 MB of zeros, which take no place on the disk."""
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}self_attn.{x}_proj.weight": (D, D) for x in "qkvo"}
        shapes |= {f"{layer}mlp.{x}_proj.weight": (F, D) for x in ("gate", "up")}
        shapes[f"{layer}mlp.down_proj.weight"] = (D, F)
        shapes |= {f"{layer}{x}_layernorm.weight": (D,) for x in ("input", "post_attention")}
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells peaks")
def test_no_process_holds_more_than_its_shard_and_one_tensor(folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    module = "tests.equivalence.shard_loading"
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(folder), address, str(i), str(PROCESSES)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(PROCESSES)
    ]
    try:
        answers = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (output, errors) in zip(processes, answers, strict=True):
        assert process.returncode == 0, errors
        report = json.loads(output)
        assert report["shards"] == [1]
        assert report["held"] < 0.51 * report["whole"]
        bound = report["held"] + report["largest"] + SLACK_BYTES
        assert bound < 0.8 * report["whole"], "the bound would not notice a whole load"
        assert report["taken"] <= bound, (bound, report)
