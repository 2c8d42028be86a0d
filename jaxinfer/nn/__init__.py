"""The layers, as Flax NNX modules: shapes and arithmetic, no checkpoint and no request."""

from jaxinfer.nn.attention import Attention
from jaxinfer.nn.divided_moe import DividedMoE
from jaxinfer.nn.embedding import Embedding
from jaxinfer.nn.latent_attention import LatentAttention, LatentConfig
from jaxinfer.nn.linear import Linear
from jaxinfer.nn.mlp import GatedMLP, PlainMLP
from jaxinfer.nn.moe import MoE, MoEConfig
from jaxinfer.nn.norm import Norm, NormConfig
from jaxinfer.nn.rope import RopeTable, apply_rope
from jaxinfer.nn.rope_scaling import RopeConfig, RopeScaling

__all__ = [
    "Attention",
    "DividedMoE",
    "Embedding",
    "GatedMLP",
    "LatentAttention",
    "LatentConfig",
    "Linear",
    "MoE",
    "MoEConfig",
    "Norm",
    "NormConfig",
    "PlainMLP",
    "RopeConfig",
    "RopeScaling",
    "RopeTable",
    "apply_rope",
]
