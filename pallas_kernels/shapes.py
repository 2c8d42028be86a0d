"""Shape annotations, and the one letter per axis that the whole code base uses.

    T tokens in the step (flattened)   B sequences            S key/value length
    D model width                      F feed-forward width   V vocabulary
    N query heads                      K key/value heads      H head dim
    L layers                           P pages per sequence   G query heads per key/value head

The annotations are jaxtyping's where it is installed. A GPU box may have only jax, flax and numpy;
there they are inert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jax import Array

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, UInt32
else:
    try:
        from jaxtyping import Bool, Float, Int, UInt32
    except ImportError:

        class _Inert:
            def __class_getitem__(cls, _: Any) -> Any:
                return Any

        Bool = Float = Int = UInt32 = _Inert

__all__ = ["Array", "Bool", "Float", "Int", "UInt32"]
