"""The portable GPU kernels: one source for every NVIDIA generation since Ampere."""
