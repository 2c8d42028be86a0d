# %% [markdown]
# # Steering a chat model, live
#
# Take the difference between what the model makes of glad and of sad sentences, add it to the
# stream while it answers, and watch its tone follow the coefficient. The vector's size is data:
# turning the knob compiles nothing, and each conversation of a batch has its own.

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from jaxinfer import LLM, SamplingParams, edits

FOLDER = Path(globals().get("FOLDER", "."))
llm = LLM(max_model_len=256, max_num_seqs=16, max_num_batched_tokens=256, warmup=False)
LAYER = "layers.14.resid_post"

glad = [
    "I am so happy today, everything is wonderful.",
    "What a joyful and delightful surprise this is!",
    "We laughed and celebrated our great success.",
    "I love this beautiful, sunny morning.",
]
sad = [
    "I am so sad today, everything is terrible.",
    "What a painful and dreadful loss this is!",
    "We cried and mourned our great failure.",
    "I hate this ugly, rainy morning.",
]

# %%
one = SamplingParams(max_tokens=1, temperature=0.0)


def mean_stream(texts: list[str]) -> np.ndarray:
    """The stream at the last token, averaged over sentences."""
    outputs = llm.generate(texts, one, capture=LAYER, positions="last")
    return np.mean([output.captures[LAYER][0] for output in outputs], axis=0)


direction = mean_stream(glad) - mean_stream(sad)
direction /= np.linalg.norm(direction)
(typical,) = llm.generate([glad[0]], one, capture=LAYER, positions="last")
size = float(np.linalg.norm(typical.captures[LAYER]))

# %% [markdown]
# One question, asked with nine coefficients at once.

# %%
question = [{"role": "user", "content": "Tell me in one sentence how your day was."}]
coefficients = np.linspace(-0.4, 0.4, 9)
answers = llm.chat(
    [question] * len(coefficients),
    SamplingParams(max_tokens=24, temperature=0.0),
    hooks={"edits": [edits.add(LAYER, direction, coefficient=c * size) for c in coefficients]},
)
for c, answer in zip(coefficients, answers, strict=True):
    print(f"{c:+.2f}  {answer.outputs[0].text!r}")

# %% [markdown]
# How glad is the model? The log-odds of glad against sad words as the next one of "I feel".

# %%
glad_words = [llm.tokenizer.encode(w)[-1] for w in (" happy", " great", " good", " wonderful")]
sad_words = [llm.tokenizer.encode(w)[-1] for w in (" sad", " terrible", " bad", " awful")]
outputs = llm.generate(
    ["After this day, I feel"] * len(coefficients),
    one,
    capture="logits",
    positions="last",
    edits=[edits.add(LAYER, direction, coefficient=c * size) for c in coefficients],
)
logits = np.stack([output.captures["logits"][0] for output in outputs])
log_odds = np.logaddexp.reduce(logits[:, glad_words], axis=1) - np.logaddexp.reduce(
    logits[:, sad_words], axis=1
)

fig, ax = plt.subplots(figsize=(7, 4))
ax.plot(coefficients, log_odds, marker="o")
ax.axhline(0, color="grey", linewidth=0.7)
ax.set_xlabel("coefficient, in lengths of the stream")
ax.set_ylabel("log-odds of glad over sad words")
ax.set_title(f'"After this day, I feel ...", steered at {LAYER}')
fig.tight_layout()
fig.savefig(FOLDER / "steering.png", dpi=80)

# %% [markdown]
# The finding: the odds follow the knob, from sad to glad, and so does the tone of the answers; far
# out on either side the sentences fall apart before the mood gets any stronger.

# %%
assert np.corrcoef(coefficients, log_odds)[0, 1] > 0.8
assert log_odds[-1] > log_odds[len(log_odds) // 2] > log_odds[0]
llm.shutdown()
