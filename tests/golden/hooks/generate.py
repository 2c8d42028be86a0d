"""Write what the reference implementation computes on the way, for tests of captures.

    /tmp/goldens/bin/python tests/golden/hooks/generate.py

The environment is that of `tests/golden/models/generate.py`. The reference is transformers in
float32 with eager attention; the checkpoints and the prompt are those of the other goldens.

    NAME.npz                   for each of `CHECKPOINTS`, the prompt `medium` [T]:
        resid_post             [L, T, D] float32, what each layer leaves
        resid_mid              [L, T, D], the stream between attention and feed-forward
        attn_in                [L, T, D], the normed stream that attention reads
        attn_heads             [L, T, N, H], before the output projection
        attn_weights           [L, N, T, T], as `output_attentions` gives them
        attn_out, mlp_out      [L, T, D], what is added to the stream
        mlp_hidden             [L, T, F], before the last projection
        ablated_logits         [T, V], with head 1 of layer 0 set to zero
        steered_logits         [T, V], with `linspace(-1, 1, D)` added behind layer 0
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent
CHECKPOINTS = {
    "llama3": (HERE.parent / "models", False),
    "qwen3": (HERE.parent / "families", False),
    "gemma2": (HERE.parent / "families", True),
}


def main() -> None:
    """Write one file for each checkpoint."""
    for name, (folder, post_norms) in CHECKPOINTS.items():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder / name, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        ids = torch.tensor(np.load(folder / f"{name}.npz")["medium_token_ids"])[None].long()
        arrays = record(model, ids, post_norms)
        np.savez_compressed(HERE / f"{name}.npz", **arrays)


@torch.no_grad()
def record(model, ids: torch.Tensor, post_norms: bool) -> dict[str, np.ndarray]:
    """Run the model once with hooks, and twice with an edit."""
    seen: dict[str, list[np.ndarray]] = {}

    def note(name):
        def output(module, args, out):
            out = out[0] if isinstance(out, tuple) else out
            seen.setdefault(name, []).append(out[0].numpy().copy())

        return output

    def note_input(name):
        return lambda module, args: seen.setdefault(name, []).append(args[0][0].numpy().copy())

    handles = []
    for layer in model.model.layers:
        handles += [
            layer.register_forward_hook(note("resid_post")),
            layer.input_layernorm.register_forward_hook(note("attn_in")),
            layer.self_attn.o_proj.register_forward_pre_hook(note_input("attn_heads")),
            layer.mlp.down_proj.register_forward_pre_hook(note_input("mlp_hidden")),
        ]
        if post_norms:
            handles += [
                layer.post_attention_layernorm.register_forward_hook(note("attn_out")),
                layer.post_feedforward_layernorm.register_forward_hook(note("mlp_out")),
                layer.pre_feedforward_layernorm.register_forward_pre_hook(note_input("resid_mid")),
            ]
        else:
            handles += [
                layer.self_attn.register_forward_hook(note("attn_out")),
                layer.mlp.register_forward_hook(note("mlp_out")),
                layer.post_attention_layernorm.register_forward_pre_hook(note_input("resid_mid")),
            ]
    out = model(ids, output_attentions=True)
    for handle in handles:
        handle.remove()
    arrays = {name: np.stack(values) for name, values in seen.items()}
    L, T, _ = arrays["attn_heads"].shape
    N = model.config.num_attention_heads
    arrays["attn_heads"] = arrays["attn_heads"].reshape(L, T, N, -1)
    arrays["attn_weights"] = np.stack([a[0].numpy() for a in out.attentions])

    H = arrays["attn_heads"].shape[-1]
    first = model.model.layers[0]

    def without_head(module, args):
        heads = args[0].clone()
        heads[..., H : 2 * H] = 0
        return (heads,)

    handle = first.self_attn.o_proj.register_forward_pre_hook(without_head)
    arrays["ablated_logits"] = model(ids).logits[0].numpy()
    handle.remove()

    def steered(module, args, out):
        vector = torch.linspace(-1, 1, model.config.hidden_size)
        return (out[0] + vector, *out[1:]) if isinstance(out, tuple) else out + vector

    handle = first.register_forward_hook(steered)
    arrays["steered_logits"] = model(ids).logits[0].numpy()
    handle.remove()
    return arrays


if __name__ == "__main__":
    main()
