"""Edits served are edits by hand; values need no compile; neighbours notice nothing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import edits, functional
from jaxinfer.errors import InvalidRequestError
from tests.research.models import GREEDY, golden, llm_of, prompt_of, tokens

TOLERANCE = 2e-4
D = 64


NAMES = ("layers.0.attn_out", "embed", "layers.1.mlp_hidden", "layers.0.resid_mid")
NAMES += ("layers.0.resid_post",)


@pytest.fixture(scope="module")
def llama(llama):
    return llama, functional(llama)


@pytest.fixture(scope="module")
def by_hand(llama):
    """Logits with a change applied in the open: run up to a value, change it, patch it back."""
    _, f = llama
    ids = jnp.array(prompt_of("llama3"))
    _, captured = jax.jit(lambda p: f.apply(p, ids, capture=NAMES))(f.params)
    patched = jax.jit(lambda p, changes: f.apply(p, ids, edits=changes))

    def run(name, change):
        put_back = edits.patch(name, change(captured[name]), range(len(ids)))
        return patched(f.params, f.resolve(put_back))

    return run


@pytest.mark.parametrize(
    "name", ["llama3", *(pytest.param(n, marks=pytest.mark.slow) for n in ("qwen3", "gemma2"))]
)
def test_edits_equal_the_reference_edited(name):
    ids = prompt_of(name)
    with llm_of(name) as llm:
        size = llm.hook_points["layers.0.resid_post"][0][0]
        cut = edits.ablate("layers.0.attn_heads", 1)
        steer = edits.add("layers.0.resid_post", np.linspace(-1, 1, size))
        plain, ablated, steered = llm.generate(
            [ids] * 3, GREEDY, capture="logits", positions="prompt", edits=[None, cut, steer]
        )
    for output, what in (
        (plain, "medium_logits"),
        (ablated, "hooks/ablated_logits"),
        (steered, "hooks/steered_logits"),
    ):
        np.testing.assert_allclose(
            output.captures["logits"], golden(name, what), atol=5e-4, err_msg=what
        )
    assert np.abs(golden(name, "hooks/ablated_logits") - golden(name, "medium_logits")).max() > 0.01


@pytest.mark.parametrize(
    ("edit", "name", "change"),
    [
        (
            edits.add("layers.0.attn_out", np.arange(D) / D, coefficient=2.0, where=(3, 7)),
            "layers.0.attn_out",
            lambda x: x.at[3:7].add(2.0 * jnp.arange(D, dtype=x.dtype)[None] / D),
        ),
        pytest.param(edits.scale("embed", 1.5), "embed", lambda x: x * 1.5, marks=pytest.mark.slow),
        pytest.param(
            edits.ablate("layers.1.mlp_hidden", [0, 5, 95]),
            "layers.1.mlp_hidden",
            lambda x: x.at[:, jnp.array([0, 5, 95])].set(0.0),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            edits.clamp("layers.0.resid_mid", -0.05, 0.02),
            "layers.0.resid_mid",
            lambda x: jnp.clip(x, -0.05, 0.02),
            marks=pytest.mark.slow,
        ),
        (
            edits.patch("layers.0.resid_post", np.ones((2, D)), [4, 6]),
            "layers.0.resid_post",
            lambda x: x.at[jnp.array([4, 6])].set(1.0),
        ),
    ],
    ids=["add", "scale", "ablate", "clamp", "patch"],
)
def test_a_served_edit_is_the_edit_by_hand(llama, by_hand, edit, name, change):
    llm, _ = llama
    ids = prompt_of("llama3")
    (served,) = llm.generate([ids], GREEDY, capture="logits", positions="prompt", edits=edit)
    expected = by_hand(name, change)
    np.testing.assert_allclose(served.captures["logits"], expected, atol=TOLERANCE)
    assert np.abs(expected - golden("llama3", "medium_logits")).max() > 1e-3


def test_an_edit_of_one_request_is_nothing_to_the_others(llama):
    """Bitwise, with the same program: B's logits do not depend on what A's edit says."""
    llm, _ = llama
    a, b = prompt_of("llama3", "short"), prompt_of("llama3")
    plain = tokens(llm.generate([a, b], GREEDY))
    seen = []
    for size in (0.0, 3.0, 1e4):
        steer = edits.add("layers.0.resid_post", np.full(D, size, np.float32))
        outputs = llm.generate([a, b], GREEDY, capture="logits", edits=[steer, None])
        assert tokens(outputs)[1] == plain[1]
        seen.append([output.captures["logits"] for output in outputs])
    np.testing.assert_array_equal(seen[0][1], seen[1][1])
    np.testing.assert_array_equal(seen[0][1], seen[2][1])
    assert np.abs(seen[0][0] - seen[1][0]).max() > 0.1


def test_nobody_finds_the_pages_of_an_edited_request(llama):
    llm, _ = llama
    ids = [9, *prompt_of("llama3", "long")]
    steer = edits.add("embed", np.linspace(-3, 3, D))
    (edited,) = llm.generate([ids], GREEDY, edits=steer)
    (plain,) = llm.generate([ids], GREEDY)
    assert plain.num_cached_tokens == 0
    assert tokens([edited]) != tokens([plain])
    (warm,) = llm.generate([ids], GREEDY)
    assert warm.num_cached_tokens
    assert tokens([warm]) == tokens([plain])
    # Nor does an edited one find those of others.
    assert tokens(llm.generate([ids], GREEDY, edits=steer)) == tokens([edited])


def test_new_values_need_no_new_program(llama):
    llm, _ = llama
    ids = prompt_of("llama3", "short")
    steer = lambda x: edits.add("layers.1.resid_mid", np.full(D, x))  # noqa: E731
    llm.generate([ids], GREEDY, edits=steer(0.0))
    before = llm.stats.compilations_total
    outputs = [llm.generate([ids], GREEDY, edits=steer(x)) for x in (0.5, 4.0)]
    assert llm.stats.compilations_total == before
    assert tokens(outputs[0]) != tokens(outputs[1])


def test_patching_from_another_run_carries_its_answer_over(llama):
    """All of the last layer's stream from a run on b makes a run on a say what b's says."""
    llm, _ = llama
    b = prompt_of("llama3")
    a = [*b[:-6], *[t % 250 + 40 for t in b[-6:]]]
    first = lambda output: output.outputs[0].token_ids[0]  # noqa: E731
    (source,) = llm.generate([b], GREEDY, capture="layers.1.resid_post", positions="last")
    (target,) = llm.generate([a], GREEDY)
    patch = edits.patch("layers.1.resid_post", source.captures["layers.1.resid_post"], [len(a) - 1])
    (patched,) = llm.generate([a], GREEDY, edits=patch)
    assert first(patched) == first(source)
    assert first(target) != first(source)


def test_a_list_of_edits_has_one_entry_for_each_prompt(llama):
    """Plus and minus for two prompts are not their sum for both."""
    llm, _ = llama
    ids = prompt_of("llama3", "short")
    vector = np.linspace(-40, 40, D)
    ahead, back = edits.add("embed", vector), edits.add("embed", -vector)
    one_each = llm.generate([ids, ids], GREEDY, capture="final", edits=[ahead, back])
    (both,) = llm.generate([ids], GREEDY, capture="final", edits=[ahead, back])
    plain = llm.generate([ids], GREEDY, capture="final")[0].captures["final"]
    np.testing.assert_allclose(both.captures["final"], plain, atol=1e-3)
    for output in one_each:
        assert np.abs(output.captures["final"] - plain).max() > 0.1
    with pytest.raises(InvalidRequestError, match="an entry for each"):
        llm.generate([ids, ids, ids], GREEDY, edits=[ahead, back])


def test_where_divides_prompt_from_output(llama):
    llm, _ = llama
    ids = prompt_of("llama3", "short")
    big = np.linspace(-40, 40, D)
    (plain,) = llm.generate([ids], GREEDY, capture="final")
    (late,) = llm.generate(
        [ids], GREEDY, capture="final", edits=edits.add("embed", big, where="generated")
    )
    n = len(ids)
    np.testing.assert_allclose(late.captures["final"][:n], plain.captures["final"][:n], atol=1e-5)
    assert np.abs(late.captures["final"][n:] - plain.captures["final"][n:]).max() > 0.1


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (edits.scale("layers.0.attn_weights", 0.0), "captured and not edited"),
        (edits.scale("layers.0.nothing", 0.0), "nothing is named"),
        (edits.add("embed", np.zeros(3)), r"broadcast to \[64\], got \[3\]"),
        (edits.ablate("layers.0.attn_heads", 8), "outside of 8"),
        (edits.patch("embed", np.zeros((1, D)), [1, 2]), r"take values \[2, 64\]"),
        (edits.scale("embed", 1.0, where=(5, 2)), "where must be"),
        ("embed", "expected edits"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(llama, edit, words):
    llm, _ = llama
    with pytest.raises(InvalidRequestError, match=words):
        llm.generate([[1, 2, 3]], GREEDY, edits=[[edit]])


def test_edits_are_pytrees(llama):
    _, f = llama
    (change,) = f.resolve(edits.add("embed", jnp.ones(D)))
    leaves, tree = jax.tree.flatten(change)
    assert len(leaves) == 2
    assert jax.tree.unflatten(tree, leaves).at == "embed"
