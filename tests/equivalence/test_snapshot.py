"""A batch that is saved in the middle and restored elsewhere goes on with the same tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import step_timer
from jaxinfer.engine import Engine
from jaxinfer.errors import InvalidRequestError, SnapshotError
from jaxinfer.fingerprint import checksum
from jaxinfer.request import Pooling, RequestStatus
from jaxinfer.sampling_params import SamplingParams
from tests.engines import Work, make_engine, run_alone
from tests.equivalence.test_logits_processors import SHAPES, counting, params
from tests.unit.faces.tiny import tiny_llm

SET = (counting(0),)


@pytest.fixture(autouse=True)
def all_the_time_in_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_timer, "MAX_DISPATCH_S", 1e6)


def engine_with(num_decode_steps: int = 8, **settings) -> Engine:
    engine = make_engine("smollm2", logits_processors=SET, **SHAPES, **settings)
    engine._timer = step_timer.StepTimer(num_decode_steps)
    return engine


def mixed_work() -> dict[str, Work]:
    rng = np.random.default_rng(11)
    work = {}
    for i in range(14):
        prompt = tuple(int(t) for t in rng.integers(3, 90, int(rng.integers(4, 40))))
        n = int(rng.integers(20, 50))
        kinds = [
            params(max_tokens=n),
            params(max_tokens=n, temperature=1.0, top_p=0.9, logit_bias={7: 2.0}, min_tokens=4),
            params(counting(30 + i, 2), max_tokens=n),
            params(max_tokens=n, temperature=0.8, frequency_penalty=0.4, prompt_logprobs=1),
        ]
        work[f"r{i}"] = Work(prompt, kinds[i % 4], seed=70 + i)
    return work


@pytest.fixture(scope="module")
def expected():
    work = mixed_work()
    return work, run_alone(engine_with(1, overlap=False, enable_prefix_caching=False), work)


def finish(engine: Engine, tokens: dict[str, list[int]]) -> dict[str, list[int]]:
    while engine.has_unfinished():
        for output in engine.step():
            tokens[output.request_id] += output.new_token_ids
    engine.check_integrity()
    return tokens


@pytest.mark.parametrize("num_decode_steps", [1, 8])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
def test_restored_requests_go_on_with_the_same_tokens(expected, overlap, num_decode_steps):
    work, whole = expected
    engine = engine_with(num_decode_steps, overlap=overlap, num_pages=20)
    tokens: dict[str, list[int]] = {name: [] for name in work}
    for name, w in work.items():
        engine.add_request(name, w.prompt, w.params, seed=w.seed)
    seen = set()
    snapshots = []
    while engine.has_unfinished():
        for output in engine.step():
            tokens[output.request_id] += output.new_token_ids
        live = engine.scheduler.live
        kinds = {(r.status, r.num_output_tokens > 0) for r in live}
        if len(snapshots) < 6 and (kinds - seen or engine.stats.num_steps % 12 == 0):
            seen |= kinds
            done = {name: list(t) for name, t in tokens.items() if name not in _ids(live)}
            snapshots.append((engine.snapshot(), done))
    # Saving has disturbed nobody.
    assert tokens == whole
    running, preempted = (RequestStatus.RUNNING, True), (RequestStatus.WAITING, True)
    assert {running, preempted, (RequestStatus.WAITING, False)} <= seen
    for data, done in snapshots:
        other = engine_with(8, num_pages=64)
        known = {name: list(so_far) for name, so_far in other.restore(data).items()}
        got = finish(other, known)
        # What ended in the step that the snapshot waited for, the first engine told of.
        assert {**done, **got}.items() <= whole.items() and len(got) > 0


def _ids(requests) -> set[str]:
    return {request.request_id for request in requests}


def test_a_request_for_a_vector_starts_over():
    engine = engine_with()
    prompt = tuple(range(5, 90))
    p = SamplingParams(max_tokens=1, temperature=0.0)
    engine.add_request("v", prompt, p, pooling=Pooling.MEAN)
    engine.step()
    data = engine.snapshot()
    vectors = []
    other = engine_with()
    other.restore(data)
    for e in (engine, other):
        while e.has_unfinished():
            vectors += [output.pooled for output in e.step() if output.finished]
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-5)


@pytest.fixture
def snapshot() -> bytes:
    engine = engine_with()
    engine.add_request("a", (5, 6, 7), params(counting(9), max_tokens=30))
    for _ in range(3):
        engine.step()
    data = engine.snapshot()
    engine.abort("a")
    return data


def test_a_damaged_snapshot_is_refused(snapshot):
    engine = engine_with()
    for bad in (snapshot[:-1], snapshot[:200] + b"9" + snapshot[201:], b"", b"GIF89a"):
        with pytest.raises(SnapshotError):
            engine.restore(bad)
    assert not engine.has_unfinished()


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        ("llama2", {}, "model was .* weights was"),
        ("smollm2", {"max_model_len": 120}, "max_model_len was 128 and is 120"),
    ],
)
def test_another_model_or_configuration_is_refused_by_name(snapshot, model, settings, message):
    engine = make_engine(model, **{**SHAPES, **settings})
    with pytest.raises(SnapshotError, match=message):
        engine.restore(snapshot)
    assert not engine.has_unfinished()


def test_an_engine_with_live_requests_or_without_the_processor_is_refused(snapshot):
    engine = engine_with()
    engine.add_request("b", (5, 6), params())
    with pytest.raises(SnapshotError, match="live requests"):
        engine.restore(snapshot)
    engine.abort("b")
    other = make_engine("smollm2", **SHAPES)
    with pytest.raises(SnapshotError, match=r"count_up .*logits_processors"):
        other.restore(snapshot)


def test_the_weights_digest_sees_one_bit_and_the_order():
    x = jnp.arange(24, dtype=jnp.float32).reshape(4, 6)
    digest = jax.jit(lambda *leaves: checksum(leaves))
    values = [x, x.at[2, 3].add(1e-6), x.at[0].set(x[1]).at[1].set(x[0]), x[:, ::-1]]
    assert len({int(digest(v)) for v in values}) == len(values)
    assert int(digest(x, x + 1)) != int(digest(x + 1, x))


class StopHereError(Exception):
    """Ends a batch."""


def outputs_of(outputs):
    return [
        (
            o.prompt_logprobs and len(o.prompt_logprobs),
            [(s.text, s.token_ids, s.finish_reason, s.stop_reason, s.logprobs) for s in o.outputs],
        )
        for o in outputs
    ]


@pytest.mark.parametrize("at", [1, 4, 9])
def test_a_batch_of_texts_ends_as_if_it_had_never_been_cut(at):
    base = {"max_tokens": 24, "ignore_eos": True}
    prompts = ["The quick", "brown fox", "jumps over", "the lazy dog"] * 3
    asked = [
        SamplingParams(temperature=0, logprobs=2, **base),
        SamplingParams(temperature=1.0, seed=5, n=3, **base),
        SamplingParams(temperature=1.0, seed=6, stop=["e", "a"], **base),
        SamplingParams(temperature=0, prompt_logprobs=1, logits_processors=[counting(40)], **base),
    ] * 3
    settings = {"logits_processors": SET, "seed": 3, "max_waiting": 4, **SHAPES}
    with tiny_llm(**settings) as llm:
        whole = llm.generate(prompts, asked)
    saved: list[bytes] = []
    with tiny_llm(**settings) as llm:
        count = iter(range(1000))

        def on_step() -> None:
            if next(count) == at:
                saved.append(llm.snapshot())
                raise StopHereError

        with pytest.raises(StopHereError):
            llm.generate(prompts, asked, on_step=on_step)
        assert not llm._engine.has_unfinished()
    with tiny_llm(**settings) as llm:
        restored = llm.restore(saved[0])
        assert [o.prompt for o in restored] == prompts
        for a, b in zip(outputs_of(restored), outputs_of(whole), strict=True):
            assert a[0] == b[0]
            for mine, theirs in zip(a[1], b[1], strict=True):
                assert mine[:4] == theirs[:4]
                assert (mine[4] is None) == (theirs[4] is None)
                for x, y in zip(mine[4] or (), theirs[4] or (), strict=True):
                    assert x.keys() == y.keys()
                    got, want = ([lp.logprob for lp in e.values()] for e in (x, y))
                    np.testing.assert_allclose(got, want, atol=1e-5)
        assert llm.generate(prompts[:1], asked[:1])[0].outputs[0].text == whole[0].outputs[0].text
        with pytest.raises(InvalidRequestError, match="on_step"):
            llm.snapshot()
