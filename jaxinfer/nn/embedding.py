"""Token embedding, which is also the LM head of models that tie the two."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxinfer.nn.parameter import parameter
from pallas_kernels.shapes import Array, Float, Int


class Embedding(nnx.Module):
    """A table [V, D]."""

    def __init__(self, num_embeddings: int, features: int, *, dtype: Any):
        self.embedding = parameter((num_embeddings, features), dtype, ("vocab", "embed"))

    def __call__(self, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        return self.embedding[...].at[token_ids].get(mode="clip")

    def attend(self, x: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """Return float32 logits: `x @ embedding.T`."""
        return jnp.einsum("BD,VD->BV", x, self.embedding[...], preferred_element_type=jnp.float32)
