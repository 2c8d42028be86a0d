"""A second opinion on the goldens: the Llama family's forward pass in float64 numpy.

It knows a checkpoint on disk (safetensors folder or GGUF file) and returns logits and hidden
states; it knows no cache, no batch, no dtype but float64, and imports neither jaxinfer nor torch.
Written for reading, straight from the model's equations. GGUF files are run in GGUF's own
convention, where the two numbers that rotate together are neighbours (rows of Q and K stay
permuted), so that an error in undoing the permutation cannot hide here.

    model = load("tests/golden/models/llama3")
    logits, hidden = forward(model, [1, 17, 42])    # [T, V], [L + 1, T, D]
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

SAFETENSORS_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}

GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A checkpoint in memory.

    Attributes:
        weights: Float64 arrays under Hugging Face names, in its `[out, in]` layout.
        num_heads: Query heads `N`.
        num_kv_heads: Key and value heads `K`; `N` is a multiple of it.
        head_dim: `H`.
        eps: Added to the mean square in every norm.
        inv_freq: Radians a position, one for each rotating pair `[H / 2]`.
        sliding_window: Positions a query sees, itself included; None for all before it.
        interleaved: True when dimensions `2i` and `2i + 1` rotate together (GGUF), False when
            `i` and `i + H / 2` do (Hugging Face).
    """

    weights: dict[str, np.ndarray]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    inv_freq: np.ndarray
    sliding_window: int | None
    interleaved: bool

    @property
    def num_layers(self) -> int:
        return sum(name.endswith(".input_layernorm.weight") for name in self.weights)


def load(path: str | Path) -> Model:
    """Load a folder in Hugging Face's layout or a GGUF file."""
    path = Path(path)
    return _load_folder(path) if path.is_dir() else _load_gguf(path)


def forward(model: Model, token_ids) -> tuple[np.ndarray, np.ndarray]:
    """Return logits `[T, V]` and the residual stream `[L + 1, T, D]`.

    Entry 0 of the stream is the embedding, entry `i` what layer `i` leaves, before the final norm.
    """
    w = model.weights
    x = w["model.embed_tokens.weight"][np.asarray(token_ids)]  # [T, D]
    hidden = [x]
    for i in range(model.num_layers):
        layer = f"model.layers.{i}."
        h = _rms_norm(x, w[layer + "input_layernorm.weight"], model.eps)
        x = x + _attention(model, layer + "self_attn.", h)
        h = _rms_norm(x, w[layer + "post_attention_layernorm.weight"], model.eps)
        gate = _linear(w, layer + "mlp.gate_proj", h)
        up = _linear(w, layer + "mlp.up_proj", h)
        x = x + _linear(w, layer + "mlp.down_proj", gate / (1 + np.exp(-gate)) * up)
        hidden.append(x)
    x = _rms_norm(x, w["model.norm.weight"], model.eps)
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return x @ head.T, np.stack(hidden)


def _attention(model: Model, prefix: str, x: np.ndarray) -> np.ndarray:
    T, N, K, H = len(x), model.num_heads, model.num_kv_heads, model.head_dim
    q = _linear(model.weights, prefix + "q_proj", x).reshape(T, N, H)
    k = _linear(model.weights, prefix + "k_proj", x).reshape(T, K, H)
    v = _linear(model.weights, prefix + "v_proj", x).reshape(T, K, H)
    q, k = _rotate(model, q), _rotate(model, k)
    k, v = np.repeat(k, N // K, axis=1), np.repeat(v, N // K, axis=1)  # [T, N, H]
    scores = np.einsum("tnh,snh->nts", q, k) / math.sqrt(H)
    distance = np.arange(T)[:, None] - np.arange(T)[None, :]  # of the query from the key
    seen = distance >= 0
    if model.sliding_window is not None:
        seen &= distance < model.sliding_window
    scores = np.where(seen, scores, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    out = np.einsum("nts,snh->tnh", p, v).reshape(T, N * H)
    return _linear(model.weights, prefix + "o_proj", out)


def _rotate(model: Model, x: np.ndarray) -> np.ndarray:
    """Turn each pair `(a, b)` by its angle: `(a cos - b sin, b cos + a sin)`."""
    angle = np.arange(len(x))[:, None, None] * model.inv_freq  # [T, 1, H / 2]
    cos, sin = np.cos(angle), np.sin(angle)
    if model.interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return np.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def _linear(weights: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    y = x @ weights[name + ".weight"].T
    bias = weights.get(name + ".bias")
    return y if bias is None else y + bias


def rope_inv_freq(config: dict[str, Any], head_dim: int) -> np.ndarray:
    """Return `[H / 2]` from `rope_parameters`, or from the older `rope_theta`, `rope_scaling`."""
    rope = {"rope_theta": config.get("rope_theta", 10000.0)}
    rope |= config.get("rope_scaling") or {}
    rope |= config.get("rope_parameters") or {}
    inv_freq = rope["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return inv_freq
    if kind == "linear":
        return inv_freq / rope["factor"]
    if kind == "llama3":
        # How many turns a pair makes within the context it was trained on decides: many turns keep
        # their frequency, few are slowed by `factor`, those between are blended.
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = rope["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
        keep = np.clip((turns - low) / (high - low), 0, 1)
        return inv_freq * (keep + (1 - keep) / rope["factor"])
    raise NotImplementedError(f"rope type must be default, linear or llama3, got {kind!r}")


def _load_folder(path: Path) -> Model:
    config = json.loads((path / "config.json").read_text())
    weights: dict[str, np.ndarray] = {}
    for file in sorted(path.glob("*.safetensors")):
        weights |= _read_safetensors(file)
    if config["tie_word_embeddings"]:
        assert "lm_head.weight" not in weights
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    return Model(
        weights=weights,
        num_heads=num_heads,
        num_kv_heads=config["num_key_value_heads"],
        head_dim=head_dim,
        eps=config["rms_norm_eps"],
        inv_freq=rope_inv_freq(config, head_dim),
        sliding_window=config.get("sliding_window"),
        interleaved=False,
    )


def _read_safetensors(file: Path) -> dict[str, np.ndarray]:
    """Read by the format's definition: a length, a JSON header, then the bytes."""
    blob = file.read_bytes()
    start = 8 + int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8:start])
    header.pop("__metadata__", None)
    arrays = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        a = np.frombuffer(blob[start + begin : start + end], SAFETENSORS_DTYPES[entry["dtype"]])
        if entry["dtype"] == "BF16":  # the upper half of a float32
            a = (a.astype("<u4") << 16).view("<f4")
        arrays[name] = a.reshape(entry["shape"]).astype(np.float64)
    return arrays


def _load_gguf(path: Path) -> Model:
    import gguf

    reader = gguf.GGUFReader(path)
    field = {name.removeprefix("llama."): f.contents() for name, f in reader.fields.items()}
    weights = {}
    for tensor in reader.tensors:
        # GGUF counts axes from the fastest; numpy from the slowest.
        shape = tuple(int(n) for n in reversed(tensor.shape))
        a = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        weights[_hf_name(tensor.name)] = a.reshape(shape).astype(np.float64)
    num_heads = field["attention.head_count"]
    head_dim = field.get("attention.key_length", field["embedding_length"] // num_heads)
    inv_freq = field["rope.freq_base"] ** -(np.arange(0, head_dim, 2) / head_dim)
    inv_freq = inv_freq / weights.pop("rope_freqs", 1.0)
    if field.get("rope.scaling.type") == "linear":
        inv_freq = inv_freq / field["rope.scaling.factor"]
    return Model(
        weights=weights,
        num_heads=num_heads,
        num_kv_heads=field["attention.head_count_kv"],
        head_dim=head_dim,
        eps=field["attention.layer_norm_rms_epsilon"],
        inv_freq=inv_freq,
        sliding_window=field.get("attention.sliding_window"),
        interleaved=True,
    )


def _hf_name(name: str) -> str:
    if name == "rope_freqs.weight":
        return "rope_freqs"
    if not name.startswith("blk."):
        stem, kind = name.rsplit(".", 1)
        return f"{GGUF_NAMES[stem]}.{kind}"
    _, layer, stem, kind = name.split(".")
    return f"model.layers.{layer}.{GGUF_NAMES[stem]}.{kind}"
