"""The tiny random checkpoints: what each one is, its weights from a seed, and its files on disk.

It knows shapes, seeds and the two file formats; it knows no forward pass and no torch. Weights are
scaled so that logits spread over a few units and what attention and the MLP add outweighs the
embedding: otherwise a tied model repeats its last token for ever.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}

VOCAB_SIZE = 320
SPECIAL_TOKENS = ("<|endoftext|>", "<|begin_of_text|>", "<|im_end|>", "<|im_start|>")
PAD, BOS, EOS, _ = range(4)

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# What the tokenizer's merges are learnt from, and the text of the longest prompt.
CORPUS = (
    "A request comes in as text, becomes tokens, waits its turn, and leaves as text again. ",
    "The cache keeps what was computed, so that nothing is computed twice; pages are counted. ",
    "Time flies like an arrow, and the river runs from the mountain to the sea.\n",
)
TEXT = "The river runs to the sea; the cache keeps what 7 requests computed: 雪, über 🙂."

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Small, so that every pair class exists at head dim 8 and prompts run past it.
    "original_max_position_embeddings": 32,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """One checkpoint in Hugging Face's layout.

    Attributes:
        name: Its folder, and its golden file's stem.
        config: What `config.json` says beyond the common part of `hf_config`.
        dtype: Of the stored weights.
        num_shards: Files the weights are spread over; more than 1 writes an index.
    """

    name: str
    config: dict[str, Any]
    dtype: str = "bfloat16"
    num_shards: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class GGUFSpec:
    """A GGUF file made of the weights of a `Spec`, its 2-D tensors stored as `kind`."""

    name: str
    source: str
    kind: gguf.GGMLQuantizationType


def _shape(hidden: int, heads: int, kv_heads: int, ff: int, layers: int, **more) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ff,
        "num_hidden_layers": layers,
        **more,
    }


# Between them: both spellings of RoPE's configuration and the older `type`, both spellings of
# dtype, three stored dtypes, one file and an index, tied and untied, every ratio of heads we meet.
SPECS = (
    Spec(
        name="llama2",
        config=_shape(64, 4, 4, 96, 2, rope_theta=10000.0, tie_word_embeddings=False),
        dtype="float16",
    ),
    Spec(
        name="llama3",
        config=_shape(64, 8, 2, 96, 2, rope_theta=500000.0, rope_scaling=LLAMA3_ROPE),
    ),
    Spec(
        name="llama_linear",
        config=_shape(
            32, 4, 2, 64, 2, rope_theta=10000.0, rope_scaling={"type": "linear", "factor": 4.0}
        ),
        num_shards=2,
    ),
    Spec(
        name="llama_bias",
        config=_shape(
            64,
            4,
            2,
            96,
            2,
            rope_parameters={"rope_type": "default", "rope_theta": 20000.0},
            attention_bias=True,
            mlp_bias=True,
            rms_norm_eps=1e-6,
        ),
    ),
    Spec(
        name="llama_head_dim",
        config=_shape(
            32,
            4,
            2,
            64,
            2,
            head_dim=24,
            rope_parameters={**LLAMA3_ROPE, "rope_theta": 500000.0},
            tie_word_embeddings=False,
        ),
        dtype="float32",
    ),
    Spec(
        name="mistral",
        config=_shape(
            64,
            4,
            2,
            96,
            2,
            architectures=["MistralForCausalLM"],
            model_type="mistral",
            sliding_window=16,
            rope_theta=10000.0,
            tie_word_embeddings=False,
        ),
    ),
    Spec(name="smollm2", config=_shape(144, 9, 3, 64, 2, rope_theta=100000.0)),
)

GGUF_SPECS = (
    GGUFSpec(name="llama_linear_f32", source="llama_linear", kind=gguf.GGMLQuantizationType.F32),
    GGUFSpec(name="llama3_f16", source="llama3", kind=gguf.GGMLQuantizationType.F16),
    GGUFSpec(name="llama2_q8_0", source="llama2", kind=gguf.GGMLQuantizationType.Q8_0),
    GGUFSpec(name="llama_bias_q8_0", source="llama_bias", kind=gguf.GGMLQuantizationType.Q8_0),
)


def hf_config(spec: Spec) -> dict[str, Any]:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        # "dtype" is the newer spelling; transformers 4 wrote "torch_dtype".
        ("dtype" if "rope_parameters" in spec.config else "torch_dtype"): spec.dtype,
    }
    return config | spec.config


def prompts(tokenizer: tokenizers.Tokenizer) -> dict[str, list[int]]:
    """Return the prompts of every tiny golden: 5 and 24 random tokens, and `TEXT`."""
    rng = np.random.default_rng(7)
    first_plain = len(SPECIAL_TOKENS)
    random = {"short": 4, "medium": 23}
    ids = {
        name: [BOS, *rng.integers(first_plain, VOCAB_SIZE, n).tolist()]
        for name, n in random.items()
    }
    return ids | {"long": tokenizer.encode(TEXT).ids}


def random_weights(config: dict[str, Any], dtype: str, seed: int) -> dict[str, np.ndarray]:
    """Return float32 weights that `dtype` holds exactly, under Hugging Face names."""
    rng = np.random.default_rng(seed)
    D, V = config["hidden_size"], config["vocab_size"]
    tied = config["tie_word_embeddings"]
    weights = {"model.embed_tokens.weight": rng.normal(0, 3 / math.sqrt(D) if tied else 1, (V, D))}
    for i in range(config["num_hidden_layers"]):
        for name, a in _random_layer(config, rng):
            weights[f"model.layers.{i}.{name}"] = a
    weights["model.norm.weight"] = rng.uniform(0.5, 1.5, D)
    if not tied:
        weights["lm_head.weight"] = rng.normal(0, 3 / math.sqrt(D), (V, D))
    return {name: a.astype(DTYPES[dtype]).astype(np.float32) for name, a in weights.items()}


def _random_layer(
    config: dict[str, Any], rng: np.random.Generator
) -> Iterator[tuple[str, np.ndarray]]:
    D, F, N = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    K, H = config["num_key_value_heads"], config.get("head_dim", D // N)
    # Sharper than the usual initialisation, so that attention picks positions out.
    linears = {
        "self_attn.q_proj": (N * H, D, 1.5),
        "self_attn.k_proj": (K * H, D, 1.5),
        "self_attn.v_proj": (K * H, D, 1.5),
        "self_attn.o_proj": (D, N * H, 1.5),
        "mlp.gate_proj": (F, D, 1.5),
        "mlp.up_proj": (F, D, 1.5),
        "mlp.down_proj": (D, F, 1.5),
    }
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{name}.weight", rng.uniform(0.5, 1.5, D)
    for name, (out, fan_in, gain) in linears.items():
        yield f"{name}.weight", rng.normal(0, gain / math.sqrt(fan_in), (out, fan_in))
        if config.get("attention_bias" if "attn" in name else "mlp_bias"):
            yield f"{name}.bias", rng.normal(0, 0.5, out)


def make_tokenizer() -> tokenizers.Tokenizer:
    """Return a byte-level BPE of `VOCAB_SIZE` tokens that puts BOS in front."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    bos = SPECIAL_TOKENS[BOS]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, BOS)]
    )
    return tokenizer


def write_folder(
    directory: Path, spec: Spec, weights: dict[str, np.ndarray], tokenizer: tokenizers.Tokenizer
) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    eos = {"bos_token_id": BOS, "eos_token_id": [EOS, PAD], "pad_token_id": PAD}
    documents = {
        "config.json": hf_config(spec),
        "generation_config.json": eos,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL_TOKENS[BOS],
            "eos_token": SPECIAL_TOKENS[EOS],
            "pad_token": SPECIAL_TOKENS[PAD],
            "chat_template": CHAT_TEMPLATE,
            "model_max_length": 256,
        },
    }
    for name, document in documents.items():
        (directory / name).write_text(json.dumps(document, indent=1) + "\n")
    (directory / "tokenizer.json").write_text(tokenizer.to_str() + "\n")
    if spec.num_shards == 1:
        _write_safetensors(directory / "model.safetensors", weights, spec.dtype)
        return
    names = sorted(weights)
    weight_map = {}
    for i in range(spec.num_shards):
        file = f"model-{i + 1:05d}-of-{spec.num_shards:05d}.safetensors"
        part = names[i :: spec.num_shards]
        _write_safetensors(directory / file, {n: weights[n] for n in part}, spec.dtype)
        weight_map |= dict.fromkeys(part, file)
    size = sum(a.size for a in weights.values()) * (4 if spec.dtype == "float32" else 2)
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    text = json.dumps(index, indent=1, sort_keys=True)
    (directory / "model.safetensors.index.json").write_text(text + "\n")


def _write_safetensors(file: Path, weights: dict[str, np.ndarray], dtype: str) -> None:
    stored = {name: a.astype(DTYPES[dtype]) for name, a in sorted(weights.items())}
    save_file(stored, file, metadata={"format": "pt"})
