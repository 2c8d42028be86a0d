"""Arrays that are read part by part: what is asked of the result decides what is read.

A checkpoint's tensors are joined, transposed and cut into heads on their way to a parameter. Done
on `Deferred` instead of numpy arrays, the same functions compute nothing; a device's shard is then
read with no byte more than it takes. Whatever numpy function is not known here reads its arguments
whole, so a result is right in any case. Knows no file and no model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Box = tuple[tuple[int, int], ...]
"""By axis: first index, and the one behind the last."""

MAX_PARTS = 64
"""Most separate ranges of one axis that are read apart; beyond, what lies between is read too."""


class Deferred:
    """An array of known shape and dtype.

    Args:
        shape: Of the array.
        dtype: Of the array.
        read: Returns the values within a box.
    """

    def __init__(self, shape: Sequence[int], dtype: Any, read: Callable[[Box], np.ndarray]):
        self.shape, self.dtype, self._read = tuple(shape), np.dtype(dtype), read

    @classmethod
    def of(cls, load: Callable[[], np.ndarray], shape: Sequence[int], dtype: Any) -> Deferred:
        """Return an array that is loaded when something of it is read, and cast by part.

        What was made by loading is kept. A view of a file, which is read-only, is looked at anew
        each time and copied at once: the file may let go of the pages behind its last view.
        """
        made: list[np.ndarray] = []

        def read(box: Box) -> np.ndarray:
            whole = made[0] if made else load()
            if not made and whole.flags.writeable:
                made.append(whole)
            return whole[_slices(box)].astype(dtype, copy=not whole.flags.writeable)

        return cls(shape, dtype, read)

    def read(self, box: Box) -> np.ndarray:
        """Return the values within a box, as a view where they are one."""
        values = self._read(box)
        assert values.shape == tuple(stop - start for start, stop in box), (values.shape, box)
        return values

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def T(self) -> Deferred:
        return self.transpose(tuple(reversed(range(self.ndim))))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        values = self.read(tuple((0, size) for size in self.shape))
        return np.asarray(values, dtype)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function in _FUNCTIONS:
            return _FUNCTIONS[function](*args, **kwargs)
        return function(*_whole(args), **{name: _whole(x) for name, x in kwargs.items()})

    def __getitem__(self, index: Any) -> Deferred:
        """Take slices with positive steps; an ellipsis stands for whole axes."""
        index = index if isinstance(index, tuple) else (index,)
        if Ellipsis in index:
            at = index.index(Ellipsis)
            missing = self.ndim - len(index) + 1
            index = (*index[:at], *[slice(None)] * missing, *index[at + 1 :])
        result = self
        for axis, part in enumerate(index):
            result = _sliced(result, axis, part)
        return result

    def transpose(self, order: tuple[int, ...]) -> Deferred:
        """Return the same values, axis i of the result being `order[i]` of this."""

        def read(box: Box) -> np.ndarray:
            back = dict(zip(order, box, strict=True))
            return self.read(tuple(back[axis] for axis in range(self.ndim))).transpose(order)

        return Deferred([self.shape[axis] for axis in order], self.dtype, read)

    def reshape(self, *shape: Any) -> Deferred:
        """Return the same values in another shape, read in as few ranges as they lie in."""
        new = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if -1 in new:
            rest = -math.prod(new)
            new = tuple(math.prod(self.shape) // rest if n == -1 else n for n in new)
        if math.prod(new) != math.prod(self.shape):
            raise ValueError(f"cannot reshape {self.shape} into {new}")
        result, axis = self, 0
        for olds, news in _equal_products(self.shape, new):
            result = _split_axis(_merged(result, axis, len(olds)), axis, news)
            axis += len(news)
        return result


def _whole(x: Any) -> Any:
    if isinstance(x, list | tuple):
        return type(x)(_whole(y) for y in x)
    return np.asarray(x) if isinstance(x, Deferred) else x


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def _on_axis(box: Box, axis: int, *spans: tuple[int, int]) -> Box:
    return (*box[:axis], *spans, *box[axis + 1 :])


def _sliced(x: Deferred, axis: int, part: slice) -> Deferred:
    first, stop, step = part.indices(x.shape[axis])
    size = len(range(first, stop, step))
    if size == x.shape[axis]:
        return x

    def read(box: Box) -> np.ndarray:
        a, b = box[axis]
        last = first + step * (b - 1) + 1 if b > a else first
        values = x.read(_on_axis(box, axis, (first + step * a, max(last, first + step * a))))
        return values[(slice(None),) * axis + (slice(None, None, step),)]

    return Deferred((*x.shape[:axis], size, *x.shape[axis + 1 :]), x.dtype, read)


def _equal_products(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Cut two shapes of the same size into as many pairs of equal size as there are."""
    pairs, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        olds, news = list(old[i : i + 1]), list(new[j : j + 1])
        i, j = i + 1, j + 1
        while math.prod(olds) != math.prod(news):
            if j >= len(new) or (i < len(old) and math.prod(olds) < math.prod(news)):
                olds.append(old[i])
                i += 1
            else:
                news.append(new[j])
                j += 1
        pairs.append((olds, news))
    return pairs


def _merged(x: Deferred, axis: int, count: int) -> Deferred:
    """Make one axis of `count` neighbours; none becomes one of size 1."""
    if count == 1:
        return x
    olds = x.shape[axis : axis + count]

    def read(box: Box) -> np.ndarray:
        a, b = box[axis]
        if not olds:
            return np.expand_dims(x.read((*box[:axis], *box[axis + 1 :])), axis)
        spans, start = _covering(a, b, olds)
        values = x.read(_on_axis(box, axis, *spans))
        values = values.reshape(*values.shape[:axis], -1, *values.shape[axis + count :])
        return values[(slice(None),) * axis + (slice(start, start + b - a),)]

    shape = (*x.shape[:axis], math.prod(olds), *x.shape[axis + count :])
    return Deferred(shape, x.dtype, read)


def _covering(a: int, b: int, sizes: Sequence[int]) -> tuple[list[tuple[int, int]], int]:
    """Return the smallest box of these sizes that holds the flat range, and where it begins."""
    if not sizes:
        return [], 0
    rest = math.prod(sizes[1:])
    first, stop = a // rest, -(-b // rest)
    if stop - first == 1:
        inner, start = _covering(a - first * rest, b - first * rest, sizes[1:])
        return [(first, stop), *inner], start
    return [(first, stop), *((0, n) for n in sizes[1:])], a - first * rest


def _split_axis(x: Deferred, axis: int, sizes: Sequence[int]) -> Deferred:
    """Make several axes of one."""
    if len(sizes) == 1:
        return x

    def read(box: Box) -> np.ndarray:
        spans = box[axis : axis + len(sizes)]
        before, behind = box[:axis], box[axis + len(sizes) :]
        # Axes behind the last one that is cut are contiguous with it.
        cut = [i for i, (span, n) in enumerate(zip(spans, sizes, strict=True)) if span != (0, n)]
        last = cut[-1] if cut else 0
        while last and math.prod(b - a for a, b in spans[:last]) > MAX_PARTS:
            last -= 1
        rest = math.prod(sizes[last + 1 :])
        parts = []
        for at in itertools.product(*(range(a, b) for a, b in spans[:last])):
            flat = 0
            for i, n in zip(at, sizes, strict=False):
                flat = flat * n + i
            a, b = (flat * sizes[last] + end for end in spans[last])
            parts.append(x.read((*before, (a * rest, b * rest), *behind)))
        values = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=axis)
        leading = [b - a for a, b in spans[: last + 1]]
        shape = (*leading, *sizes[last + 1 :])
        values = values.reshape(*values.shape[:axis], *shape, *values.shape[axis + 1 :])
        inner = tuple(slice(a, b) for a, b in spans[last + 1 :])
        return values[(slice(None),) * (axis + last + 1) + inner]

    return Deferred((*x.shape[:axis], *sizes, *x.shape[axis + 1 :]), x.dtype, read)


def _deferred(x: Any) -> Deferred:
    return x if isinstance(x, Deferred) else Deferred(x.shape, x.dtype, lambda box: x[_slices(box)])


def _concatenate(arrays: Sequence[Any], axis: int = 0) -> Deferred:
    parts = [_deferred(x) for x in arrays]
    axis %= parts[0].ndim
    ends = list(itertools.accumulate(part.shape[axis] for part in parts))

    def read(box: Box) -> np.ndarray:
        a, b = box[axis]
        found = []
        for part, end in zip(parts, ends, strict=True):
            start = end - part.shape[axis]
            lo, hi = max(a, start), min(b, end)
            if lo < hi:
                found.append(part.read(_on_axis(box, axis, (lo - start, hi - start))))
        return found[0] if len(found) == 1 else np.concatenate(found, axis=axis)

    shape = (*parts[0].shape[:axis], ends[-1], *parts[0].shape[axis + 1 :])
    return Deferred(shape, parts[0].dtype, read)


def _stack(arrays: Sequence[Any], axis: int = 0) -> Deferred:
    parts = [_deferred(x) for x in arrays]
    axis %= parts[0].ndim + 1
    return _concatenate([_merged(part, axis, 0) for part in parts], axis=axis)


def _split(x: Deferred, at: Sequence[int] | int, axis: int = 0) -> list[Deferred]:
    size = x.shape[axis]
    if isinstance(at, int):
        at = range(size // at, size, size // at)
    axis %= x.ndim
    ends = [0, *at, size]
    return [_sliced(x, axis, slice(a, b)) for a, b in itertools.pairwise(ends)]


def _moveaxis(x: Deferred, source: int, destination: int) -> Deferred:
    order = [axis for axis in range(x.ndim) if axis != source % x.ndim]
    order.insert(destination % x.ndim, source % x.ndim)
    return x.transpose(tuple(order))


def _repeat(x: Deferred, repeats: int, axis: int) -> Deferred:
    def read(box: Box) -> np.ndarray:
        a, b = box[axis]
        first = a // repeats
        values = x.read(_on_axis(box, axis, (first, -(-b // repeats))))
        start = a - first * repeats
        values = np.repeat(values, repeats, axis=axis)
        return values[(slice(None),) * axis + (slice(start, start + b - a),)]

    shape = (*x.shape[:axis], x.shape[axis] * repeats, *x.shape[axis + 1 :])
    return Deferred(shape, x.dtype, read)


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.concatenate: _concatenate,
    np.stack: _stack,
    np.split: _split,
    np.moveaxis: _moveaxis,
    np.repeat: _repeat,
    np.reshape: lambda x, shape: x.reshape(shape),
}
