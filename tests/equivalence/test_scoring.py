"""Scores, perplexity, choices and vectors are those of the logits and states at each position."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from scipy.special import log_softmax

from jaxinfer.errors import InvalidRequestError
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scoring import Perplexity, Ranking, Score, windows
from tests.engines import hidden_of, make_engine
from tests.unit.faces.tiny import tiny_llm

BUCKETS = (8,)
SHAPES = {"max_num_batched_tokens": 8}
TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps for a while. " * 3


@pytest.fixture(scope="module")
def llm():
    with tiny_llm(buckets=BUCKETS, **SHAPES) as llm:
        yield llm


@pytest.fixture(scope="module")
def engine():
    engine = make_engine("smollm2", BUCKETS, **SHAPES)
    head = engine.runner.programs.head
    engine.logits = jax.jit(lambda x: head(head.leaves)(x))
    return engine


def logprobs_of(engine, token_ids) -> np.ndarray:
    """Return [T - 1]: the log-probability of each token but the first."""
    hidden = hidden_of(engine, np.asarray(token_ids), 8)
    padded = np.zeros((128, hidden.shape[1]), hidden.dtype)
    padded[: len(token_ids)] = hidden
    logits = np.asarray(engine.logits(padded))[: len(token_ids)]
    table = log_softmax(logits.astype(np.float64), axis=-1)
    return table[np.arange(len(token_ids) - 1), token_ids[1:]]


def test_a_score_is_the_log_probability_of_each_token(llm, engine):
    prompt = list(range(20, 60))
    continuation = [7, 90, 31, 5, 17]
    score = llm.score(prompt, continuation)
    assert score.token_ids == tuple(continuation)
    expected = logprobs_of(engine, prompt + continuation)[-5:]
    np.testing.assert_allclose(score.logprobs, expected, atol=1e-4)
    assert score.logprob == pytest.approx(expected.sum(), abs=5e-4)


def test_what_greedy_decoding_writes_is_greedy_and_nothing_else_is(llm):
    (output,) = llm.generate(
        [[20, 21, 22]], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    )
    written = output.outputs[0].token_ids
    assert llm.score([20, 21, 22], written).is_greedy
    assert not llm.score([20, 21, 22], [*written[:-1], written[-1] ^ 1]).is_greedy


def test_text_is_cut_where_the_prompt_ends_and_spaces_go_with_the_continuation(llm):
    encode = llm.tokenizer.encode
    score = llm.score("The quick brown ", "fox jumps")
    assert score.token_ids == tuple(
        encode("The quick brown fox jumps")[len(encode("The quick brown")) :]
    )
    assert llm.score("", "fox").token_ids == tuple(encode("fox", add_special_tokens=False))


def test_a_shared_prompt_is_computed_once_and_scores_the_same():
    prompt = list(range(30, 80))
    pairs = [(prompt, [token, 9]) for token in range(10, 16)]
    with tiny_llm(buckets=BUCKETS, **SHAPES) as llm:
        before = llm.stats.prefix_cache_hits
        warm = llm.score_all(pairs)
        hits = llm.stats.prefix_cache_hits - before
    with tiny_llm(buckets=BUCKETS, **SHAPES, enable_prefix_caching=False) as llm:
        cold = llm.score_all(pairs)
    assert hits >= 5 * 48  # 6 full pages of 8 tokens for all but the first
    for a, b in zip(warm, cold, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


def test_prompts_that_are_scored_from_different_positions_agree(llm, engine):
    prompt = list(range(100, 150))
    expected = logprobs_of(engine, prompt)
    for start in (0, 1, 2, 17, 49):
        params = SamplingParams(
            max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=start, detokenize=False
        )
        (output,) = llm.generate([prompt], params)
        first = max(start, 1)
        assert output.prompt_logprobs[:first] == [None] * first
        got = [
            entry[t].logprob
            for entry, t in zip(output.prompt_logprobs, prompt, strict=True)
            if entry
        ]
        np.testing.assert_allclose(got, expected[first - 1 :], atol=1e-4)


@pytest.mark.parametrize(
    ("length", "window", "stride"), [(2, 8, 4), (9, 4, 1), (40, 16, 5), (16, 16, 8)]
)
def test_windows_score_each_token_once_with_enough_before_it(length, window, stride):
    ids = list(range(length))
    parts = list(windows(ids, window, stride))
    assert [t for _, scored in parts for t in scored] == ids[1:]
    for context, scored in parts:
        whole = context + scored
        assert whole == ids[whole[0] : whole[0] + len(whole)] and len(whole) <= window
        assert len(context) >= min(window - stride, scored[0])


def test_perplexity_is_that_of_the_windows(llm, engine):
    ids = llm.tokenizer.encode(TEXT)
    bos = llm.tokenizer.bos_token_id
    ids = ids if ids[0] == bos else [bos, *ids]
    found = llm.perplexity(TEXT, window=32, stride=12)
    total = sum(
        logprobs_of(engine, context + scored)[-len(scored) :].sum()
        for context, scored in windows(ids, 32, 12)
    )
    assert found.num_tokens == len(ids) - 1 > 64 and found.num_windows > 3
    assert found.logprob == pytest.approx(total, abs=1e-2)
    assert found.perplexity == pytest.approx(np.exp(-total / (len(ids) - 1)), rel=1e-4)
    assert found.bits_per_byte == pytest.approx(-total / np.log(2) / len(TEXT.encode()), rel=1e-4)
    assert llm.perplexity(ids, window=32, stride=12).perplexity == found.perplexity


def test_a_perplexity_beyond_floats_is_infinite():
    huge = Perplexity(logprob=-1e6, num_tokens=1, num_bytes=0, num_windows=1)
    assert huge.perplexity == float("inf")


def test_choices_are_ranked_by_sum_and_by_character():
    def score(*logprobs):
        n = len(logprobs)
        return Score(token_ids=(1,) * n, logprobs=logprobs, ranks=(2,) * n)

    ranking = Ranking(scores=(score(-3.0), score(-2.0, -2.0)), num_chars=(2, 10))
    assert (ranking.best, ranking.best_normalized) == (0, 1)


def test_choices_have_the_scores_of_their_texts(llm):
    choices = [" dog", " cat", " lazy fox"]
    ranking = llm.rank_choices("The quick brown", choices)
    for choice, score in zip(choices, ranking.scores, strict=True):
        alone = llm.score("The quick brown", choice)
        assert score.token_ids == alone.token_ids
        np.testing.assert_allclose(score.logprobs, alone.logprobs, atol=1e-5)
    assert ranking.num_chars == (4, 4, 9)


def test_vectors_are_the_last_hidden_states(llm, engine):
    prompts = [list(range(5, 25)), list(range(40, 43))]
    hidden = [hidden_of(engine, np.asarray(p), 8).astype(np.float32) for p in prompts]
    last, mean = llm.embed(prompts), llm.embed(prompts, "mean")
    for i, states in enumerate(hidden):
        np.testing.assert_allclose(last[i], states[-1], atol=1e-4)
        np.testing.assert_allclose(mean[i], states.mean(axis=0), atol=1e-4)
    unit = llm.embed(prompts[0], normalize=True)
    assert unit.shape == hidden[0].shape[1:] and np.linalg.norm(unit) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("call", "param"),
    [
        (lambda llm: llm.score("a", ""), "continuation"),
        (lambda llm: llm.score(list(range(5, 250)), list(range(5, 20))), "prompt"),
        (lambda llm: llm.rank_choices("a", []), "choices"),
        (lambda llm: llm.perplexity(TEXT, window=1), "window"),
        (lambda llm: llm.perplexity(TEXT, window=8, stride=8), "stride"),
        (lambda llm: llm.perplexity(""), "text"),
        (lambda llm: llm.embed("a", "first"), "pooling"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_name(llm, call, param):
    with pytest.raises(InvalidRequestError) as caught:
        call(llm)
    assert caught.value.param == param
