"""What is mistyped is said, before anything runs; what can be meant, is understood."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import SamplingParams, edits, functional
from jaxinfer.errors import EngineDeadError, InvalidRequestError, SnapshotError
from jaxinfer.logits_processor import LogitsProcessor
from jaxinfer.processing import ProcessorKind
from tests.research.models import GREEDY, llm_of, prompt_of, tokens

D, VOCAB = 64, 320
LINE = np.linspace(-9, 9, D)


@pytest.fixture(scope="module")
def f(llama):
    return functional(llama)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("layers.30.resid_post", r"layers count from 0 to 1\."),
        ("layers.-1.resid_post", r"layers count from 0 to 1\."),
        ("layers.1", r"did you mean 'layers.1.resid_post'\?"),
        ("resid_post", r"did you mean 'layers.\*.resid_post'\?"),
        ("q", r"did you mean 'layers.\*.q'\?"),
        ("blocks.0.hook_resid_post", r"did you mean 'layers.0.resid_post'\?"),
        ("", r"nothing is named ''\. There are: embed"),
        (3, "expected names, got 3"),
        ({"embed": 1}, "expected names"),
        (["embed", None], "expected names, got None"),
    ],
)
def test_a_name_that_is_none_is_met_with_the_one_that_was_meant(llama, pattern, words):
    with pytest.raises(InvalidRequestError, match=words):
        llama.generate([[1, 2, 3]], GREEDY, capture=pattern)


@pytest.mark.parametrize(
    "positions", [1.5, True, [1.5], [True], {1, 2}, "Last", b"x", {1: 2}, np.array([0.5]), [[1]]]
)
def test_positions_that_are_none_are_refused(llama, positions):
    with pytest.raises(InvalidRequestError, match="positions must be"):
        llama.generate([[1, 2, 3]], GREEDY, capture="embed", positions=positions)


def test_positions_that_no_token_will_have_are_refused(llama):
    """Three tokens of prompt and four of output, of which the last is not computed."""
    for arguments in (
        {"capture": "embed", "positions": 6},
        {"edits": edits.patch("embed", np.zeros((1, D)), [6])},
    ):
        with pytest.raises(InvalidRequestError, match="6 lies behind the last token"):
            llama.generate([[1, 2, 3]], GREEDY, **arguments)
    for name in ("positions", "capture_to"):
        with pytest.raises(InvalidRequestError, match=f"{name} needs capture"):
            llama.generate([[1, 2, 3]], GREEDY, **{name: "all"})


def test_numbers_of_all_libraries_are_positions(llama):
    for positions in (np.array([2, 0, 2]), jnp.array([0, 2]), range(0, 3, 2), (np.int64(-1), 0)):
        (output,) = llama.generate([[1, 2, 3]], GREEDY, capture="embed", positions=positions)
        assert output.outputs[0].capture_positions.tolist() == [0, 2]


def test_what_no_token_was_asked_of_has_the_shape_of_none(llama):
    one = SamplingParams(max_tokens=1, temperature=0.0)
    names = ["embed", "layers.0.attn_weights", "logits"]
    (output,) = llama.generate([[1, 2, 3]], one, capture=names, positions="generated")
    shapes = {name: (x.shape, x.dtype) for name, x in output.captures.items()}
    single = np.dtype(np.float32)
    assert shapes == {
        "embed": ((0, D), single),
        "layers.0.attn_weights": ((0, 8, 0), single),
        "logits": ((0, VOCAB), single),
    }


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: edits.add("embed", np.ones(D, complex)), "real numbers"),
        (lambda: edits.add("embed", "much"), "real numbers"),
        (lambda: edits.scale("embed", None), "real numbers"),
        (lambda: edits.scale("embed", [[1.0], [1.0, 2.0]]), "real numbers"),
        (lambda: edits.clamp("embed", None, 1.0), "real numbers"),
        (lambda: edits.ablate("layers.0.attn_heads", 1.5), "index of a head"),
        (lambda: edits.ablate("layers.0.attn_heads", [True]), "index of a head"),
        (lambda: edits.patch("embed", np.ones((1, D)), 1), "list of positions"),
        (lambda: edits.patch("embed", np.ones((1, D)), [1.5]), "list of positions"),
        (lambda: edits.patch("embed", np.ones((0, D)), []), "no position"),
        (lambda: edits.patch("embed", np.ones((1, D)), [-4]), "before the prompt of 3"),
        (lambda: edits.patch("embed", np.ones((2, D)), [2, -1]), "takes one value"),
        (lambda: "embed", "expected edits"),
        (lambda: {"embed": 1.0}, "expected edits"),
        (lambda: 3, "expected edits"),
        (lambda: ["embed"], "expected None, an edit or a list"),
    ],
)
def test_values_that_are_none_are_refused(llama, make, words):
    with pytest.raises(InvalidRequestError, match=words) as refused:
        llama.generate([[1, 2, 3]], GREEDY, edits=make())
    assert refused.value.param == "edits"


def test_values_of_any_type_are_one_program(llama):
    """And after them the engine lives: types that differ once stopped it."""
    ids = prompt_of("llama3", "short")
    (expected,) = tokens(llama.generate([ids], GREEDY, edits=edits.scale("embed", 2.0)))
    before = llama.stats.compilations_total
    for factor in (2, np.float64(2), np.full(D, 2, np.int8), jnp.full(D, 2, jnp.bfloat16)):
        assert tokens(llama.generate([ids], GREEDY, edits=edits.scale("embed", factor))) == [
            expected
        ]
    assert llama.stats.compilations_total == before


def test_an_edit_keeps_the_values_that_it_was_made_of(llama):
    vector = LINE.copy()
    edit = edits.patch("layers.1.resid_post", vector[None], [-1])
    ids = prompt_of("llama3", "short")
    first = tokens(llama.generate([ids], GREEDY, edits=edit))
    vector[:] = 0.0
    assert tokens(llama.generate([ids], GREEDY, edits=edit)) == first
    zeroed = edits.patch("layers.1.resid_post", vector[None], [-1])
    assert tokens(llama.generate([ids], GREEDY, edits=zeroed)) != first


def test_a_patch_counts_from_the_end_of_each_prompt_and_none_is_nowhere(llama):
    short, medium = prompt_of("llama3", "short"), prompt_of("llama3")
    at = lambda where: edits.patch("layers.1.resid_post", LINE[None], where)  # noqa: E731
    from_end = tokens(llama.generate([short, medium], GREEDY, edits=at([-1])))
    from_start = tokens(
        llama.generate([short, medium], GREEDY, edits=[at([len(short) - 1]), at([len(medium) - 1])])
    )
    assert from_end == from_start
    plain = tokens(llama.generate([short, medium], GREEDY))
    assert tokens(llama.generate([short, medium], GREEDY, edits=at([None]))) == plain != from_end


def test_values_that_make_a_nan_end_their_request_and_no_other(llama):
    ids = prompt_of("llama3", "short")
    bad = edits.add("layers.1.resid_post", np.full(D, np.nan))
    broken, whole = llama.generate([ids, ids], GREEDY, edits=[bad, None])
    assert broken.outputs[0].finish_reason == "error"
    assert "from the request's edits" in broken.outputs[0].error
    assert tokens([whole]) == tokens(llama.generate([ids], GREEDY))


def keep(logits, state):
    return logits, state


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": 1, 3: 2}, "no pytree"),
        ({"a": "x"}, "must hold numbers, got str"),
        ({"a": [[1], [1, 2]]}, None),  # a pytree of lists
        ({"a": np.array([None])}, "must hold numbers"),
        ({"a": jax.random.key(0)}, "must hold numbers"),
        ({"a": 2**40}, "int32 does not hold"),
        ({"a": np.uint64(2**63)}, "does not hold"),
        ({"a": [(1, 2.0), {"b": np.zeros((2, 0))}, None]}, None),
    ],
)
def test_states_are_numbers_that_the_device_holds(state, words):
    processor = LogitsProcessor(keep, state)
    if words is None:
        ProcessorKind.of(processor)[0].check(VOCAB, 16)
        return
    with pytest.raises(InvalidRequestError, match=words):
        ProcessorKind.of(processor)


def test_a_function_that_does_not_tell_its_arguments_is_refused():
    with pytest.raises(InvalidRequestError, match="does not tell what it takes"):
        LogitsProcessor(max)


def test_a_snapshot_of_a_hooked_batch_is_refused_and_the_batch_ends_well(llama):
    """Also of requests that wait behind the engine's queue, and of captures that are complete."""
    ids = prompt_of("llama3", "short")
    cut = edits.scale("embed", 2.0)
    for hooks, count in (({"capture": "embed"}, 1), ({"edits": [None] * 9 + [cut]}, 10)):
        refused = []

        def on_step(refused=refused):
            try:
                llama.snapshot()
            except SnapshotError as error:
                refused.append("captures or edits inside the model" in str(error))
            else:
                refused.append(False)

        watched = llama.generate([ids] * count, GREEDY, on_step=on_step, **hooks)
        # Once it has ended, nothing of an edit is left to lose.
        assert all(refused if "capture" in hooks else refused[:-1])
        assert tokens(watched) == tokens(llama.generate([ids] * count, GREEDY, **hooks))


def test_snapshots_of_another_kind_are_refused(llama):
    with pytest.raises(SnapshotError, match="is bytes, got str"):
        llama.restore("text")
    with pytest.raises(SnapshotError, match="the other kind"):
        llama.restore(llama.engine.snapshot())


@pytest.mark.parametrize(
    "ids", [[], [[1, 2]], [1.5], "text", [VOCAB], [-1]], ids=lambda ids: repr(ids)
)
def test_the_function_refuses_what_are_no_tokens(f, ids):
    with pytest.raises(InvalidRequestError) as refused:
        f.apply(f.params, np.asarray(ids))
    assert refused.value.param == "tokens"


def test_the_function_refuses_what_would_do_nothing(f):
    ids = jnp.array([1, 2, 3])
    with pytest.raises(InvalidRequestError, match="behind the last of 3 tokens"):
        f.apply(f.params, ids, edits=edits.patch("embed", LINE[None], [3]))
    with pytest.raises(InvalidRequestError, match="where the prompt ends"):
        f.apply(f.params, ids, edits=edits.patch("embed", LINE[None], [-1]))
    fewer = dict(list(f.params.items())[1:])
    with pytest.raises(InvalidRequestError, match="params lacks"):
        f.apply(fewer, ids)


def test_streams_of_several_layers_are_unembedded_at_once(f):
    streams = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, D)), jnp.float32)
    together = f.unembed(f.params, streams)
    assert together.shape == (2, 3, VOCAB)
    np.testing.assert_allclose(together[1, 2], f.unembed(f.params, streams[1, 2]), atol=1e-5)


@pytest.mark.parametrize(
    "ask",
    [
        lambda llm: llm.rank_choices("a", "bc"),
        lambda llm: llm.rank_choices("a", ["b", 3]),
        lambda llm: llm.score(3, 4),
        lambda llm: llm.score_all(["ab"]),
        lambda llm: llm.score_all([("a", "b", "c")]),
        lambda llm: llm.perplexity(None),
        lambda llm: llm.perplexity("abc", window=2.5),
    ],
)
def test_what_is_no_text_is_not_scored(llama, ask):
    with pytest.raises(InvalidRequestError):
        ask(llama)


def test_an_llm_that_was_shut_down_says_so():
    llm = llm_of("llama3")
    llm.shutdown()
    for ask in (lambda: llm.stats, lambda: llm.hook_points, lambda: functional(llm)):
        with pytest.raises(EngineDeadError, match="shut down"):
            ask()
