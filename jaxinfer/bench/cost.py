"""How much a step has to compute and to read, counted from the model and not from its program.

What a step really does may be more (padding, copies): the ratio to these figures is what the
roofline fraction tells. Norms, rotations and activations are not counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx

from jaxinfer.config import EngineConfig
from jaxinfer.model_source import abstract_model
from jaxinfer.models import ModelConfig, flat_parameters
from jaxinfer.resolution import page_dtype
from jaxinfer.runner_config import cache_shape


@dataclass(frozen=True, kw_only=True)
class ModelCost:
    """Sizes that decide what a token costs.

    Attributes:
        body_weights: Weights that every token is multiplied with, head and experts apart.
        head_weights: Weights of the head, for each token that is sampled.
        expert_weights: Weights of all experts.
        expert_share: Of the experts, the share that a token visits.
        weight_bytes: Of one weight.
        kv_bytes: Of one token's keys and values in all layers.
        attention_width: Query heads times their dimensions, over all layers.
        windows: By layer, the keys that a token sees; None for all.
    """

    body_weights: int
    head_weights: int
    expert_weights: int
    expert_share: float
    weight_bytes: float
    kv_bytes: float
    attention_width: int
    windows: tuple[int | None, ...]

    @classmethod
    def of(cls, model_config: ModelConfig, config: EngineConfig) -> ModelCost:
        """Count a model's weights under resolved settings."""
        model, _ = abstract_model(model_config, jnp.float32)
        parameters = flat_parameters(nnx.state(model))
        head_path = f"{model.head_path}."
        moe = model_config.moe
        body = head = experts = 0
        for path, parameter in parameters.items():
            size = math.prod(parameter.shape)
            if path.startswith(head_path):
                head += size
            elif path.startswith(("embed.", "positions.")) or len(parameter.shape) < 2:
                continue  # looked up, or a norm
            elif moe is not None and parameter.shape[0] == moe.num_experts:
                experts += size
            else:
                body += size
        assert config.max_model_len, "the config is resolved"
        shape = cache_shape(model_config, (), config.page_size, page_dtype(config.kv_cache_dtype))
        weight_bytes = 1.0 if config.quantization == "int8" else jnp.dtype(config.dtype).itemsize
        layers = model_config.num_hidden_layers
        return cls(
            body_weights=body,
            head_weights=head,
            expert_weights=experts,
            expert_share=moe.num_experts_per_tok / moe.num_experts if moe else 0.0,
            weight_bytes=weight_bytes,
            kv_bytes=shape.page_bytes(0) / config.page_size,
            attention_width=model_config.num_attention_heads * model_config.head_dim,
            windows=tuple(model_config.window_of(layer) for layer in range(layers)),
        )

    def prefill_flops(self, prompt_tokens: int) -> float:
        """Operations (a multiplication and an addition are two) of a prompt up to its first token.

        All heads of a token attend to the keys up to its own.
        """
        weights = self.body_weights + self.expert_share * self.expert_weights
        return 2 * (prompt_tokens * weights + self.head_weights) + self._attention(0, prompt_tokens)

    def decode_flops(self, context: int) -> float:
        """Operations of one token behind `context` others."""
        weights = self.body_weights + self.head_weights + self.expert_share * self.expert_weights
        return 2 * weights + self._attention(context, context + 1)

    def decode_bytes(self, batch: int, context: float) -> float:
        """Bytes that a step of `batch` tokens reads, each behind `context` others.

        Of the experts, those that so many tokens visit if each chooses by chance.
        """
        visited = 1 - (1 - self.expert_share) ** batch
        weights = self.body_weights + self.head_weights + visited * self.expert_weights
        layer_bytes = self.kv_bytes / len(self.windows)
        keys = sum(min(context, window or context) for window in self.windows)
        return weights * self.weight_bytes + batch * keys * layer_bytes

    def _attention(self, first: int, end: int) -> float:
        """Operations of the tokens at positions [first, end): two products with every key seen."""
        seen = 0.0
        for window in self.windows:
            full = min(end, window or end)  # positions below see all before them
            seen += sum(range(first + 1, max(first, full) + 1)) if full > first else 0
            seen += max(0, end - max(first, full)) * (window or 0)
        return 4.0 * self.attention_width * seen
