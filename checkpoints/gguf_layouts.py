"""Where a tensor of GGUF is laid out otherwise than HF's: how to rebuild one from the other.

Arrays in, array out. Knows no file and no name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How one HF tensor comes of one or several tensors of GGUF.

    Attributes:
        join: Arrays of the parts, and the HF config, → HF's array. ValueError: they do not fit.
        shape: Shapes of the parts → the shape that `join` gives.
        ranks: Dimensions of each part; empty: any.
    """

    join: Callable[[Sequence[np.ndarray], Mapping[str, Any]], np.ndarray]
    shape: Callable[[Sequence[Shape]], Shape] = lambda shapes: shapes[0]
    ranks: tuple[int, ...] = ()


def _transposed(parts: Sequence[np.ndarray], config: Mapping[str, Any]) -> np.ndarray:
    return np.ascontiguousarray(parts[0].swapaxes(-1, -2))


def _transposed_shape(shapes: Sequence[Shape]) -> Shape:
    (*leading, rows, columns) = shapes[0]
    return (*leading, columns, rows)


def _by_head(parts: Sequence[np.ndarray], config: Mapping[str, Any]) -> np.ndarray:
    """Rows all q, all k, all v → for each head its q, k, v."""
    (fused,) = parts
    by_kind = fused.reshape(3, config["num_attention_heads"], -1, *fused.shape[1:])
    return by_kind.swapaxes(0, 1).reshape(fused.shape)


def _in_turns(parts: Sequence[np.ndarray], config: Mapping[str, Any]) -> np.ndarray:
    """Gate and up [E, F, …] → their rows in turns, [E, 2F, …]."""
    gate, up = parts
    E, F, *rest = gate.shape
    return np.stack([gate, up], axis=2).reshape(E, 2 * F, *rest)


def _gate_up_columns(parts: Sequence[np.ndarray], config: Mapping[str, Any]) -> np.ndarray:
    """Gate and up [E, F, D] → their columns in turns, [E, D, 2F]."""
    return _transposed([_in_turns(parts, config)], config)


def _latent_up(parts: Sequence[np.ndarray], config: Mapping[str, Any]) -> np.ndarray:
    """Keys' [N, R, n] and values' [N, v, R] → by head its keys' and its values' rows."""
    keys, values = parts
    rows = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
    return rows.reshape(-1, rows.shape[-1])


def _latent_up_shape(shapes: Sequence[Shape]) -> Shape:
    (heads, rank, keys), (_, values, _) = shapes
    return (heads * (keys + values), rank)


AS_IS = Layout(join=lambda parts, config: parts[0])
TRANSPOSED = Layout(join=_transposed, shape=_transposed_shape, ranks=(2,))
EXPERTS_TRANSPOSED = Layout(join=_transposed, shape=_transposed_shape, ranks=(3,))
QKV_BY_HEAD = Layout(join=_by_head)
GATE_UP_COLUMNS = Layout(
    join=_gate_up_columns,
    shape=lambda shapes: (shapes[0][0], shapes[0][2], 2 * shapes[0][1]),
    ranks=(3, 3),
)
GATE_UP_BIAS = Layout(
    join=_in_turns, shape=lambda shapes: (shapes[0][0], 2 * shapes[0][1]), ranks=(2, 2)
)
LATENT_UP = Layout(join=_latent_up, shape=_latent_up_shape, ranks=(3, 3))
