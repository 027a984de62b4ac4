"""Reductions over the dimensions of one value, and over the rows of a batch."""

from __future__ import annotations

from typing import Any

import numpy as np

from dynbatch.compiler.ir import Builder
from dynbatch.ops.elementwise import broadcast_to, cmult
from dynbatch.ops.indexing import place
from dynbatch.ops.primitive import Array, Elementwise, Primitive
from dynbatch.ops.shape import axis_of, check_dim, reshape
from dynbatch.types import Type, type_of


def keeping(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    """The shape with dimension ``dim`` reduced to one."""
    return (*shape[:dim], 1, *shape[dim + 1 :])


class Reduction(Primitive):
    """Reduction of the dimensions that ``shape`` has as one (or not at all, at the right): broadcasting undone.

    Attributes:
        formula: for kernels, how an element ``y`` joins what there is, ``x``.
        initial: what there is before the first element.
        final: the result, of what there is in the end, ``x``, and the number of elements, ``n``.
    """

    is_block = True
    formula = ""
    initial = 0.0
    final = "x"

    def infer(self, x: Type, shape: tuple[int, ...]) -> Type:
        return type_of(shape, x.dtype)

    def reduce(self, x: Array, axes: tuple[int, ...]) -> Array:
        """The reference: reduce these axes, which stay as ones."""
        raise NotImplementedError

    def numpy(self, x: Array, shape: tuple[int, ...]) -> Array:  # type: ignore[override]
        rank = x.ndim - 1
        padded = shape + (1,) * (rank - len(shape))
        axes = tuple(axis_of(x, d) for d in range(rank) if padded[d] == 1 and x.shape[axis_of(x, d)] != 1)
        return self.reduce(x, axes).reshape(x.shape[0], *shape[::-1])


class SumTo(Reduction):
    """Sum."""

    name = "sum_to"
    formula = "x + y"

    def reduce(self, x: Array, axes: tuple[int, ...]) -> Array:
        return x.sum(axis=axes, keepdims=True)

    def vjp(self, b: Builder, args: tuple[int, ...], out: int, dout: int, **attrs: Any) -> list[int | None]:
        return [b.emit(broadcast_to, dout, shape=b.type(args[0]).shape)]


class MeanTo(Reduction):
    """Mean. What is lowered to it has its own gradient."""

    name = "mean_to"
    formula = "x + y"
    final = "quotient(x, n)"  # so that the mean of equal numbers is that number

    def reduce(self, x: Array, axes: tuple[int, ...]) -> Array:
        return x.mean(axis=axes, keepdims=True)


class MaxTo(Reduction):
    """Maximum; of anything with a NaN, NaN. What is lowered to it has its own gradient."""

    name = "max_to"
    formula = "greatest(x, y)"
    initial = -np.inf

    def reduce(self, x: Array, axes: tuple[int, ...]) -> Array:
        return x.max(axis=axes, keepdims=True)


class SumRows(Primitive):
    """Sum over the batch: the gradient of what all its nodes share."""

    name = "sum_rows"
    reduces = "rows"

    def infer(self, x: Type) -> Type:
        return x

    def numpy(self, x: Array) -> Array:  # type: ignore[override]
        return x.sum(axis=0, keepdims=True)


class MaxDim(Primitive):
    """Maximum along a dimension, which disappears."""

    name = "max_dim"

    def infer(self, x: Type, dim: int) -> Type:
        check_dim(self.name, x, dim)
        return type_of(x.shape[:dim] + x.shape[dim + 1 :], x.dtype)

    def numpy(self, x: Array, dim: int) -> Array:  # type: ignore[override]
        top = x.max(axis=axis_of(x, dim))
        return top if top.ndim > 1 else top[:, None]

    def lower(self, b: Builder, args: tuple[int, ...], dim: int) -> int | None:  # type: ignore[override]
        shape = b.type(args[0]).shape
        top = b.emit(max_to, args[0], shape=keeping(shape, dim))
        return b.emit(reshape, top, shape=shape[:dim] + shape[dim + 1 :] or (1,))

    def vjp(self, b: Builder, args: tuple[int, ...], out: int, dout: int, dim: int) -> list[int | None]:  # type: ignore[override]
        kept = b.emit(reshape, dout, shape=keeping(b.type(args[0]).shape, dim))
        return [b.emit(cmult, b.emit(one_hot_argmax, args[0], dim=dim), kept)]


# the first place is the greatest of the negated ones; as in NumPy, a NaN is a maximum
place_of_top = Elementwise("place_of_top", "where(x == y, -z, where(x == x, -inf, -z))", None, None, None)
is_opposite = Elementwise("is_opposite", "where(x == -y, 1.0, 0.0)", None, None)


class OneHotArgmax(Primitive):
    """One at the first maximum along a dimension, else zero; no gradient, or straight through."""

    name = "argmax"

    def infer(self, x: Type, dim: int, straight_through: bool = False) -> Type:
        check_dim(self.name, x, dim)
        return x

    def numpy(self, x: Array, dim: int, straight_through: bool = False) -> Array:  # type: ignore[override]
        axis = axis_of(x, dim)
        result = np.zeros(x.shape, x.dtype)
        np.put_along_axis(result, np.expand_dims(x.argmax(axis=axis), axis), 1, axis)
        return result

    def lower(  # type: ignore[override]
        self, b: Builder, args: tuple[int, ...], dim: int, straight_through: bool = False
    ) -> int | None:
        x, type = args[0], b.type(args[0])
        kept = keeping(type.shape, dim)
        at = b.emit(place, shape=type.shape, dim=dim, dtype=type.dtype.name)
        before_first = b.emit(place_of_top, x, b.emit(max_to, x, shape=kept), at)
        return b.emit(is_opposite, at, b.emit(max_to, before_first, shape=kept))

    def vjp(  # type: ignore[override]
        self, b: Builder, args: tuple[int, ...], out: int, dout: int, dim: int, straight_through: bool = False
    ) -> list[int | None]:
        return [dout if straight_through else None]


sum_to = SumTo()
mean_to = MeanTo()
max_to = MaxTo()
sum_rows = SumRows()
max_dim = MaxDim()
one_hot_argmax = OneHotArgmax()
