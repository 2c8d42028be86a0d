"""A model that the package has never seen is served: pages, batching, captures and HTTP."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfer import LLM, SamplingParams
from jaxinfer.errors import ConfigError, ModelError
from jaxinfer.own_model import load_function, load_module
from tests.server.serving import running_server
from tests.unit.faces.fakes import ByteTokenizer

V, D, N, H, L = 260, 32, 4, 8, 2
SIZES = {
    "vocab_size": V,
    "hidden_size": D,
    "num_layers": L,
    "num_heads": N,
    "head_dim": H,
    "max_position_embeddings": 64,
}
SMALL = {
    "tokenizer": ByteTokenizer(),
    "max_num_seqs": 4,
    "max_num_batched_tokens": 4,
    "compilation_cache_dir": "",
    "num_decode_steps": 1,
    "num_pages": 16,
    "page_size": 8,
    "warmup": False,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False)


class Tiny(nnx.Module):
    """Embeddings of tokens and positions, attention with tanh around, and a head."""

    def __init__(self, rngs: nnx.Rngs):
        self.tokens, self.places = nnx.Embed(V, D, rngs=rngs), nnx.Embed(64, D, rngs=rngs)
        self.qkv = nnx.List([nnx.Linear(D, 3 * N * H, rngs=rngs) for _ in range(L)])
        self.out = nnx.List([nnx.Linear(N * H, D, rngs=rngs) for _ in range(L)])
        self.head = nnx.Linear(D, V, rngs=rngs)

    def __call__(self, token_ids, positions, attend, tap):
        x = self.tokens(token_ids) + self.places(jnp.maximum(positions, 0))
        for layer, (qkv, out) in enumerate(zip(self.qkv, self.out, strict=True)):
            q, k, v = jnp.split(qkv(x).reshape(-1, 3 * N, H), 3, axis=1)
            seen = attend(layer, q, k, v, scale=H**-0.5, sliding_window=None)
            x = tap(f"layers.{layer}.resid_post", x + jnp.tanh(out(seen.reshape(-1, N * H))))
        return x

    def logits(self, hidden):
        return 10.0 * self.head(hidden)


def in_the_open(model: Tiny, ids: jax.Array) -> jax.Array:
    """Logits [T, V] of one sequence, without pages."""
    x = model.tokens(ids) + model.places(jnp.arange(len(ids)))
    causal = jnp.tril(jnp.ones((len(ids), len(ids)), bool))
    for qkv, out in zip(model.qkv, model.out, strict=True):
        q, k, v = jnp.split(qkv(x).reshape(-1, 3 * N, H), 3, axis=1)
        scores = jnp.einsum("TNH,SNH->NTS", q, k) * H**-0.5
        weights = jax.nn.softmax(jnp.where(causal[None], scores, -jnp.inf))
        seen = jnp.einsum("NTS,SNH->TNH", weights, v).reshape(-1, N * H)
        x = x + jnp.tanh(out(seen))
    return model.logits(x)


def greedy(reference: Callable[[list[int]], np.ndarray], ids: list[int], count: int) -> list[int]:
    ids = list(ids)
    for _ in range(count):
        ids.append(int(reference(ids)[-1].argmax()))
    return ids[-count:]


@pytest.fixture(scope="module")
def model():
    with jax.numpy_rank_promotion("allow"):  # flax's own
        yield Tiny(nnx.Rngs(0))


@pytest.fixture(scope="module")
def reference(model):
    """Logits of up to 16 tokens; causal, so that one program serves all lengths."""
    graphdef, state = nnx.split(model)
    run = jax.jit(lambda state, ids: in_the_open(nnx.merge(graphdef, state), ids))

    def logits(ids: list[int]) -> np.ndarray:
        return np.asarray(run(state, jnp.array(ids + [0] * (16 - len(ids)))))[: len(ids)]

    return logits


@pytest.fixture(scope="module")
def loaded(model):
    return load_module(model, **SIZES, **SMALL)


def test_a_module_is_served_in_batches_over_pages(model, loaded, reference):
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [100, 7]]
    llm = LLM.from_loaded(loaded)
    outputs = llm.generate(prompts, GREEDY, capture="layers.*.resid_post")
    again = llm.generate(prompts, GREEDY)
    for prompt, output, plain in zip(prompts, outputs, again, strict=True):
        ids = output.outputs[0].token_ids
        assert ids == plain.outputs[0].token_ids == greedy(reference, prompt, 6)
        assert list(output.captures) == ["layers.0.resid_post", "layers.1.resid_post"]
        logits = model.logits(jnp.array(output.captures["layers.1.resid_post"]))
        np.testing.assert_allclose(logits, reference([*prompt, *ids[:-1]]), atol=1e-4, rtol=1e-4)


def test_two_pure_functions_are_served(model, reference):
    graphdef, state = nnx.split(model)

    class Quiet:
        def __call__(self, name, x):
            return x

    def forward(params, token_ids, positions, attend):
        return nnx.merge(graphdef, params)(token_ids, positions, attend, Quiet())

    def logits(params, hidden):
        return nnx.merge(graphdef, params).logits(hidden)

    loaded = load_function(forward, logits, state, **SIZES, **SMALL)
    with LLM.from_loaded(loaded) as llm:
        (output,) = llm.generate([[3, 1, 4]], GREEDY)
    assert output.outputs[0].token_ids == greedy(reference, [3, 1, 4], 6)


def test_what_does_not_fit_is_said_before_anything_is_compiled(model):
    with pytest.raises(ModelError, match=r"hidden states of 3 tokens: expected float32 \[3, 16\]"):
        load_module(model, **{**SIZES, "hidden_size": 16}, **SMALL)
    with pytest.raises(ModelError, match="once for each layer 0 to 2"):
        load_module(model, **{**SIZES, "num_layers": 3}, **SMALL)
    with pytest.raises(ModelError, match=r"attend of layer 0: expected q \[3, 2, 8\]"):
        load_module(model, **{**SIZES, "num_heads": 2}, **SMALL)
    with pytest.raises(ConfigError, match="quantization has no meaning"):
        load_module(model, **SIZES, **SMALL, quantization="int8")


def test_it_answers_over_http(loaded, reference):
    body = {"model": "own-model", "prompt": [3, 1, 4], "max_tokens": 6, "temperature": 0}
    with running_server() as server:
        server.state.serve(loaded)
        answer = server.post("/v1/completions", {**body, "ignore_eos": True}).json()
    text = bytes(t for t in greedy(reference, [3, 1, 4], 6) if t < 256).decode(errors="replace")
    assert answer["choices"][0]["text"].encode() == text.encode()
