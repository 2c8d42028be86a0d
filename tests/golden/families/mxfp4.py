"""MXFP4 as GPT-OSS stores its experts: blocks of 32 four-bit numbers and a power of two for each.

It knows the format (OCP Microscaling, E2M1 elements, E8M0 scales) and the names and layout of the
released files; it knows no model.
"""

from __future__ import annotations

import torch

BLOCK = 32
# E2M1: the index is the code, codes 8 to 15 are the negative ones.
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
SCALE_BIAS = 127


def round_experts(a: torch.Tensor) -> torch.Tensor:
    """Return `[E, in, out]` with every number one that its block can hold."""
    codes, exponents = _encode(a.transpose(1, 2))
    return _decode(codes, exponents).transpose(1, 2)


def pack_experts(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Replace each experts' matrix `[E, in, out]` by blocks `[E, out, in/32, 16]` and scales.

    Two codes share a byte, the earlier one in its lower half.
    """
    packed = {}
    for name, a in weights.items():
        if a.ndim != 3:
            packed[name] = a
            continue
        codes, exponents = _encode(a.transpose(1, 2))
        assert torch.equal(_decode(codes, exponents).transpose(1, 2), a), name
        packed[f"{name}_blocks"] = (codes[..., 0::2] | codes[..., 1::2] << 4).contiguous()
        packed[f"{name}_scales"] = (exponents + SCALE_BIAS).to(torch.uint8)
    return packed


def _encode(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes `[E, out, in/32, 32]` and exponents `[E, out, in/32]` of `[E, out, in]`."""
    blocks = a.reshape(*a.shape[:-1], -1, BLOCK)
    # The largest number of a block lies in [4, 8) times its scale, where 6 is the largest value.
    exponents = torch.floor(torch.log2(blocks.abs().amax(-1))) - 2
    scaled = blocks / torch.exp2(exponents)[..., None]
    codes = (scaled.abs()[..., None] - VALUES).abs().argmin(-1)
    return (codes | (scaled < 0).int() << 3).to(torch.uint8), exponents


def _decode(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    sign = 1.0 - 2.0 * (codes >> 3)
    blocks = sign * VALUES[(codes & 7).long()] * torch.exp2(exponents)[..., None]
    return blocks.flatten(-2)
