"""What is captured is what the reference computes, whole, however the prompt was run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxinfer import SamplingParams
from jaxinfer.capture_files import CaptureFile, CaptureFolder
from jaxinfer.compilation import CompileGuard
from jaxinfer.errors import InvalidRequestError
from jaxinfer.hook_tap import HookTap
from jaxinfer.hooks import CapturedChunk, Captures, Hooks, select_positions
from tests.engines import make_engine
from tests.research.models import GREEDY, golden, llm_of, prompt_of, tokens

ROOT = Path(__file__).parents[2]
# float32 against float32 in another order of summation.
TOLERANCE = 2e-4
# The same wherever it does not matter: other names are another program.
LOOK = ["layers.1.resid_post", "logits"]
INSIDE = ("resid_post", "resid_mid", "attn_in", "attn_heads", "attn_out", "mlp_out", "mlp_hidden")


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("llama3", "auto"),
        ("gemma2", "auto"),
        pytest.param("llama3", "xla", marks=pytest.mark.slow),
        pytest.param("qwen3", "xla", marks=pytest.mark.slow),
        pytest.param("gemma2", "xla", marks=pytest.mark.slow),
    ],
)
def test_captures_equal_what_the_reference_computes(name, kernels):
    """In one chunk of 32 tokens or, by the C++ kernels' model, in chunks of 8."""
    buckets = {"xla": (32,), "auto": (8,)}[kernels]
    names = [f"layers.*.{what}" for what in (*INSIDE, "attn_weights")]
    ids = prompt_of(name)
    with llm_of(name, buckets, kernels=kernels) as llm:
        (output,) = llm.generate([ids], GREEDY, capture=[*names, "logits"], positions="prompt")
    captures = output.captures
    assert output.outputs[0].capture_positions.tolist() == list(range(len(ids)))
    for what in INSIDE:
        for layer, expected in enumerate(golden(name, f"hooks/{what}")):
            got = captures[f"layers.{layer}.{what}"]
            np.testing.assert_allclose(got, expected, atol=TOLERANCE, rtol=TOLERANCE, err_msg=what)
    for layer, expected in enumerate(golden(name, "hooks/attn_weights")):
        got = captures[f"layers.{layer}.attn_weights"]
        np.testing.assert_allclose(got, np.moveaxis(expected, 0, 1), atol=TOLERANCE)
    np.testing.assert_allclose(captures["logits"], golden(name, "medium_logits"), atol=TOLERANCE)


def test_capturing_changes_no_token_and_covers_generated_ones(llama):
    prompts = [prompt_of("llama3"), prompt_of("llama3", "short"), prompt_of("llama3", "long")]
    plain = llama.generate(prompts, GREEDY)
    outputs = llama.generate(prompts, GREEDY, capture=LOOK)
    assert tokens(outputs) == tokens(plain)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = output.outputs[0].token_ids
        n = len(prompt) + len(ids) - 1
        assert output.outputs[0].capture_positions.tolist() == list(range(n))
        greedy = output.captures["logits"][len(prompt) - 1 :].argmax(-1)
        assert greedy.tolist() == ids


def test_a_cached_prefix_is_computed_again_and_leaves_no_hole(llama):
    ids = prompt_of("llama3", "long")
    (cold,) = llama.generate([ids], GREEDY, capture=LOOK)
    llama.generate([ids], GREEDY)
    (plain,) = llama.generate([ids], GREEDY)
    assert plain.num_cached_tokens
    (warm,) = llama.generate([ids], GREEDY, capture=LOOK)
    for name in LOOK:
        assert len(warm.captures[name]) == len(ids) + 3
        np.testing.assert_array_equal(warm.captures[name], cold.captures[name])


def test_preempted_requests_have_every_position_once():
    """Pages for two at full length: some of four have to give way in the middle."""
    shapes = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 128}
    engine = make_engine("llama3", (32,), num_pages=16, **shapes)
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    chunks: dict[str, list[CapturedChunk]] = {"a": [], "b": [], "c": [], "d": []}
    for name in chunks:
        ids = [ord(name), *prompt_of("llama3", "short")]
        hooks = Hooks(capture=("embed", "layers.1.attn_weights"))
        engine.add_request(name, ids, params, hooks=hooks)
    while engine.has_unfinished():
        for output in engine.step():
            chunks[output.request_id] += output.captured
    assert engine.stats.num_preemptions
    n = 1 + len(prompt_of("llama3", "short")) + 47
    for parts in chunks.values():
        captures = Captures.join(parts, ("embed", "layers.1.attn_weights"), n)
        assert captures.positions.tolist() == list(range(n))
        weights = captures.arrays["layers.1.attn_weights"]
        assert weights.shape == (n, 8, n)
        np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-5)
        assert not np.triu(weights[:, 0], 1).any()


def test_positions_choose_tokens(llama):
    ids = prompt_of("llama3")
    n = len(ids)
    (whole,) = llama.generate([ids], GREEDY, capture=LOOK)
    for positions, expected in {
        "last": [n - 1],
        "generated": [n, n + 1, n + 2],
        -2: [n - 2],
        (0, 5, n + 1): [0, 5, n + 1],
        slice(2, 9, 3): [2, 5, 8],
    }.items():
        (some,) = llama.generate([ids], GREEDY, capture=LOOK, positions=positions)
        assert some.outputs[0].capture_positions.tolist() == expected
        np.testing.assert_allclose(
            some.captures[LOOK[0]], whole.captures[LOOK[0]][expected], atol=1e-5
        )
    with pytest.raises(InvalidRequestError, match="before the prompt"):
        select_positions([-n - 1], 0, n, n)


def test_unknown_names_are_refused_with_what_there_is(llama):
    with pytest.raises(InvalidRequestError, match="did you mean 'layers.1.resid_post'") as refused:
        llama.generate([[1, 2]], GREEDY, capture=["layers.1.resid_pots"])
    assert refused.value.param == "capture"
    for name in ("embed", "layers.*.attn_weights", "logits"):
        assert name in str(refused.value)
    with pytest.raises(InvalidRequestError, match="layers 0 to 1"):
        llama.generate([[1, 2]], GREEDY, capture=["layers.7.resid_post"])


def test_without_hooks_the_programs_are_those_of_a_model_without_taps():
    """A tap that looks at nothing traces nothing; one that looks adds outputs."""
    engine = make_engine("llama3", (8,), max_num_batched_tokens=8)
    programs = engine.runner.programs
    hooks = Hooks(capture=("layers.0.resid_post",))
    params = SamplingParams(max_tokens=2, temperature=0.0)
    before = programs.compiled.lower(("backbone", 8)).as_text()
    engine.add_request("a", [1, 2, 3], params, hooks=hooks)
    while engine.has_unfinished():
        engine.step()
    assert programs.compiled.lower(("backbone", 8)).as_text() == before

    step, layout = programs.backbone_step, programs.config.layout(8)

    def lowered(names: frozenset[str]) -> str:
        def run(leaves, cache, packed, last):
            taps = []

            def make_tap(batch):
                taps.append(HookTap(names, positions=batch.positions))
                return taps[0]

            return *step(layout, leaves, cache, packed, last, make_tap), taps[0].captured

        jitted = programs.jit_backbone(run, dict.fromkeys(names, programs.whole))
        return jitted.lower(*programs.backbone_arguments(layout)).as_text()

    nothing = lowered(frozenset()).replace("jit_run", "jit_backbone_step")
    assert nothing == before
    assert lowered(frozenset({"layers.0.mlp_hidden"})) != before


def test_captures_do_not_count_as_compilations_in_service(llama):
    guard = CompileGuard()
    ids = prompt_of("llama3", "short")
    llama.generate([ids], GREEDY)
    with guard.watching():
        llama.generate([ids], GREEDY, capture=["layers.1.q"])
    guard.close()
    assert guard.count == 0


def test_captures_go_to_disk_as_requests_end(llama, tmp_path):
    prompts = [prompt_of("llama3"), prompt_of("llama3", "short")]
    in_memory = llama.generate(prompts, GREEDY, capture=LOOK)
    on_disk = llama.generate(prompts, GREEDY, capture=LOOK, capture_to=tmp_path / "acts")
    files = sorted(path.name for path in (tmp_path / "acts").iterdir())
    assert files == ["000000-0.npz", "000001-0.npz"]
    for i, (a, b) in enumerate(zip(in_memory, on_disk, strict=True)):
        assert list(a.captures) == list(b.captures)
        for name, values in a.captures.items():
            np.testing.assert_array_equal(values, b.captures[name])
        again = CaptureFile(tmp_path / "acts" / files[i])
        assert again.positions.tolist() == a.outputs[0].capture_positions.tolist()


def test_bfloat16_captures_keep_their_type(tmp_path):
    values = np.arange(6, dtype=np.float32).astype(ml_dtypes.bfloat16).reshape(2, 3) / 7
    captures = Captures(positions=np.arange(2), arrays={"layers.0.q": values})
    kept = CaptureFolder(tmp_path).keeper(3)(1, captures)
    again = CaptureFile(tmp_path / "000003-1.npz")
    for arrays in (kept.arrays, again):
        assert list(arrays) == ["layers.0.q"]
        assert arrays["layers.0.q"].dtype == ml_dtypes.bfloat16
        assert arrays["layers.0.q"].tobytes() == values.tobytes()
    assert kept.num_saved_bytes > values.nbytes


@pytest.mark.parametrize(
    "settings",
    [pytest.param(s, marks=pytest.mark.slow) for s in ({}, {"kv_cache_dtype": "int8"})],
)
def test_quantized_weights_can_be_looked_into(settings):
    ids = prompt_of("llama3")
    with llm_of("llama3", quantization="int8", **settings) as llm:
        (output,) = llm.generate([ids], GREEDY, capture=["layers.1.attn_weights", "logits"])
    weights = output.captures["layers.1.attn_weights"]
    np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-5)
    exact = golden("llama3", "hooks/attn_weights")[1]
    # int8 weights and keys: close to the float32 reference, and not it.
    distance = np.abs(weights[: len(ids), :, : len(ids)] - np.moveaxis(exact, 0, 1)).max()
    assert 1e-6 < distance < 0.2
    assert output.captures["logits"][-1].argmax() == output.outputs[0].token_ids[-1]


def test_two_devices_capture_what_one_does():
    process = subprocess.run(
        [sys.executable, "-m", "tests.research.two_devices"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    report = json.loads(process.stdout)
    assert report["devices"] == 2
    for name in ("resid_mid", "attn_heads", "attn_weights", "mlp_hidden"):
        expected = golden("llama3", f"hooks/{name}")[1]
        expected = np.moveaxis(expected, 0, 1) if name == "attn_weights" else expected
        np.testing.assert_allclose(
            np.array(report[f"layers.1.{name}"]), expected, atol=TOLERANCE, err_msg=name
        )
    np.testing.assert_allclose(
        np.array(report["ablated"]), golden("llama3", "hooks/ablated_logits"), atol=TOLERANCE
    )
