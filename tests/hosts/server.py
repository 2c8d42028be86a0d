"""One process of several that serve a tiny model: `python -m tests.hosts.server FOLDER JSON`.

The model has eight heads, so that each of eight devices holds one.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

GOLDEN = Path(__file__).parents[1] / "golden" / "models" / "llama3"
SETTINGS = {
    "dtype": "float32",
    "max_model_len": 96,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 4,  # few buckets, few programs
    "num_pages": 128,
    "num_decode_steps": 1,
    "page_size": 8,
}


def make_model(folder: Path) -> None:
    """Write a model like the golden `llama3`: eight KV heads instead of two, one layer only."""
    shutil.copytree(GOLDEN, folder)
    config = json.loads((folder / "config.json").read_text())
    config["num_key_value_heads"] = config["num_attention_heads"]
    config["num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    weights = {name: array for name, array in weights.items() if ".layers.1." not in name}
    groups = config["num_attention_heads"] // 2
    rng = np.random.default_rng(0)
    for name, array in weights.items():
        if "k_proj" in name or "v_proj" in name:
            noise = 0.1 * rng.standard_normal((groups * array.shape[0], array.shape[1]))
            wide = np.tile(array.astype(np.float32), (groups, 1)) + noise
            weights[name] = wide.astype(ml_dtypes.bfloat16)
    save_file(weights, folder / "model.safetensors")


def main(folder: str, more: str) -> None:
    """Serve; a process alone has all eight devices."""
    settings = {**SETTINGS, **json.loads(more)}
    jax.config.update("jax_num_cpu_devices", 8 // settings.get("num_hosts", 1))
    from jaxinfer.config import EngineConfig
    from jaxinfer.server.options import ServerOptions
    from jaxinfer.server.run import serve

    settings = {"tensor_parallel_size": 8, **settings}
    serve(EngineConfig(model=folder, **settings), ServerOptions(port=0, access_log=False))


if __name__ == "__main__":
    main(*sys.argv[1:])
