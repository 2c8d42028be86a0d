"""Run a transformers model, whatever its family, and say how far to trust the result.

It knows torch and transformers; it knows no family, no seed and no file of a golden. Where
`reference.py` trusts the cached run, this one extends every transcript by whole uncached forward
passes, which alone are well defined where RoPE's frequencies depend on the length.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import spec
import torch
import transformers
import weights
from reference import Run


def load_folder(directory: Path, change: dict[str, Any] | None = None, strict: bool = True):
    """Load in float32 with eager attention, `config.json` changed by `change`."""
    config = transformers.AutoConfig.from_pretrained(directory)
    if change:
        document = weights.json.loads((directory / "config.json").read_text())
        config = weights.make_config(spec.changed(document, change))
    more = {}
    if getattr(config, "quantization_config", None):
        more["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        directory,
        config=config,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
        **more,
    )
    if strict:
        wrong = {kind: names for kind, names in info.items() if names}
        assert not wrong, f"{directory.name}: {wrong}"
    return model.to(torch.float32).eval()


@torch.no_grad()
def run(model, prompt: list[int], num_new_tokens: int) -> Run:
    """Run `prompt`, then extend it greedily, the whole sequence anew for each token."""
    logits, hidden_states = _forward_with_hidden_states(model, prompt)
    ids, last = list(prompt), logits[-1]
    greedy, margins = [], []
    for _ in range(num_new_tokens):
        top = last.topk(2)
        greedy.append(int(top.indices[0]))
        margins.append(float(top.values[0] - top.values[1]))
        ids.append(greedy[-1])
        last = forward(model, ids)[-1]
    return Run(
        logits=logits.numpy().copy(),
        greedy=np.asarray(greedy, np.int32),
        margins=np.asarray(margins, np.float32),
        hidden_states=hidden_states.numpy().copy(),
    )


@torch.no_grad()
def forward(model, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids]), use_cache=False).logits[0]


@torch.no_grad()
def token_by_token(model, ids: list[int]) -> np.ndarray:
    """Return `[T, V]` of a run with a cache, one token at a time."""
    # Made with the configuration, a cache holds windows where layers have them.
    cache = transformers.DynamicCache(config=model.config)
    rows = [model(torch.tensor([[i]]), use_cache=True, cache=cache).logits[0, 0] for i in ids]
    return torch.stack(rows).numpy()


def _forward_with_hidden_states(model, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    base = model.base_model
    layers = base.h if hasattr(base, "h") else base.layers
    streams: list[torch.Tensor] = []

    def keep(_, __, y):
        streams.append((y[0] if isinstance(y, tuple) else y)[0])

    hooks = [layers[0].register_forward_pre_hook(lambda _, args: streams.append(args[0][0]))]
    hooks += [layer.register_forward_hook(keep) for layer in layers]
    logits = forward(model, ids)
    for hook in hooks:
        hook.remove()
    return logits, torch.stack(streams)


@contextlib.contextmanager
def routing_gaps() -> Iterator[list[float]]:
    """Collect how far the last chosen was above the first not chosen, for each top-k of a router.

    A gap within the rounding of float32 would let another program choose other experts.
    """
    gaps: list[float] = []
    plain, method = torch.topk, torch.Tensor.topk

    def note(a: torch.Tensor, k: int) -> None:
        if k < a.shape[-1]:
            top = method(a, k + 1, dim=-1).values
            gaps.append(float((top[..., k - 1] - top[..., k]).min()))

    def watched(a, k, *args, **kwargs):
        if a.ndim > 1:
            note(a, k)
        return plain(a, k, *args, **kwargs)

    torch.topk = torch.Tensor.topk = watched
    try:
        yield gaps
    finally:
        torch.topk, torch.Tensor.topk = plain, method
