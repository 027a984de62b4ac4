"""Reductions of a node's list argument, batched across nodes with different numbers of elements.

The elements of all nodes of a batch lie one after the other; ``ptr`` holds the ``rows + 1`` boundaries.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dynbatch.compiler.ir import Builder
from dynbatch.ops.elementwise import add, cmult, exp, log, softmax_weight, subtract
from dynbatch.ops.primitive import Array, Elementwise, Primitive
from dynbatch.types import Type, type_of

finite = Elementwise("finite", "where(abs(x) < inf, x, 0.0)", None)


class Expand(Primitive):
    """Repeat a node's value for each element of its list."""

    name = "expand"
    expands = True
    is_block = True

    def infer(self, x: Type | None, ptr: None) -> Type | None:
        return x

    def numpy(self, x: Array, ptr: Array) -> Array:  # type: ignore[override]
        return np.repeat(x, np.diff(ptr), axis=0)

    def vjp(self, b: Builder, args: tuple[int, ...], out: int, dout: int) -> list[int | None]:  # type: ignore[override]
        return [b.emit(segment_sum, dout, args[1]), None]


class SegmentReduction(Primitive):
    """A reduction of a node's list elements to one value.

    Attributes:
        formula, initial: as those of `dynbatch.ops.reduction.Reduction`, where kernels compute it as it is.
    """

    reduces = "segments"
    formula = ""
    initial = 0.0

    def infer(self, x: Type, ptr: None) -> Type:
        return x


class SegmentSum(SegmentReduction):
    """Sum of the elements."""

    name = "esum"
    is_block = True
    formula = "x + y"

    def numpy(self, x: Array, ptr: Array) -> Array:  # type: ignore[override]
        return np.add.reduceat(x, ptr[:-1], axis=0)

    def vjp(self, b: Builder, args: tuple[int, ...], out: int, dout: int) -> list[int | None]:  # type: ignore[override]
        return [b.emit(expand, dout, args[1]), None]


class SegmentMax(SegmentReduction):
    """Elementwise maximum of the elements; the gradient goes to the first that attains it."""

    name = "emax"
    is_block = True
    formula = "greatest(x, y)"
    initial = -np.inf

    def numpy(self, x: Array, ptr: Array) -> Array:  # type: ignore[override]
        return np.maximum.reduceat(x, ptr[:-1], axis=0)

    def vjp(self, b: Builder, args: tuple[int, ...], out: int, dout: int) -> list[int | None]:  # type: ignore[override]
        return [b.emit(cmult, b.emit(segment_first, args[0], args[1]), b.emit(expand, dout, args[1])), None]


class SegmentFirst(Primitive):
    """One where an element is the first maximum of its segment, else zero."""

    name = "emax_mask"

    def infer(self, x: Type, ptr: None) -> Type:
        return x

    def numpy(self, x: Array, ptr: Array) -> Array:  # type: ignore[override]
        lengths = np.diff(ptr)
        top = np.repeat(np.maximum.reduceat(x, ptr[:-1], axis=0), lengths, axis=0)
        hit = (x == top).astype(np.int64)
        before = np.cumsum(hit, axis=0) - hit
        before -= np.repeat(before[ptr[:-1]], lengths, axis=0)
        return ((hit == 1) & (before == 0)).astype(x.dtype)


class SegmentLogSumExp(SegmentReduction):
    """``log(sum(exp(elements)))``, elementwise."""

    name = "logsumexp"

    def numpy(self, x: Array, ptr: Array) -> Array:  # type: ignore[override]
        top = np.maximum.reduceat(x, ptr[:-1], axis=0)
        top = np.where(np.isfinite(top), top, 0)
        with np.errstate(divide="ignore"):
            shifted = np.exp(x - np.repeat(top, np.diff(ptr), axis=0))
            return (np.log(np.add.reduceat(shifted, ptr[:-1], axis=0)) + top).astype(x.dtype)

    def lower(self, b: Builder, args: tuple[int, ...], **attrs: Any) -> int | None:
        x, ptr = args
        top = b.emit(finite, b.emit(segment_max, x, ptr))
        shifted = b.emit(exp, b.emit(subtract, x, b.emit(expand, top, ptr)))
        return b.emit(add, b.emit(log, b.emit(segment_sum, shifted, ptr)), top)

    def vjp(self, b: Builder, args: tuple[int, ...], out: int, dout: int) -> list[int | None]:  # type: ignore[override]
        weight = b.emit(softmax_weight, args[0], b.emit(expand, out, args[1]))
        return [b.emit(cmult, weight, b.emit(expand, dout, args[1])), None]


class SegmentLength(SegmentReduction):
    """The number of elements, as a scalar."""

    name = "length"
    is_block = True

    def infer(self, ptr: None, dtype: str) -> Type:  # type: ignore[override]
        return type_of((1,), dtype)

    def numpy(self, ptr: Array, dtype: str) -> Array:  # type: ignore[override]
        return np.diff(ptr).astype(dtype)[:, None]

    def vjp(self, b: Builder, args: tuple[int, ...], out: int, dout: int, **attrs: Any) -> list[int | None]:
        return [None]


expand = Expand()
segment_sum = SegmentSum()
segment_max = SegmentMax()
segment_first = SegmentFirst()
segment_logsumexp = SegmentLogSumExp()
segment_length = SegmentLength()
