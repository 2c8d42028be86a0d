"""Weights in the order in which the kernels read them. Host work: numpy in, numpy out.

A packed weight is uint32 [panels, groups + 2, 32]. A panel is 32 outputs. A word holds 4 bytes of
the contraction: 4 int8 (with 128 added), 2 bfloat16 or 1 float32. Line g of a panel holds word g of
each of its outputs; the last two lines hold what is done with the sums: float32 scales and float32
biases. One array per layer, because every argument of a step costs time to pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

LANES = 32
TAIL = 2
BLOCK = 64
"""Inputs that share a scale when they are made int8."""

FORMATS: Mapping[str, tuple[int, Any]] = {
    # name → its number in jobs.h, its type
    "int8": (0, np.dtype(np.int8)),
    "bfloat16": (1, np.dtype(ml_dtypes.bfloat16)),
    "float32": (2, np.dtype(np.float32)),
}


def per_word(fmt: str) -> int:
    """Numbers of a format in a word."""
    return 4 // FORMATS[fmt][1].itemsize


def packed_shape(fmt: str, out_features: int, in_features: int) -> tuple[int, int, int]:
    """Return the shape of a packed weight."""
    return (-(-out_features // LANES), -(-in_features // per_word(fmt)) + TAIL, LANES)


def quantize_rows(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return int8 values and float32 scales [N] with `values * scales[:, None] ≈ weight` [N, K].

    Symmetric: a row's largest magnitude becomes 127. -128 is not used.
    """
    weight = weight.astype(np.float32, copy=False)
    scales = np.abs(weight).max(axis=1, initial=0.0) / np.float32(127)
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
    values = weight * inverse[:, None]
    return np.rint(values, out=values).astype(np.int8), scales


def pack(weight: np.ndarray, fmt: str, bias: np.ndarray | None = None) -> np.ndarray:
    """Return a packed weight.

    Args:
        weight: [N, K], real numbers; quantized here if the format is int8.
        fmt: A key of `FORMATS`.
        bias: [N] or None.
    """
    N, K = weight.shape
    panels, lines, _ = packed_shape(fmt, N, K)
    groups, padded = lines - TAIL, panels * LANES
    scales = np.ones(N, np.float32)
    if fmt == "int8":
        weight, scales = quantize_rows(weight)
    values = np.zeros((padded, groups * per_word(fmt)), FORMATS[fmt][1])
    values[:N, :K] = weight
    if fmt == "int8":
        values = np.bitwise_xor(values, np.int8(-128))
    packed = np.empty((panels, lines, LANES), np.uint32)
    words = values.view(np.uint32).reshape(panels, LANES, groups)
    packed[:, :groups] = words.transpose(0, 2, 1)
    tail = np.zeros((TAIL, padded), np.uint32)
    tail[0, :N] = scales.view(np.uint32)
    if bias is not None:
        tail[1, :N] = bias.astype(np.float32).view(np.uint32)
    packed[:, groups:] = tail.reshape(TAIL, panels, LANES).transpose(1, 0, 2)
    return packed


def interleave(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Return [2 * F', ...] of gate and up [F, ...]: by turns 16 rows of one and of the other.

    A panel then holds the 16 gates of its 16 outputs. F' is F, padded to a multiple of 16.
    """
    half = LANES // 2
    both = np.zeros((2, -(-gate.shape[0] // half) * half, *gate.shape[1:]), gate.dtype)
    both[0, : gate.shape[0]], both[1, : gate.shape[0]] = gate, up
    turns = both.reshape(2, -1, half, *gate.shape[1:])
    return np.moveaxis(turns, 0, 1).reshape(-1, *gate.shape[1:])


def unpack(packed: np.ndarray, fmt: str, N: int, K: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the weight [N, K] that a packed one stands for, and its bias [N], as float32."""
    panels, lines, _ = packed.shape
    groups = lines - TAIL
    words = np.ascontiguousarray(packed[:, :groups].transpose(0, 2, 1))
    values = words.reshape(panels * LANES, groups).view(FORMATS[fmt][1])
    if fmt == "int8":
        values = np.bitwise_xor(values, np.int8(-128))
    tail = np.ascontiguousarray(packed[:, groups:].transpose(1, 0, 2)).view(np.float32)
    scales, biases = tail.reshape(TAIL, -1)
    return values[:N, :K].astype(np.float32) * scales[:N, None], biases[:N]
