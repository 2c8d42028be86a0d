"""What configs may ask for: refused by name before any weight is read; families from outside."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxinfer.errors import ModelError
from jaxinfer.models import (
    Family,
    ModelConfig,
    decoder_config,
    family_of,
    register_family,
    registry,
)
from jaxinfer.models.hf_layout import LLAMA_LIKE
from tests.engines import FAMILIES, GOLDEN

MODELS = Path(registry.__file__).parent


def config_of(name: str, **changes) -> dict:
    folder = GOLDEN if (GOLDEN / name).exists() else FAMILIES
    return json.loads((folder / name / "config.json").read_text()) | changes


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip


def rope(**values) -> dict:
    return {"rope_scaling": values}


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("llama2", {"hidden_act": "xielu"}, "hidden_act 'xielu'"),
        ("llama2", {"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
        ("llama2", rope(rope_type="mrope"), "rope type 'mrope'"),
        ("llama2", rope(type="linear"), "factor"),
        ("llama2", rope(rope_type="yarn", factor=2.0, mrope_section=[1]), "mrope_section"),
        ("llama2", rope(rope_type="llama3", factor=8.0), "low_freq_factor, high_freq_factor"),
        ("llama2", rope(type="longrope", short_factor=[1], long_factor=[1]), "short_factor"),
        ("llama2", {"hidden_size": None, "vocab_size": None}, "vocab_size, hidden_size"),
        ("llama2", {"num_key_value_heads": 3}, "num_key_value_heads"),
        ("llama2", {"is_encoder_decoder": True}, "is_encoder_decoder"),
        ("qwen3", {"layer_types": ["linear_attention"] * 3}, "linear_attention"),
        ("qwen3", {"layer_types": ["full_attention"]}, "sliding_windows"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("phi3", {"attention_bias": True}, "attention_bias"),
        ("phi3", {"partial_rotary_factor": 0.4}, "even number"),
        ("cohere2", {"use_gated_activation": False}, "use_gated_activation"),
        ("cohere2", {"position_embedding_type": "alibi"}, "'alibi'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("llama2", {"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ("llama2", {"architectures": "LlamaForCausalLM"}, "architectures must be a list of names"),
        ("llama2", {"quantization_config": "fp8"}, "quantization_config must be an object"),
        ("llama2", {"quantization_config": {"quant_method": "fp8"}}, "'fp8'"),
        ("llama2", {"num_hidden_layers": 10**9}, "num_hidden_layers must be a whole number"),
        (
            "llama2",
            rope(rope_type="linear", factor=0),
            r"rope_scaling\.factor must be a number above",
        ),
        ("llama2", rope(rope_type="yarn", factor=2.0, truncate=0), r"rope_scaling\.truncate"),
        (
            "llama3",
            {"rope_parameters": None, "rope_scaling": LLAMA3 | {"high_freq_factor": 1}},
            "high_freq_factor",
        ),
        (
            "gemma3_linear",
            {"rope_parameters": {"full_attention": {"factor": -1}}},
            "full_attention",
        ),
        ("gemma3_linear", {"sliding_window": None}, "no sliding_window is set"),
        ("gpt_oss", {"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
        ("gpt_oss", {"quantization_config": {"bits": 4}}, "quant_method='unknown'"),
        ("mixtral", {"num_experts_per_tok": 9}, r"num_experts_per_tok \(9\)"),
        ("deepseek_v3", {"n_group": 3}, "16 experts in 3 groups"),
        ("deepseek_v3", {"topk_group": 5}, "visit 5"),
        ("deepseek_v3", {"topk_group": 1, "num_experts_per_tok": 5}, "1 groups of 4"),
    ],
)
def test_unsupported_settings_are_refused_by_name(name: str, changes: dict, named: str) -> None:
    config = config_of(name, **changes)
    with pytest.raises(ModelError, match=named):
        family_of(config).translate(config)


WRONG = ("x", "", -1, 0, -0.5, 1.5, 10**12, [], ["x"], [-1], {}, {"a": 1}, True, False, None)
WRONG += (float("nan"), float("inf"))
FUZZED = (
    "llama3", "llama_dynamic", "llama_yarn_options", "qwen3_moe_mixed", "gemma2", "gemma3_linear",
    "phi3_longrope", "smollm3", "olmo3", "granite", "glm4", "cohere2", "stablelm", "gpt_neox",
    "gpt2", "mixtral", "olmoe", "gpt_oss", "deepseek_v3",
)  # fmt: skip
NOT_IN_USE = {"model_type", "torch_dtype", "initializer_range", "use_cache"}


def every_wrong_value(config: dict) -> Iterator[tuple[str, dict]]:
    for key, value in config.items():
        if isinstance(value, dict):
            for name, changed in every_wrong_value(value):
                yield f"{key}.{name}", config | {key: changed}
        for wrong in WRONG if key not in NOT_IN_USE else ():
            yield f"{key}={wrong!r}", config | {key: wrong}


@pytest.mark.parametrize("name", FUZZED)
def test_a_wrong_value_is_a_model_error_or_makes_a_sound_model(name: str) -> None:
    """Neither another error nor a model of zero heads, NaN frequencies, a window of -1."""
    for what, config in every_wrong_value(config_of(name)):
        try:
            model = family_of(config).translate(config)
        except ModelError:
            continue
        assert_sound(model.for_length(100), f"{name}: {what}")


def assert_sound(model: ModelConfig, what: str) -> None:
    sizes = [
        model.vocab_size,
        model.hidden_size,
        model.intermediate_size,
        model.head_dim,
        model.num_hidden_layers,
        model.num_attention_heads,
        model.num_key_value_heads,
        model.max_position_embeddings,
        *(window for window in model.sliding_windows if window is not None),
    ]
    assert all(type(size) is int and size > 0 for size in sizes), what
    scales = [
        model.norm.eps,
        *(cap for cap in (model.attention_softcap, model.logit_softcap) if cap),
    ]
    for rope in {rope for rope in model.ropes if rope is not None}:
        scales += [*rope.inverse_frequencies(), rope.attention_factor]
    assert np.isfinite(scales).all() and min(scales) > 0, what
    assert isinstance(hash(model), int), what


def test_a_family_may_give_a_key_another_meaning() -> None:
    def config(hf):
        return decoder_config({**hf, "sliding_window": None}, sliding_windows=hf["sliding_window"])

    mine = config_of("llama2", sliding_window=(None, 4, 4))
    theirs = family_of(mine)
    with pytest.raises(ModelError, match="sliding_window must be"):
        dataclasses.replace(theirs, config=config).translate(mine)
    own = dataclasses.replace(theirs, config=config, own_keys=("sliding_window",))
    mine["num_hidden_layers"] = 3
    assert own.translate(mine).sliding_windows == (None, 4, 4)


def test_all_wrong_values_are_named_at_once() -> None:
    config = config_of("llama2", rms_norm_eps=None, vocab_size=-3, tie_word_embeddings="no")
    with pytest.raises(ModelError, match="vocab_size .*tie_word_embeddings .*rms_norm_eps"):
        family_of(config).translate(config)


def test_qwen3_moes_window_is_in_every_layer() -> None:
    """As the reference has it, which reads no `max_window_layers` here."""
    config = config_of("qwen3_moe", use_sliding_window=True, sliding_window=16)
    assert family_of(config).translate(config).sliding_windows == (16, 16)


def test_both_spellings_of_rope_mean_the_same() -> None:
    old = config_of("llama3")
    new = {k: v for k, v in old.items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {"rope_theta": old["rope_theta"], **old["rope_scaling"]}
    translate = family_of(old).translate
    assert translate(old) == translate(new)


def test_nested_rope_parameters_mean_the_same() -> None:
    old = config_of("gemma3_linear")
    gone = ("rope_theta", "rope_scaling", "rope_local_base_freq")
    new = {k: v for k, v in old.items() if k not in gone}
    new["rope_parameters"] = {
        "full_attention": {"rope_theta": old["rope_theta"], **old["rope_scaling"]},
        "sliding_attention": {
            "rope_theta": old["rope_local_base_freq"],
            "rope_type": "default",
        },
    }
    translate = family_of(old).translate
    assert translate(old) == translate(new)


@pytest.mark.parametrize("word", ["su", "yarn", "longrope"])
def test_phi_has_three_words_for_longrope(word: str) -> None:
    config = config_of("phi3_longrope")
    scaling = {**config["rope_scaling"], "type": word}
    translate = family_of(config).translate
    assert translate(config | {"rope_scaling": scaling}) == translate(config)


@pytest.fixture
def families() -> Iterator[None]:
    """The registry, put back afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_FAMILIES", list(registry.BUILT_IN))
        yield


def test_a_family_is_registered_from_outside_in_a_few_lines(families: None) -> None:
    def config(hf):
        return decoder_config(hf, logit_softcap=30.0)

    register_family(
        Family(
            name="Mine",
            architectures=("MineForCausalLM",),
            model_types=("mine",),
            config=config,
            weights=LLAMA_LIKE,
        )
    )
    mine = config_of("llama2", architectures=["MineForCausalLM"])
    assert family_of(mine).name == "Mine"
    theirs = config_of("llama2")
    assert family_of(mine).translate(mine) == dataclasses.replace(
        family_of(theirs).translate(theirs), logit_softcap=30.0
    )


def test_the_latest_registration_of_an_architecture_wins(families: None) -> None:
    theirs = family_of(config_of("llama2"))
    mine = dataclasses.replace(theirs, name="My Llama")
    register_family(mine)
    assert family_of(config_of("llama2")) is mine


def test_a_family_is_one_short_file() -> None:
    """DeepSeek's has an attention of its own to fill."""
    modules = {family.config.__module__ for family in registry.BUILT_IN}
    for module in modules - {"jaxinfer.models.deepseek"}:
        file = MODELS / f"{module.rpartition('.')[2]}.py"
        assert len(file.read_text().splitlines()) <= 120, file.name
