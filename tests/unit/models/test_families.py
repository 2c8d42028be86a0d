"""What configs may ask for: refused by name before any weight is read; families from outside."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxinfer.errors import ModelError
from jaxinfer.models import Family, decoder_config, family_of, register_family, registry
from jaxinfer.models.hf_layout import LLAMA_LIKE
from tests.engines import FAMILIES, GOLDEN

MODELS = Path(registry.__file__).parent


def config_of(name: str, **changes) -> dict:
    folder = GOLDEN if (GOLDEN / name).exists() else FAMILIES
    return json.loads((folder / name / "config.json").read_text()) | changes


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
    ],
)
def test_unsupported_settings_are_refused_by_name(name: str, changes: dict, named: str) -> None:
    config = config_of(name, **changes)
    with pytest.raises(ModelError, match=named):
        family_of(config).config(config)


def test_both_spellings_of_rope_mean_the_same() -> None:
    old = config_of("llama3")
    new = {k: v for k, v in old.items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {"rope_theta": old["rope_theta"], **old["rope_scaling"]}
    config = family_of(old).config
    assert config(old) == config(new)


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
    config = family_of(old).config
    assert config(old) == config(new)


@pytest.mark.parametrize("word", ["su", "yarn", "longrope"])
def test_phi_has_three_words_for_longrope(word: str) -> None:
    config = config_of("phi3_longrope")
    scaling = {**config["rope_scaling"], "type": word}
    translate = family_of(config).config
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
    assert family_of(mine).config(mine) == dataclasses.replace(
        family_of(theirs).config(theirs), logit_softcap=30.0
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
