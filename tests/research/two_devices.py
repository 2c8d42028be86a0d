"""Run by `test_capture` in a process of its own: the device count is fixed at start-up."""

from __future__ import annotations

import json
import sys

import jax

jax.config.update("jax_num_cpu_devices", 2)


def main() -> None:
    """Print what two devices capture, and the logits under an ablation."""
    from jaxinfer import LLM, edits
    from jaxinfer.sampling_params import SamplingParams
    from tests.research.models import folder_of, prompt_of

    names = [f"layers.1.{x}" for x in ("resid_mid", "attn_heads", "attn_weights", "mlp_hidden")]
    ids = prompt_of("llama3")
    one = SamplingParams(temperature=0.0, max_tokens=1)
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "num_pages": 32, "page_size": 8}
    settings |= {"max_model_len": 128, "warmup": False, "compilation_cache_dir": ""}
    with LLM(folder_of("llama3"), tensor_parallel_size=2, **settings) as llm:
        cut = edits.ablate("layers.0.attn_heads", 1)
        seen, ablated = llm.generate(
            [ids] * 2, one, capture=[*names, "logits"], positions="prompt", edits=[None, cut]
        )
    report = {name: values.tolist() for name, values in seen.captures.items() if name != "logits"}
    report |= {"devices": len(jax.devices()), "ablated": ablated.captures["logits"].tolist()}
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
