"""Ops that move values without computing: reshape, slices, concatenation."""

from __future__ import annotations

import math

import numpy as np

from dynbatch.compiler.ir import Builder
from dynbatch.errors import IndexRangeError, ShapeError
from dynbatch.ops.primitive import Array, Primitive
from dynbatch.types import Type, type_of


def axis_of(x: Array, dim: int) -> int:
    """The array axis that holds the user's dimension ``dim``: storage is column-major, behind the leading axis."""
    return x.ndim - 1 - dim


def check_dim(name: str, t: Type, dim: int) -> None:
    """Raise `ShapeError` unless ``t`` has a dimension ``dim``."""
    if not 0 <= dim < len(t.shape):
        raise ShapeError(f"{name}: dimension {dim} of shape {t.shape} does not exist")


class Reshape(Primitive):
    """The same elements, in column-major order, in another shape."""

    name = "reshape"
    view = True
    is_block = True

    def infer(self, x: Type, shape: tuple[int, ...]) -> Type:
        if math.prod(shape) != x.size:
            raise ShapeError(f"reshape: shape {x.shape} has {x.size} elements, {shape} has {math.prod(shape)}")
        return type_of(shape, x.dtype)

    def numpy(self, x: Array, shape: tuple[int, ...]) -> Array:  # type: ignore[override]
        return x.reshape(x.shape[0], *shape[::-1])

    def vjp(  # type: ignore[override]
        self, b: Builder, args: tuple[int, ...], out: int, dout: int, shape: tuple[int, ...]
    ) -> list[int | None]:
        return [b.emit(reshape, dout, shape=b.type(args[0]).shape)]


class PickRange(Primitive):
    """Elements ``start`` to ``stop`` (exclusive) along a dimension."""

    name = "pick_range"
    view = True

    def infer(self, x: Type, start: int, stop: int, dim: int) -> Type:
        check_dim(self.name, x, dim)
        size = x.shape[dim]
        if not 0 <= start < stop <= size:
            raise IndexRangeError(f"pick_range: range {start} to {stop} is not within dimension {dim} of {x.shape}")
        return type_of((*x.shape[:dim], stop - start, *x.shape[dim + 1 :]), x.dtype)

    def numpy(self, x: Array, start: int, stop: int, dim: int) -> Array:  # type: ignore[override]
        index = [slice(None)] * x.ndim
        index[axis_of(x, dim)] = slice(start, stop)
        return x[tuple(index)]

    def vjp(  # type: ignore[override]
        self, b: Builder, args: tuple[int, ...], out: int, dout: int, start: int, stop: int, dim: int
    ) -> list[int | None]:
        return [b.emit(pad_range, dout, start=start, size=b.type(args[0]).shape[dim], dim=dim)]


class PadRange(Primitive):
    """The gradient of `PickRange`: zeros, but for the operand from ``start`` on along a dimension."""

    name = "pad_range"

    def infer(self, x: Type, start: int, size: int, dim: int) -> Type:
        return type_of((*x.shape[:dim], size, *x.shape[dim + 1 :]), x.dtype)

    def numpy(self, x: Array, start: int, size: int, dim: int) -> Array:  # type: ignore[override]
        axis = axis_of(x, dim)
        shape = list(x.shape)
        index = [slice(None)] * x.ndim
        index[axis] = slice(start, start + x.shape[axis])
        shape[axis] = size
        result = np.zeros(shape, x.dtype)
        result[tuple(index)] = x
        return result


class Concatenate(Primitive):
    """Operands one after the other along a dimension; the other dimensions must agree."""

    name = "concatenate"
    writes_out = True

    def infer(self, *types: Type, dim: int) -> Type:
        if dim < 0:
            raise ShapeError(f"concatenate: dimension {dim} does not exist")
        rank = max(dim + 1, *(len(t.shape) for t in types))
        shapes = [t.shape + (1,) * (rank - len(t.shape)) for t in types]
        rest = {s[:dim] + s[dim + 1 :] for s in shapes}
        if len(rest) > 1:
            listed = ", ".join(str(t.shape) for t in types)
            raise ShapeError(f"concatenate: shapes {listed} differ outside of dimension {dim}")
        first = shapes[0]
        return type_of((*first[:dim], sum(s[dim] for s in shapes), *first[dim + 1 :]), types[0].dtype)

    def numpy(self, *arrays: Array, dim: int, out: Array | None = None) -> Array:  # type: ignore[override]
        rank = 1 + max(dim + 1, *(a.ndim - 1 for a in arrays))
        rows = max(a.shape[0] for a in arrays)
        full = []
        for a in arrays:
            storage = (1,) * (rank - a.ndim) + a.shape[1:]
            full.append(np.broadcast_to(a.reshape(a.shape[0], *storage), (rows, *storage)))
        return np.concatenate(full, axis=rank - 1 - dim, out=out)

    def vjp(self, b: Builder, args: tuple[int, ...], out: int, dout: int, dim: int) -> list[int | None]:  # type: ignore[override]
        result: list[int | None] = []
        start = 0
        for arg in args:
            shape = b.type(arg).shape
            size = shape[dim] if dim < len(shape) else 1
            part = b.emit(pick_range, dout, start=start, stop=start + size, dim=dim)
            result.append(part if b.type(part).shape == shape else b.emit(reshape, part, shape=shape))
            start += size
        return result


reshape = Reshape()
pick_range = PickRange()
pad_range = PadRange()
concatenate = Concatenate()
