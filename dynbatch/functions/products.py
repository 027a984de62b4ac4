"""Products of matrices and vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynbatch.compiler.trace import Tracer
from dynbatch.errors import ShapeError, user_line
from dynbatch.functions.arguments import simple_op
from dynbatch.functions.arithmetic import emit_product
from dynbatch.graph import Expression
from dynbatch.ops import elementwise as ew
from dynbatch.ops import linear, reduction
from dynbatch.ops.record import (
    Op,
)

_transpose = simple_op(linear.transpose)
_dot_product = Op("dot_product", lambda t, x, y: _emit_dot(t, x, y))


def _emit_dot(t: Tracer, x: int, y: int) -> int:
    if t.type(x).shape != t.type(y).shape:
        raise ShapeError(f"dot_product: shapes {t.type(x).shape} and {t.type(y).shape} differ")
    return t.emit(reduction.sum_to, t.emit(ew.cmult, x, y), shape=(1,))


def _emit_affine(t: Tracer, bias: int, *factors: int) -> int:
    total = bias
    for w, x in zip(factors[::2], factors[1::2]):
        product = emit_product(t, w, x)
        if _product_mismatch(t.type(bias).shape, t.type(product).shape):
            raise ShapeError(
                f"affine_transform: bias of shape {t.type(bias).shape} does not fit the product of shapes "
                f"{t.type(w).shape} and {t.type(x).shape}"
            )
        total = t.emit(ew.add, total, product)
    return total


def _product_mismatch(bias: tuple[int, ...], product: tuple[int, ...]) -> bool:
    """Whether a bias cannot be added to each column of a product."""
    return len(bias) > len(product) or any(b not in (1, p) for b, p in zip(bias, product))


_affine = Op("affine_transform", _emit_affine)


def affine_transform(exprs: Sequence[Any]) -> Expression:
    """``b + W1 * x1 + W2 * x2 + ...`` of the list ``[b, W1, x1, W2, x2, ...]``; the bias is added to each column."""
    if len(exprs) % 2 == 0:
        raise ShapeError(f"{user_line()}: affine_transform: expected [b, W1, x1, ...], an odd number, not {len(exprs)}")
    return _affine.several(list(exprs))


def transpose(x: Any) -> Expression:
    """The transposed matrix; a vector becomes one row."""
    return _transpose.unary(x)


def dot_product(x: Any, y: Any) -> Expression:
    """Inner product of two expressions of one shape, a scalar."""
    return _dot_product.binary(x, y)
