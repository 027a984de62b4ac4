"""The softmax family. Entries of minus infinity are masked out; see `Softmax` for what a fully masked one gives."""

from __future__ import annotations

import numpy as np

from dynbatch.compiler.ir import Builder
from dynbatch.config import config
from dynbatch.errors import ShapeError, ValidityError
from dynbatch.ops.elementwise import add, cdiv, cmult, exp, log, subtract, to_float
from dynbatch.ops.indexing import element, place
from dynbatch.ops.primitive import Array, Elementwise, Primitive
from dynbatch.ops.reduction import keeping, max_to, sum_to
from dynbatch.ops.shape import axis_of, check_dim
from dynbatch.types import Type, type_of


def _exponentials(name: str, x: Array, axis: int) -> tuple[Array, Array, Array]:
    """``exp(x - max)``, its sum, and the maximum (zero where all is masked), with the axis kept."""
    top = x.max(axis=axis, keepdims=True)
    masked = np.isneginf(top)
    if config.debug and masked.any():
        raise ValidityError(f"{name}: every entry is minus infinity in {int(masked.sum())} of {masked.size} softmaxes")
    top = np.where(masked, np.zeros_like(top), top)
    e = np.exp(x - top)
    return e, e.sum(axis=axis, keepdims=True), top


unmasked = Elementwise("unmasked", "where(x == -inf, 0.0, x)", None)
less_one = Elementwise("less_one", "where(x == y, z - 1.0, z)", None, None, None)
nonzero = Elementwise("nonzero", "where(x == 0.0, 1.0, x)", None)


def _emit_exponentials(b: Builder, x: int, dim: int) -> tuple[int, int, int]:
    """The same for kernels: ``exp(x - max)``, its sum (one where all is masked), and the maximum."""
    kept = keeping(b.type(x).shape, dim)
    top = b.emit(unmasked, b.emit(max_to, x, shape=kept))
    e = b.emit(exp, b.emit(subtract, x, top))
    return e, b.emit(nonzero, b.emit(sum_to, e, shape=kept)), top


class Softmax(Primitive):
    """Softmax along a dimension. A fully masked one is all zeros (an error in debug mode)."""

    name = "softmax"
    checks_in_debug = True

    def infer(self, x: Type, dim: int) -> Type:
        check_dim(self.name, x, dim)
        return x

    def numpy(self, x: Array, dim: int) -> Array:  # type: ignore[override]
        e, total, _ = _exponentials(self.name, x, axis_of(x, dim))
        return e / np.where(total == 0, np.ones_like(total), total)

    def lower(self, b: Builder, args: tuple[int, ...], dim: int) -> int | None:  # type: ignore[override]
        e, total, _ = _emit_exponentials(b, args[0], dim)
        return b.emit(cdiv, e, total)

    def vjp(self, b: Builder, args: tuple[int, ...], out: int, dout: int, dim: int) -> list[int | None]:  # type: ignore[override]
        return [b.emit(softmax_gradient, out, dout, dim=dim)]


class SoftmaxGradient(Primitive):
    """``out * (dout - sum(out * dout))``."""

    name = "softmax_d"

    def infer(self, out: Type, dout: Type, dim: int) -> Type:
        return out

    def numpy(self, out: Array, dout: Array, dim: int) -> Array:  # type: ignore[override]
        weighted = out * dout
        return weighted - out * weighted.sum(axis=axis_of(out, dim), keepdims=True)

    def lower(self, b: Builder, args: tuple[int, ...], dim: int) -> int | None:  # type: ignore[override]
        out, dout = args
        weighted = b.emit(cmult, out, dout)
        total = b.emit(sum_to, weighted, shape=keeping(b.type(out).shape, dim))
        return b.emit(subtract, weighted, b.emit(cmult, out, total))


class LogSoftmax(Primitive):
    """Logarithm of the softmax. A fully masked one is minus infinity everywhere (an error in debug mode)."""

    name = "log_softmax"
    checks_in_debug = True

    def infer(self, x: Type, dim: int) -> Type:
        check_dim(self.name, x, dim)
        return x

    def numpy(self, x: Array, dim: int) -> Array:  # type: ignore[override]
        _, total, top = _exponentials(self.name, x, axis_of(x, dim))
        return x - top - np.log(np.where(total == 0, np.ones_like(total), total))

    def lower(self, b: Builder, args: tuple[int, ...], dim: int) -> int | None:  # type: ignore[override]
        _, total, top = _emit_exponentials(b, args[0], dim)
        return b.emit(subtract, b.emit(subtract, args[0], top), b.emit(log, total))

    def vjp(self, b: Builder, args: tuple[int, ...], out: int, dout: int, dim: int) -> list[int | None]:  # type: ignore[override]
        return [b.emit(log_softmax_gradient, out, dout, dim=dim)]


class LogSoftmaxGradient(Primitive):
    """``dout - exp(out) * sum(dout)``."""

    name = "log_softmax_d"

    def infer(self, out: Type, dout: Type, dim: int) -> Type:
        return out

    def numpy(self, out: Array, dout: Array, dim: int) -> Array:  # type: ignore[override]
        return dout - np.exp(out) * dout.sum(axis=axis_of(out, dim), keepdims=True)

    def lower(self, b: Builder, args: tuple[int, ...], dim: int) -> int | None:  # type: ignore[override]
        out, dout = args
        total = b.emit(sum_to, dout, shape=keeping(b.type(out).shape, dim))
        return b.emit(subtract, dout, b.emit(cmult, b.emit(exp, out), total))


class PickNegLogSoftmax(Primitive):
    """``-log softmax(x)[index]`` of a vector, without computing the other entries' logarithms."""

    name = "pickneglogsoftmax"
    checks_in_debug = True

    def infer(self, x: Type, index: None) -> Type:
        if len(x.shape) != 1:
            raise ShapeError(f"pickneglogsoftmax: expected a vector of scores, not shape {x.shape}")
        return type_of((1,), x.dtype)

    def numpy(self, x: Array, index: Array) -> Array:  # type: ignore[override]
        rows = index.shape[0]
        _, total, top = _exponentials(self.name, x, 1)
        chosen = np.take_along_axis(np.broadcast_to(x, (rows, x.shape[1])), index[:, None], axis=1)
        return np.log(np.where(total == 0, np.ones_like(total), total)) + top - chosen

    def lower(self, b: Builder, args: tuple[int, ...]) -> int | None:  # type: ignore[override]
        _, total, top = _emit_exponentials(b, args[0], 0)
        return b.emit(subtract, b.emit(add, b.emit(log, total), top), b.emit(element, *args))

    def vjp(self, b: Builder, args: tuple[int, ...], out: int, dout: int) -> list[int | None]:  # type: ignore[override]
        return [b.emit(cmult, b.emit(softmax_minus_one_hot, *args), dout), None]


class SoftmaxMinusOneHot(Primitive):
    """The gradient of `PickNegLogSoftmax`: the softmax, less one at the index."""

    name = "pickneglogsoftmax_d"
    checks_in_debug = True

    def infer(self, x: Type, index: None) -> Type:
        return x

    def numpy(self, x: Array, index: Array) -> Array:  # type: ignore[override]
        e, total, _ = _exponentials(self.name, x, 1)
        result = e / np.where(total == 0, np.ones_like(total), total)
        if result.shape[0] != index.shape[0]:
            result = np.repeat(result, index.shape[0], axis=0)
        result[np.arange(index.shape[0]), index] -= 1
        return result

    def lower(self, b: Builder, args: tuple[int, ...]) -> int | None:  # type: ignore[override]
        x, index = args
        type = b.type(x)
        at = b.emit(place, shape=type.shape, dim=0, dtype=type.dtype.name)
        return b.emit(less_one, at, b.emit(to_float, index, dtype=type.dtype.name), b.emit(softmax, x, dim=0))


softmax = Softmax()
softmax_gradient = SoftmaxGradient()
log_softmax = LogSoftmax()
log_softmax_gradient = LogSoftmaxGradient()
pick_neg_log_softmax = PickNegLogSoftmax()
softmax_minus_one_hot = SoftmaxMinusOneHot()
