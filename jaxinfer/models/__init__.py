"""The models: one decoder, described by a `ModelConfig`; a family is data that produces one."""

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.registry import family_of, register_family, supported_families
from jaxinfer.models.transformer import Transformer
from jaxinfer.models.weights import flat_parameters, load_weights

__all__ = [
    "ModelConfig",
    "Transformer",
    "family_of",
    "flat_parameters",
    "load_weights",
    "register_family",
    "supported_families",
]
