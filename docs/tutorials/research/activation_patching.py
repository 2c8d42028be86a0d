# %% [markdown]
# # Activation patching
#
# Where does a model keep what it needs for its answer? Two prompts differ in one name. Run the
# second, but put one vector of the first's residual stream in place of its own, at one layer and
# one position; does the answer change back?

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from jaxinfer import LLM, SamplingParams, edits

FOLDER = Path(globals().get("FOLDER", "."))
llm = LLM(max_model_len=128, max_num_seqs=16, max_num_batched_tokens=256, warmup=False)
greedy = SamplingParams(max_tokens=1, temperature=0.0)

clean = "When Mary and John went to the store, John gave a drink to"
corrupt = "When Mary and John went to the store, Mary gave a drink to"
ids = {text: llm.tokenizer.encode(text) for text in (clean, corrupt)}
assert len(ids[clean]) == len(ids[corrupt])
mary, john = (llm.tokenizer.encode(name)[-1] for name in (" Mary", " John"))

# %% [markdown]
# The clean run's stream, before every layer.

# %%
source, target = llm.generate(
    [ids[clean], ids[corrupt]], greedy, capture=["layers.*.resid_pre", "logits"], positions="prompt"
)
names = [name for name in source.captures if name != "logits"]
L, T = len(names), len(ids[clean])


def preference(output) -> float:
    """How much the model prefers Mary to John, in logits."""
    last = output.captures["logits"][-1]
    return float(last[mary] - last[john])


high, low = preference(source), preference(target)
print(f"clean {high:+.2f}, corrupt {low:+.2f}")

# %% [markdown]
# All patches are one edit in each layer, of which all but one lie at no position.
# So they differ in values only, and one compiled program serves all of them, 16 at a time.


# %%
def patch_at(layer: int, position: int) -> list[edits.Edit]:
    """Put the clean run's vector in one place."""
    return [
        edits.patch(name, source.captures[name][[position]], [position if i == layer else None])
        for i, name in enumerate(names)
    ]


layers = globals().get("LAYERS", range(0, L, 2))
places = [(layer, position) for layer in layers for position in range(T)]
outputs = llm.generate(
    [ids[corrupt]] * len(places),
    greedy,
    capture="logits",
    positions="last",
    edits=[patch_at(*place) for place in places],
)
restored = np.array([(preference(o) - low) / (high - low) for o in outputs]).reshape(-1, T)

# %%
words = [llm.tokenizer.token_text(t) for t in ids[corrupt]]
fig, ax = plt.subplots(figsize=(9, 6))
image = ax.imshow(restored, aspect="auto", cmap="RdBu", vmin=-1, vmax=1, origin="lower")
ax.set_xticks(range(T), words, rotation=45, ha="right")
ax.set_yticks(range(len(layers)), list(layers))
ax.set_ylabel("layer before which the vector is replaced")
ax.set_title("Share of the clean answer that one vector restores")
fig.colorbar(image)
fig.tight_layout()
fig.savefig(FOLDER / "activation_patching.png", dpi=80)

# %% [markdown]
# The finding: early on, all that matters stands where the names differ; late, all of it has moved
# to the last position; in between it changes places within a few layers.

# %%
differs = [i for i, (a, b) in enumerate(zip(ids[clean], ids[corrupt], strict=True)) if a != b]
(place,) = differs
assert restored[0, place] > 0.9 and abs(restored[0, -1]) < 0.1
assert restored[-1, -1] > 0.9 and abs(restored[-1, place]) < 0.2
llm.shutdown()
