# %% [markdown]
# # Train a soft prompt and serve it
#
# A few vectors in front of the prompt, found by gradient descent through the model as a pure
# function, served as an edit of the embedding: no weight changes, and other requests of the same
# batch notice nothing.

# %%
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from jaxinfer import LLM, SamplingParams, edits, functional
from jaxinfer.function import log_probs

FOLDER = Path(globals().get("FOLDER", "."))
STEPS = globals().get("STEPS", 60)
llm = LLM(max_model_len=128, max_num_seqs=4, max_num_batched_tokens=64, warmup=False)
f = functional(llm)
encode = llm.tokenizer.encode

# %% [markdown]
# The task: name the opposite. Without help this model goes on as it likes.

# %%
pairs = [("hot", "cold"), ("big", "small"), ("fast", "slow"), ("up", "down"), ("old", "new")]
pairs += [("dark", "light"), ("rich", "poor"), ("hard", "soft")]
held_out = [("high", "low"), ("wet", "dry"), ("early", "late"), ("strong", "weak")]
SOFT = 6  # vectors; their places are taken by any token
start = encode("The opposite of")[:1] * SOFT


def example(word: str, answer: str) -> list[int]:
    """Places for the soft prompt, a word, an arrow, its opposite."""
    return [*start, *encode(f" {word} ->"), *encode(f" {answer}")]


examples = [example(*pair) for pair in pairs]
length = max(map(len, examples))
tokens = jnp.array([e + [0] * (length - len(e)) for e in examples])
lasts = jnp.array([len(e) - 2 for e in examples])


# %%
def loss(soft: jax.Array, params: dict[str, jax.Array]) -> jax.Array:
    """Of the answers' tokens; what follows the answer is padding and counts for nothing."""
    soft_prompt = edits.patch("embed", soft, range(SOFT))

    def one(ids: jax.Array, last: jax.Array) -> jax.Array:
        return -log_probs(f.apply(params, ids, edits=soft_prompt), ids)[last]

    return jax.vmap(one)(tokens, lasts).mean()


step = jax.jit(jax.value_and_grad(loss))
_, captured = f.apply(f.params, jnp.array(start), capture="embed")
soft = np.asarray(captured["embed"])
scale = np.abs(soft).mean()
first, second = np.zeros_like(soft), np.zeros_like(soft)
losses = []
for i in range(1, STEPS + 1):  # Adam
    value, slope = step(soft, f.params)
    losses.append(float(value))
    first = 0.9 * first + 0.1 * np.asarray(slope)
    second = 0.99 * second + 0.01 * np.asarray(slope) ** 2
    rate = 0.3 * scale
    soft = soft - rate * (first / (1 - 0.9**i)) / (np.sqrt(second / (1 - 0.99**i)) + 1e-8)
soft = soft.astype(np.float32)
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")

# %% [markdown]
# Serve it: the same patch, on requests.

# %%
words = [*pairs, *held_out]
prompts = [[*start, *encode(f" {word} ->")] for word, _ in words]
greedy = SamplingParams(max_tokens=1, temperature=0.0)
soft_prompt = edits.patch("embed", soft, range(SOFT))
plain, trained = llm.generate(prompts, greedy), llm.generate(prompts, greedy, edits=soft_prompt)
right = {
    name: [o.outputs[0].text.strip() == answer for o, (_, answer) in zip(outs, words, strict=True)]
    for name, outs in (("plain", plain), ("soft prompt", trained))
}
for (word, answer), a, b in zip(words, plain, trained, strict=True):
    print(f"{word:>8} -> {answer:<8} plain {a.outputs[0].text!r:<12} soft {b.outputs[0].text!r}")

fig, (left, middle) = plt.subplots(1, 2, figsize=(10, 4))
left.plot(losses)
left.set_xlabel("step")
left.set_ylabel("loss")
left.set_title("Training six vectors")
n = len(pairs)
for i, (name, hits) in enumerate(right.items()):
    bars = middle.bar([i - 0.2, i + 2.8], [np.mean(hits[:n]), np.mean(hits[n:])], 0.8, label=name)
    middle.bar_label(bars, fmt="{:.0%}", padding=2)
middle.set_xticks([0.3, 3.3], ["trained on", "held out"])
middle.set_ylabel("right answers")
middle.set_ylim(0, 1.35)
middle.legend(loc="upper center", ncols=2)
fig.tight_layout()
fig.savefig(FOLDER / "soft_prompt.png", dpi=80)

# %% [markdown]
# The finding: six vectors are enough, and what they say is understood: words that they were not
# trained on get their opposites too.

# %%
assert losses[-1] < 0.5 * losses[0]
assert np.mean(right["soft prompt"][:n]) > max(0.8, np.mean(right["plain"][:n]))
assert np.mean(right["soft prompt"][n:]) >= 0.5 > np.mean(right["plain"][n:])
llm.shutdown()
