"""Run the reference implementation, transformers on torch in float32 with eager attention.

It knows how to load a model from a folder or a GGUF file and what a golden holds for each prompt;
it knows no file format of its own and no jaxinfer. Only `generate.py` imports it, in its own
environment.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from smollm2_folder import hf_config, read_metadata, read_weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What the reference says of one prompt.

    Attributes:
        logits: `[T, V]`, float32.
        greedy: The tokens that follow, always the most likely one, end-of-turn ids not heeded.
        margins: `[len(greedy)]`: how far the winner's logit is above the second.
        hidden_states: `[L + 1, T, D]`: the embedding, then what each layer leaves, before the
            final norm.
    """

    logits: np.ndarray
    greedy: np.ndarray
    margins: np.ndarray
    hidden_states: np.ndarray


def load_folder(directory: Path):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def load_gguf(file: Path, config: dict[str, Any] | None = None):
    """Load a GGUF file's dequantized weights; `config` is read from its metadata when None."""
    reader = gguf.GGUFReader(file)
    config = config or hf_config(reader, read_metadata(reader))
    config = transformers.LlamaConfig(**config, attn_implementation="eager")
    model = transformers.LlamaForCausalLM(config).to(torch.float32)
    weights = {name: torch.from_numpy(a.copy()) for name, a in read_weights(reader)}
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, strict=True)
    return model.eval()


@torch.no_grad()
def run(model, prompt: list[int], num_new_tokens: int) -> Run:
    """Run `prompt`, extend it greedily with a cache, and check the result without one."""
    ids = torch.tensor([prompt])
    # A None in the call's own configuration would be filled in from the model's.
    model.generation_config = transformers.GenerationConfig(eos_token_id=None)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=transformers.GenerationConfig(
            max_new_tokens=num_new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        ),
    )
    streams: list[torch.Tensor] = []
    keep_input = model.model.layers[0].register_forward_pre_hook(
        lambda _, args: streams.append(args[0][0])
    )
    hooks = [keep_input] + [
        layer.register_forward_hook(lambda _, __, y: streams.append(y[0]))
        for layer in model.model.layers
    ]
    logits = model(out, use_cache=False).logits[0]  # [T + new, V]
    for hook in hooks:
        hook.remove()
    T = len(prompt)
    top = logits[T - 1 : -1].topk(2)
    greedy = out[0, T:]
    assert len(greedy) == num_new_tokens
    # The cached run must agree with the uncached one; where it does not, the margin is no margin.
    assert torch.equal(top.indices[:, 0], greedy), "the reference disagrees with itself"
    return Run(
        logits=logits[:T].numpy().copy(),
        greedy=greedy.numpy().astype(np.int32),
        margins=(top.values[:, 0] - top.values[:, 1]).numpy(),
        hidden_states=torch.stack([x[:T] for x in streams]).numpy().copy(),
    )


def cross_check(file: Path, model) -> float:
    """Return the largest difference of `model`'s weights from transformers' own GGUF loader's."""
    other = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    ).state_dict()
    mine = model.state_dict()
    assert mine.keys() == other.keys()
    return max((a - other[name]).abs().max().item() for name, a in mine.items())
