"""Layer normalization (Ba, Kiros and Hinton 2016): each column to mean zero and variance one."""

from __future__ import annotations

import numpy as np

from dynbatch.compiler.ir import Builder
from dynbatch.ops.elementwise import cmult, constant, square, subtract
from dynbatch.ops.primitive import Array, Elementwise, Primitive
from dynbatch.ops.reduction import keeping, mean_to
from dynbatch.types import Type


def _inverse_deviation(x: Array, eps: float) -> Array:
    return 1 / np.sqrt(x.var(axis=-1, keepdims=True) + np.asarray(eps, x.dtype))


def _emit_mean(b: Builder, x: int) -> int:
    return b.emit(mean_to, x, shape=keeping(b.type(x).shape, 0))


def _emit_centered(b: Builder, x: int, eps: float) -> tuple[int, int]:
    """``x - mean`` and the inverse deviation."""
    centered = b.emit(subtract, x, _emit_mean(b, x))
    variance = _emit_mean(b, b.emit(square, centered))
    return centered, b.emit(inverse_root, variance, b.emit(constant, shape=(1,), value=eps, dtype=b.type(x).dtype.name))


inverse_root = Elementwise("inverse_root", "inverse_root(x + y)", None, None)


class Normalize(Primitive):
    """``(x - mean) / sqrt(variance + eps)`` along the first dimension, for each column."""

    name = "normalize"

    def infer(self, x: Type, eps: float) -> Type:
        return x

    def numpy(self, x: Array, eps: float) -> Array:  # type: ignore[override]
        return (x - x.mean(axis=-1, keepdims=True)) * _inverse_deviation(x, eps)

    def lower(self, b: Builder, args: tuple[int, ...], eps: float) -> int | None:  # type: ignore[override]
        return b.emit(cmult, *_emit_centered(b, args[0], eps))

    def vjp(self, b: Builder, args: tuple[int, ...], out: int, dout: int, eps: float) -> list[int | None]:  # type: ignore[override]
        return [b.emit(normalize_gradient, args[0], out, dout, eps=eps)]


class NormalizeGradient(Primitive):
    """``(dout - mean(dout) - out * mean(dout * out)) / deviation``."""

    name = "normalize_d"

    def infer(self, x: Type, out: Type, dout: Type, eps: float) -> Type:
        return x

    def numpy(self, x: Array, out: Array, dout: Array, eps: float) -> Array:  # type: ignore[override]
        centered = dout - dout.mean(axis=-1, keepdims=True)
        return (centered - out * (dout * out).mean(axis=-1, keepdims=True)) * _inverse_deviation(x, eps)

    def lower(self, b: Builder, args: tuple[int, ...], eps: float) -> int | None:  # type: ignore[override]
        x, out, dout = args
        centered = b.emit(subtract, dout, _emit_mean(b, dout))
        along = b.emit(cmult, out, _emit_mean(b, b.emit(cmult, dout, out)))
        return b.emit(cmult, b.emit(subtract, centered, along), _emit_centered(b, x, eps)[1])


normalize = Normalize()
normalize_gradient = NormalizeGradient()
