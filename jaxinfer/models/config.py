"""What a decoder is made of. Families translate a Hugging Face config into this record."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from jaxinfer.errors import ModelError
from jaxinfer.nn.latent_attention import LatentConfig
from jaxinfer.nn.mlp import ACTIVATIONS
from jaxinfer.nn.moe import MoEConfig
from jaxinfer.nn.norm import NormConfig
from jaxinfer.nn.rope_scaling import RopeConfig

QK_NORMS = (None, "shared", "per_head", "across_heads")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of a decoder. Hashable, static under jit.

    Attributes:
        max_position_embeddings: The longest context that the model was made for.
        tie_word_embeddings: The head is the embedding.
        learned_positions: Positions are a table that is added to the embedding (GPT-2).
        ropes: Per layer, its rotary positions; None for a layer without. Empty: no layer has any.
        sliding_windows: Per layer, the keys a token sees (itself included), None for all. Empty:
            no layer has one.
        attention_bias: Biases of the query, key and value projections.
        attention_output_bias: Bias of the attention output projection.
        attention_scale: Multiplies the scores; None for `head_dim ** -0.5`.
        attention_softcap: Scores become `cap * tanh(score / cap)`.
        latent: Attention is to latents of these sizes (DeepSeek); it has one KV head, of
            `latent.cached_dim` dimensions, whose values are not stored.
        attention_sinks: Each head has a learned score that nothing is behind (GPT-OSS).
        qk_norm: Norms of queries and keys before they are rotated. "shared": each head alone, all
            with the same scale; "per_head": each with its own; "across_heads": all heads as one
            vector.
        hidden_act: A key of `jaxinfer.nn.mlp.ACTIVATIONS`.
        gated_mlp: `act(gate) * up` instead of `act(up)`.
        mlp_bias: Biases of the feed-forward projections.
        moe: The experts of routed layers; `intermediate_size` is that of the others.
        moe_layers: Per layer, whether it is routed. Empty: all are, if there is `moe`.
        norm: Of the residual stream, and of queries and keys.
        pre_norm: Attention and feed-forward read a norm of the stream.
        post_norm: What they return is normed before it is added.
        parallel_block: The feed-forward reads the stream as attention does, not what attention
            made of it.
        shared_norm: In a parallel block, the feed-forward reads the attention's norm.
        embedding_multiplier: Of the embedding.
        residual_multiplier: Of what attention and feed-forward add.
        logit_multiplier: Of the logits.
        logit_softcap: Logits become `cap * tanh(logit / cap)`.
        stored_heads: Query and KV heads of the checkpoint, where they were laid out for several
            devices: see `jaxinfer.models.head_layout`. None: those above.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    learned_positions: bool = False
    ropes: tuple[RopeConfig | None, ...] = ()
    sliding_windows: tuple[int | None, ...] = ()
    attention_bias: bool = False
    attention_output_bias: bool = False
    attention_scale: float | None = None
    attention_softcap: float | None = None
    latent: LatentConfig | None = None
    attention_sinks: bool = False
    qk_norm: str | None = None
    hidden_act: str = "silu"
    gated_mlp: bool = True
    mlp_bias: bool = False
    moe: MoEConfig | None = None
    moe_layers: tuple[bool, ...] = ()
    norm: NormConfig = field(default_factory=NormConfig)
    pre_norm: bool = True
    post_norm: bool = False
    parallel_block: bool = False
    shared_norm: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    logit_softcap: float | None = None
    stored_heads: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.hidden_act not in ACTIVATIONS:
            raise ModelError(
                f"hidden_act {self.hidden_act!r} is not supported; known: {', '.join(ACTIVATIONS)}"
            )
        if self.qk_norm not in QK_NORMS:
            raise ModelError(f"qk_norm must be one of {QK_NORMS}, got {self.qk_norm!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        for name in ("ropes", "sliding_windows", "moe_layers"):
            if len(getattr(self, name)) not in (0, self.num_hidden_layers):
                raise ModelError(
                    f"{name}: expected one for each of {self.num_hidden_layers} layers, "
                    f"got {len(getattr(self, name))}"
                )
        for rope in {rope for rope in self.ropes if rope is not None}:
            self._check_rope(rope)
        if self.moe is not None:
            _check_moe(self.moe)

    def _check_rope(self, rope: RopeConfig) -> None:
        dim = rope.rotary_dim
        if dim % 2 or not 0 < dim <= self.head_dim:
            raise ModelError(
                f"an even number of a head's {self.head_dim} dimensions must be rotated, got {dim}"
            )
        scaling = rope.scaling
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            raise ModelError(
                f"rope high_freq_factor ({scaling.high_freq_factor}) must be above "
                f"low_freq_factor ({scaling.low_freq_factor})"
            )
        if scaling.original_max_position_embeddings < 2:
            raise ModelError("rope original_max_position_embeddings must be at least 2")
        for name in ("factors", "short_factor", "long_factor"):
            factors = getattr(scaling, name)
            if factors and len(factors) != dim // 2:
                raise ModelError(
                    f"rope {name}: expected {dim // 2} for {dim} rotated dimensions, "
                    f"got {len(factors)}"
                )

    def rope_of(self, layer: int) -> RopeConfig | None:
        """The rotary positions of a layer, None for none."""
        return self.ropes[layer] if self.ropes else None

    def window_of(self, layer: int) -> int | None:
        """The sliding window of a layer, None for full attention."""
        return self.sliding_windows[layer] if self.sliding_windows else None

    def windows_within(self, max_model_len: int) -> tuple[int, ...]:
        """The distinct windows that hide something from a sequence of this length, ascending.

        Each has a group of pages of its own. A layer with a longer window sees everything.
        """
        windows = {window for window in self.sliding_windows if window is not None}
        return tuple(sorted(window for window in windows if window < max_model_len))

    def is_routed(self, layer: int) -> bool:
        """Whether a layer's feed-forward is a mixture of experts."""
        return self.moe is not None and (not self.moe_layers or self.moe_layers[layer])

    def as_stored(self) -> ModelConfig:
        """The same model with the heads that its checkpoint has."""
        if self.stored_heads is None:
            return self
        num_heads, num_kv_heads = self.stored_heads
        return dataclasses.replace(
            self,
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            stored_heads=None,
        )

    def for_length(self, max_model_len: int) -> ModelConfig:
        """The same model, settled to serve sequences of up to this length."""
        ropes = tuple(rope and rope.for_length(max_model_len) for rope in self.ropes)
        return dataclasses.replace(self, ropes=ropes)


def _check_moe(moe: MoEConfig) -> None:
    """Raise unless every token finds as many experts as it is to visit."""
    if moe.num_experts % moe.num_groups or not 0 < moe.num_groups_per_tok <= moe.num_groups:
        raise ModelError(
            f"{moe.num_experts} experts in {moe.num_groups} groups, of which a token may visit "
            f"{moe.num_groups_per_tok}: groups must be equal, and at least as many as are visited"
        )
    in_group = moe.num_experts // moe.num_groups
    if moe.num_experts_per_tok > in_group * moe.num_groups_per_tok or moe.group_top > in_group:
        raise ModelError(
            f"num_experts_per_tok ({moe.num_experts_per_tok}) must be at most the experts that a "
            f"token may visit: {moe.num_groups_per_tok} groups of {in_group}"
        )
