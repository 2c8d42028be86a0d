"""The served model as a pure function: same logits, and whatever JAX does to functions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import SamplingParams, edits, functional
from jaxinfer.errors import InvalidRequestError
from jaxinfer.function import log_probs
from tests.research.models import GREEDY, golden, llm_of, prompt_of, tokens

TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def llama(llama):
    return llama, functional(llama)


@pytest.mark.parametrize(
    "name",
    [
        "deepseek_v3",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("gemma2", "llama3", "qwen3", "gpt_oss")
        ),
    ],
)
def test_logits_equal_the_reference(name):
    """Families with head norms, windows and caps, latents and experts, and sinks."""
    with llm_of(name) as llm:
        f = functional(llm)
        logits = jax.jit(f.apply)(f.params, jnp.array(prompt_of(name)))
    np.testing.assert_allclose(logits, golden(name, "medium_logits"), atol=5e-4)


def test_it_is_made_of_the_arrays_that_serve():
    llm = llm_of("llama3", kernels="xla")
    f = functional(llm)
    assert set(map(id, llm.engine.runner.programs.backbone.leaves)) <= set(
        map(id, f.params.values())
    )


def test_packed_weights_are_read_again():
    with llm_of("llama3") as llm:
        f = functional(llm)
        logits = jax.jit(f.apply)(f.params, jnp.array(prompt_of("llama3")))
        if llm.config.kernels == "cpu":
            with pytest.raises(NotImplementedError, match="xla"):
                f.as_served(f.params, [1, 2])
    np.testing.assert_allclose(logits, golden("llama3", "medium_logits"), atol=TOLERANCE)


def test_captures_are_those_of_serving(llama):
    llm, f = llama
    ids = prompt_of("llama3")
    names = ["embed", "layers.*.resid_post", "layers.1.attn_weights", "layers.0.q", "logits"]
    (served,) = llm.generate([ids], GREEDY, capture=names, positions="prompt")
    logits, captured = jax.jit(lambda p: f.apply(p, jnp.array(ids), capture=names))(f.params)
    assert set(captured) == set(served.captures)
    for name, values in served.captures.items():
        np.testing.assert_allclose(captured[name], values, atol=TOLERANCE, err_msg=name)
    np.testing.assert_array_equal(captured["logits"], logits)
    with pytest.raises(InvalidRequestError, match="nothing is named"):
        f.apply(f.params, jnp.array(ids), capture="layers.9.q")


def test_it_can_be_mapped_and_checkpointed(llama):
    _, f = llama
    batch = jnp.array([prompt_of("llama3"), prompt_of("llama3")[::-1]])
    mapped = jax.jit(jax.vmap(f.apply, in_axes=(None, 0)))(f.params, batch)
    apply = jax.jit(f.apply)
    one_by_one = jnp.stack([apply(f.params, row) for row in batch])
    np.testing.assert_allclose(mapped, one_by_one, atol=TOLERANCE)
    # Padding behind a sequence changes nothing before it.
    longer = apply(f.params, jnp.concatenate([batch[0], jnp.zeros(5, jnp.int32)]))
    np.testing.assert_allclose(longer[:-5], one_by_one[0], atol=TOLERANCE)


def test_the_gradient_is_the_slope(llama):
    """Along a random direction of all parameters, against a difference quotient."""
    _, f = llama
    ids = jnp.array(prompt_of("llama3")[:9])

    def loss(params):
        return -jnp.mean(log_probs(f.apply(params, ids), ids))

    slope_of = jax.jit(jax.value_and_grad(jax.checkpoint(loss)))
    value, grads = slope_of(f.params)
    rng = np.random.default_rng(0)
    direction = {
        path: jnp.asarray(rng.standard_normal(x.shape) * float(jnp.std(x) + 1e-3), x.dtype)
        for path, x in f.params.items()
    }
    slope = sum(float(jnp.vdot(grads[p], d)) for p, d in direction.items())
    step = 1e-3
    ahead, behind = (
        float(slope_of({p: f.params[p] + s * step * d for p, d in direction.items()})[0])
        for s in (1, -1)
    )
    assert abs(slope) > 1e-3
    assert (ahead - behind) / (2 * step) == pytest.approx(slope, rel=0.05)
    assert np.isfinite(value)


def test_a_vector_trained_by_its_gradient_is_served(llama):
    """Descend on a steering vector until the model says a token that it would not say."""
    llm, f = llama
    ids = prompt_of("llama3", "short")
    (before,) = llm.generate([ids], GREEDY)
    wanted = next(t for t in range(7, 300) if t not in before.outputs[0].token_ids)

    def loss(vector):
        edit = edits.add("layers.0.resid_post", vector)
        logits = f.apply(f.params, jnp.array(ids), edits=edit)
        return -jax.nn.log_softmax(logits[-1])[wanted]

    step = jax.jit(jax.value_and_grad(loss))
    vector = jnp.zeros(64)
    for _ in range(60):
        value, slope = step(vector)
        vector -= 0.5 * slope
        if value < 0.05:
            break
    assert value < 0.3
    steered = edits.add("layers.0.resid_post", vector)
    (after,) = llm.generate([ids], GREEDY, edits=steered)
    assert after.outputs[0].token_ids[0] == wanted
    assert tokens(llm.generate([ids], GREEDY)) == tokens([before])


def test_served_log_probabilities_are_those_of_the_function(llama):
    """Train-serve agreement: greedy and seeded, at a temperature, over prompt and output."""
    llm, f = llama
    apply = jax.jit(f.apply)
    prompts = [prompt_of("llama3"), [5, *prompt_of("llama3")[1:]]]
    for params in (
        SamplingParams(temperature=0.0, max_tokens=8, logprobs=0, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=5, max_tokens=8, logprobs=0, ignore_eos=True),
    ):
        for output in llm.generate(prompts, params):
            sample = output.outputs[0]
            reported = [
                entry[t].logprob for t, entry in zip(sample.token_ids, sample.logprobs, strict=True)
            ]
            ids = jnp.array([*output.prompt_token_ids, *sample.token_ids])
            recomputed = log_probs(apply(f.params, ids), ids)[-len(reported) :]
            np.testing.assert_allclose(recomputed, reported, atol=1e-4)
