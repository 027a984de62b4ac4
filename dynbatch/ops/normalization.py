"""Layer normalization (Ba, Kiros and Hinton 2016): each column to mean zero and variance one."""

from __future__ import annotations

import numpy as np

from dynbatch.compiler.ir import Builder
from dynbatch.ops.primitive import Array, Primitive
from dynbatch.types import Type


def _inverse_deviation(x: Array, eps: float) -> Array:
    return 1 / np.sqrt(x.var(axis=-1, keepdims=True) + np.asarray(eps, x.dtype))


class Normalize(Primitive):
    """``(x - mean) / sqrt(variance + eps)`` along the first dimension, for each column."""

    name = "normalize"

    def infer(self, x: Type, eps: float) -> Type:
        return x

    def numpy(self, x: Array, eps: float) -> Array:  # type: ignore[override]
        return (x - x.mean(axis=-1, keepdims=True)) * _inverse_deviation(x, eps)

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


normalize = Normalize()
normalize_gradient = NormalizeGradient()
