"""Run by `test_shard_loading`: a process that loads a model onto its own devices."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import numpy as np

STATUS = Path("/proc/self/status")


def peak_bytes() -> int:
    """Return the most memory that this process has held since `reset_peak`."""
    (line,) = (x for x in STATUS.read_text().splitlines() if x.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def reset_peak() -> int:
    """Forget earlier peaks; return what the process holds now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def main(folder: str, address: str, index: int, count: int) -> None:
    """Load, and print what it took."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(
        address, num_processes=count, process_id=index, initialization_timeout=60
    )
    from jaxinfer.model_source import ModelSource, abstract_model, load_model
    from jaxinfer.models import family_of, lay_out_heads
    from jaxinfer.sharding import make_mesh

    source = ModelSource.open(folder)
    config = lay_out_heads(family_of(source.config).translate(source.config), count)
    mesh = make_mesh(count)
    sizes = (source.checkpoint.info(name).nbytes for name in source.checkpoint.names())
    largest = max(sizes)
    # What the first use of JAX and Flax takes is not the load's.
    abstract_model(config, "bfloat16")
    jax.device_put(np.zeros(8, np.float32), jax.local_devices()[0])
    before = reset_peak()
    _, parameters = load_model(source, config, mesh, "bfloat16")
    jax.block_until_ready(parameters)
    report = {
        "taken": peak_bytes() - before,
        "held": sum(
            shard.data.nbytes for x in parameters.values() for shard in x.addressable_shards
        ),
        "whole": sum(x.nbytes for x in parameters.values()),
        "largest": largest,
        "shards": sorted({len(x.addressable_shards) for x in parameters.values()}),
    }
    sys.stdout.write(json.dumps(report))
    sys.stdout.flush()
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
