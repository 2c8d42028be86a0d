# %% [markdown]
# # Logit lens
#
# What would the model say if it stopped after layer *i*? Capture the residual stream behind every
# layer of a served request, and read each with the model's own last norm and head.

# %%
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np

from jaxinfer import LLM, SamplingParams, functional

FOLDER = Path(globals().get("FOLDER", "."))
llm = LLM(max_model_len=128, max_num_seqs=4, max_num_batched_tokens=64, warmup=False)
f = functional(llm)

# %% [markdown]
# One request, one capture for all layers: `*` stands for any.

# %%
prompt = "Paris is the capital of France. Rome is the capital of"
greedy = SamplingParams(max_tokens=1, temperature=0.0)
(output,) = llm.generate([prompt], greedy, capture="layers.*.resid_post", positions="prompt")
streams = np.stack(list(output.captures.values()))  # [L, T, D]
answer = output.outputs[0].token_ids[0]

# %% [markdown]
# `unembed` is the last norm and the head, as a pure function.

# %%
lens = jax.jit(jax.vmap(lambda p, x: jax.nn.softmax(f.unembed(p, x)), in_axes=(None, 0)))
probabilities = np.asarray(lens(f.params, streams))  # [L, T, V]
likeliest = probabilities.argmax(-1)
words = [llm.tokenizer.token_text(t) for t in output.prompt_token_ids]

last = probabilities[:, -1]
rank = 1 + (last > last[:, [answer]]).sum(-1)  # of the answer, behind each layer


def label(token: int) -> str:
    """Return what a cell has room for; spaces and line ends are made visible."""
    text = llm.tokenizer.token_text(int(token))
    shown = text.strip() or repr(text)[1:-1].replace(" ", "_")
    return shown.encode("ascii", "replace").decode()[:9]


fig, (ax, side) = plt.subplots(1, 2, figsize=(13, 9), width_ratios=(4, 1))
image = ax.imshow(
    probabilities.max(-1), aspect="auto", cmap="Blues", origin="lower", vmin=0, vmax=1
)
for layer, row in enumerate(likeliest):
    for place, token in enumerate(row):
        sure = probabilities[layer, place, token] > 0.6
        color = "white" if sure else "k"
        ax.text(place, layer, label(token), ha="center", va="center", fontsize=6, color=color)
ax.set_xticks(range(len(words)), words, rotation=45, ha="right")
ax.set_ylabel("layer")
ax.set_title("The likeliest next token behind each layer")
fig.colorbar(image, label="its probability")
side.plot(rank, range(len(rank)), marker="o")
side.set_xscale("log")
side.set_ylim(ax.get_ylim())
side.set_xlabel(f"rank of{llm.tokenizer.token_text(answer)} at the end")
fig.tight_layout()
fig.savefig(FOLDER / "logit_lens.png", dpi=80)

# %% [markdown]
# The finding: grammar first, the fact last. That "of" follows "capital" stands from the middle on.
# The country is thousands of ranks deep until layer 22, and two layers later among the first
# hundred: something there has looked it up. It comes out on top at the very end. Early on, the
# lens sees commas and bare spaces (`_`): the head reads a stream that is not yet made for it.

# %%
of = llm.tokenizer.encode(" of")[-1]
capital = words.index(" capital")
print("ranks by layer:", rank.tolist())
assert llm.tokenizer.token_text(answer).strip() == "Italy"
assert (likeliest[-len(rank) // 3 :, capital] == of).all()
assert rank[: len(rank) // 2].min() > 1000
assert rank[-5:].max() < 100 and rank[-1] == 1
llm.shutdown()
