"""Reductions over the dimensions of one value, and over the rows of a batch."""

from __future__ import annotations

from typing import Any

import numpy as np

from dynbatch.compiler.ir import Builder
from dynbatch.ops.elementwise import broadcast_to, cmult
from dynbatch.ops.primitive import Array, Primitive
from dynbatch.ops.shape import axis_of, check_dim
from dynbatch.types import Type, type_of


class SumTo(Primitive):
    """Sum over the dimensions that ``shape`` has as one (or not at all, at the right): broadcasting undone."""

    name = "sum_to"

    def infer(self, x: Type, shape: tuple[int, ...]) -> Type:
        return type_of(shape, x.dtype)

    def numpy(self, x: Array, shape: tuple[int, ...]) -> Array:  # type: ignore[override]
        rank = x.ndim - 1
        padded = shape + (1,) * (rank - len(shape))
        axes = tuple(axis_of(x, d) for d in range(rank) if padded[d] == 1 and x.shape[axis_of(x, d)] != 1)
        return x.sum(axis=axes, keepdims=True).reshape(x.shape[0], *shape[::-1])

    def vjp(self, b: Builder, args: tuple[int, ...], out: int, dout: int, **attrs: Any) -> list[int | None]:
        return [b.emit(broadcast_to, dout, shape=b.type(args[0]).shape)]


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

    def vjp(self, b: Builder, args: tuple[int, ...], out: int, dout: int, dim: int) -> list[int | None]:  # type: ignore[override]
        from dynbatch.ops.shape import reshape

        shape = b.type(args[0]).shape
        kept = b.emit(reshape, dout, shape=(*shape[:dim], 1, *shape[dim + 1 :]))
        return [b.emit(cmult, b.emit(one_hot_argmax, args[0], dim=dim), kept)]


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

    def vjp(  # type: ignore[override]
        self, b: Builder, args: tuple[int, ...], out: int, dout: int, dim: int, straight_through: bool = False
    ) -> list[int | None]:
        return [dout if straight_through else None]


sum_to = SumTo()
sum_rows = SumRows()
max_dim = MaxDim()
one_hot_argmax = OneHotArgmax()
