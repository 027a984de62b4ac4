"""Sums, means, maxima and distances within one value."""

from __future__ import annotations

import math
from typing import Any

from dynbatch.compiler.trace import Tracer
from dynbatch.errors import ShapeError, user_line
from dynbatch.functions.arguments import Dim
from dynbatch.functions.batches import sum_batches
from dynbatch.graph import Expression
from dynbatch.ops import elementwise as ew
from dynbatch.ops import reduction, shape
from dynbatch.ops.record import (
    Op,
    as_expression,
    as_operand,
)


def _emit_sum_dim(t: Tracer, x: int, dims: tuple[int, ...], mean: bool) -> int:
    for d in dims:
        shape.check_dim("mean_dim" if mean else "sum_dim", t.type(x), d)
    source = t.type(x).shape
    kept = tuple(1 if d in dims else n for d, n in enumerate(source))
    total = t.emit(reduction.sum_to, x, shape=kept)
    left = tuple(n for d, n in enumerate(source) if d not in dims) or (1,)
    total = t.emit(shape.reshape, total, shape=left)
    if mean:
        total = t.emit(ew.cmult, total, t.constant(1.0 / math.prod(source[d] for d in dims)))
    return total


def _emit_mean(t: Tracer, x: int) -> int:
    return t.emit(ew.cmult, t.emit(reduction.sum_to, x, shape=(1,)), t.constant(1.0 / t.type(x).size))


_sum_elems = Op("sum_elems", lambda t, x: t.emit(reduction.sum_to, x, shape=(1,)))
_mean_elems = Op("mean_elems", _emit_mean)
_sum_dim = Op("sum_dim", lambda t, x, dims: _emit_sum_dim(t, x, dims, False))
_mean_dim = Op("mean_dim", lambda t, x, dims: _emit_sum_dim(t, x, dims, True))
_max_dim = Op("max_dim", lambda t, x, dim: t.emit(reduction.max_dim, x, dim=dim))
_argmax = Op(
    "argmax", lambda t, x, dim, straight: t.emit(reduction.one_hot_argmax, x, dim=dim, straight_through=straight)
)
_squared_norm = Op("squared_norm", lambda t, x: emit_sum(t, t.emit(ew.square, x)))
_squared_distance = Op(
    "squared_distance", lambda t, x, y: emit_sum(t, t.emit(ew.square, _difference(t, "squared_distance", x, y)))
)
_l1_distance = Op("l1_distance", lambda t, x, y: emit_sum(t, t.emit(ew.absolute, _difference(t, "l1_distance", x, y))))
_huber_distance = Op(
    "huber_distance", lambda t, x, y, c: emit_sum(t, t.emit(ew.huber, _difference(t, "huber_distance", x, y), c))
)
_binary_log_loss = Op("binary_log_loss", lambda t, x, y: emit_sum(t, t.emit(ew.binary_cross_entropy, x, y)))


def emit_sum(t: Tracer, x: int) -> int:
    """The sum of all elements."""
    return t.emit(reduction.sum_to, x, shape=(1,))


def _difference(t: Tracer, name: str, x: int, y: int) -> int:
    if t.type(x).shape != t.type(y).shape:
        raise ShapeError(f"{name}: shapes {t.type(x).shape} and {t.type(y).shape} differ")
    return t.emit(ew.subtract, x, y)


def sum_elems(x: Any) -> Expression:
    """Sum of all elements, a scalar."""
    return _sum_elems.unary(x)


def mean_elems(x: Any) -> Expression:
    """Mean of all elements, a scalar."""
    return _mean_elems.unary(x)


def _dim_list(d: Dim) -> tuple[int, ...]:
    return tuple(sorted({int(d)} if hasattr(d, "__index__") else {int(i) for i in d}))


def sum_dim(x: Any, d: Dim, b: bool = False) -> Expression:
    """Sum along the dimensions ``d``, which disappear; ``b`` also sums over the batch elements."""
    dims = _dim_list(d)
    result = _sum_dim((as_operand(x),), static=(dims,)) if dims else as_expression(x)
    return sum_batches(result) if b else result


def mean_dim(x: Any, d: Dim, b: bool = False, n: int = 0) -> Expression:
    """Mean along the dimensions ``d``, which disappear; ``b`` also over the batch elements.

    Arguments:
        x: any expression.
        d: a dimension or a list of them.
        b: whether to average over the batch elements too.
        n: divide by this instead of by the number of elements; 0 for that number.
    """
    dims = _dim_list(d)
    x = as_expression(x)
    lanes = x.dim()[1] if b else 1
    count = n or math.prod(x.type.shape[i] for i in dims if i < len(x.type.shape)) * lanes
    return sum_dim(x, dims, b) * (1.0 / count) if n or b else _mean_dim((x,), static=(dims,))


def max_dim(x: Any, d: int = 0) -> Expression:
    """Maximum along a dimension, which disappears; the gradient goes to the first maximum."""
    return _max_dim((as_operand(x),), static=(int(d),))


def argmax(x: Any, gradient_mode: str = "zero_gradient", d: int = 0) -> Expression:
    """One at the (first) maximum along dimension ``d``, else zero.

    Arguments:
        x: any expression.
        gradient_mode: ``"zero_gradient"``, or ``"straight_through_gradient"`` to pass gradients unchanged.
        d: the dimension.
    """
    modes = {"zero_gradient": False, "straight_through_gradient": True}
    if gradient_mode not in modes:
        raise ValueError(f"{user_line()}: argmax: gradient_mode must be one of {', '.join(modes)}")
    return _argmax((as_operand(x),), static=(int(d), modes[gradient_mode]))


def squared_norm(x: Any) -> Expression:
    """Sum of squares, a scalar."""
    return _squared_norm.unary(x)


def squared_distance(x: Any, y: Any) -> Expression:
    """Sum of squared differences, a scalar."""
    return _squared_distance.binary(x, y)


def l1_distance(x: Any, y: Any) -> Expression:
    """Sum of absolute differences, a scalar."""
    return _l1_distance.binary(x, y)


def huber_distance(x: Any, y: Any, c: float = 1.345) -> Expression:
    """Sum of Huber's function: ``d * d / 2`` where the difference ``d`` is below ``c``, else ``c * (|d| - c / 2)``."""
    return _huber_distance([as_operand(o, "huber_distance") for o in (x, y)], (), (c,))


def binary_log_loss(x: Any, y: Any) -> Expression:
    """``-sum(y log(x) + (1 - y) log(1 - x))``, a scalar; ``0 log 0`` is zero."""
    return _binary_log_loss.binary(x, y)
