"""The models: one decoder, described by a `ModelConfig`; a family is data that produces one."""

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.family import Family, Weight
from jaxinfer.models.head_layout import lay_out_heads, relayout
from jaxinfer.models.hf_config import decoder_config
from jaxinfer.models.registry import family_of, register_family, supported_families
from jaxinfer.models.transformer import Transformer
from jaxinfer.models.weights import Recipe, as_it_is, flat_parameters, load_weights

__all__ = [
    "Family",
    "ModelConfig",
    "Recipe",
    "Transformer",
    "Weight",
    "as_it_is",
    "decoder_config",
    "family_of",
    "flat_parameters",
    "lay_out_heads",
    "load_weights",
    "register_family",
    "relayout",
    "supported_families",
]
