# %% [markdown]
# # Attention heads seen
#
# Some heads copy: at the second occurrence of a token they look at what followed the first
# (*induction heads*, arXiv:2209.11895). A sequence of random tokens, twice in a row, shows them:
# capture the attention weights of all heads and see who looks back by one period less one.

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from jaxinfer import LLM, SamplingParams

FOLDER = Path(globals().get("FOLDER", "."))
llm = LLM(max_model_len=128, max_num_seqs=4, max_num_batched_tokens=128, warmup=False)
n = 40
half = np.random.default_rng(0).integers(1000, 20000, size=n)
ids = [*half.tolist(), *half.tolist()]

# %%
greedy = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
(output,) = llm.generate([ids], greedy, capture="layers.*.attn_weights", positions="prompt")
weights = np.stack(list(output.captures.values()))  # [L, T, N, S]

# %% [markdown]
# The score of a head: how much weight it gives, on average over the second half, to the token
# behind the previous occurrence.

# %%
second = np.arange(n, 2 * n)
score = weights[:, second, :, second - n + 1].mean(0)  # [L, N]
layer, head = np.unravel_index(score.argmax(), score.shape)

fig, (left, right) = plt.subplots(1, 2, figsize=(12, 6))
image = left.imshow(score, aspect="auto", cmap="viridis", vmin=0, vmax=1)
left.set_xlabel("head")
left.set_ylabel("layer")
left.set_title("Weight given to what followed last time")
fig.colorbar(image)
right.imshow(weights[layer, :, head, :], cmap="Greys")
right.axhline(n - 0.5, color="C1", linewidth=0.7)
right.axvline(n - 0.5, color="C1", linewidth=0.7)
right.set_xlabel("key")
right.set_ylabel("query")
right.set_title(f"Layer {layer}, head {head}")
fig.tight_layout()
fig.savefig(FOLDER / "attention_heads.png", dpi=80)

# %% [markdown]
# The finding: a handful of heads does almost nothing else; most do nothing of the kind.

# %%
print(f"layer {layer}, head {head}: {score.max():.2f}; {(score > 0.4).sum()} of {score.size} heads")
assert score.max() > 0.5
assert np.median(score) < 0.05
llm.shutdown()
