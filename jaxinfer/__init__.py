"""The JAX/XLA inference engine for language models."""
