"""The layers, as Flax NNX modules: shapes and arithmetic, no checkpoint and no request."""

from jaxinfer.nn.attention import Attention
from jaxinfer.nn.embedding import Embedding
from jaxinfer.nn.linear import Linear
from jaxinfer.nn.mlp import MLP
from jaxinfer.nn.norm import RMSNorm
from jaxinfer.nn.rope import RopeTable, apply_rope

__all__ = ["MLP", "Attention", "Embedding", "Linear", "RMSNorm", "RopeTable", "apply_rope"]
