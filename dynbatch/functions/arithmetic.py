"""Operators and elementwise functions."""

from __future__ import annotations

from typing import Any

from dynbatch.compiler.trace import Tracer
from dynbatch.errors import user_line
from dynbatch.functions.arguments import is_number, simple_op
from dynbatch.graph import Expression, Operand
from dynbatch.ops import elementwise as ew
from dynbatch.ops import linear, shape
from dynbatch.ops.record import (
    Op,
    as_operand,
)

_add, _subtract, _cmult, _cdiv, _pow = (simple_op(p) for p in (ew.add, ew.subtract, ew.cmult, ew.cdiv, ew.power))
_rsubtract = Op("subtract", lambda t, x, number: t.emit(ew.subtract, number, x))
_rdivide = Op("divide", lambda t, x, number: t.emit(ew.cdiv, number, x))
_times_matrix = Op("matrix product", lambda t, a, b: emit_product(t, a, b))


def emit_product(t: Tracer, a: int, b: int) -> int:
    """The matrix product, a vector where the right factor is one.

    A column times a number is elementwise, and so goes into one kernel with what is around it.
    """
    if t.type(b).shape == (1,) and t.type(a).shape[1:] in ((), (1,)):
        return t.emit(ew.cmult, t.emit(shape.reshape, a, shape=t.type(a).shape[:1]), b)
    return t.emit(linear.matmul, a, b, vector=len(t.type(b).shape) == 1)


def plus(x: Any, y: Any) -> Expression:
    """``x + y``, either of which may be a number."""
    if not isinstance(y, Operand):
        return _add((x,), (), (_number("+", y),))
    if not isinstance(x, Operand):
        return _add((y,), (), (_number("+", x),))
    return _add.binary(x, y)


def minus(x: Any, y: Any) -> Expression:
    """``x - y``, either of which may be a number."""
    if not isinstance(y, Operand):
        return _subtract((x,), (), (_number("-", y),))
    if not isinstance(x, Operand):
        return _rsubtract((y,), (), (_number("-", x),))
    return _subtract.binary(x, y)


def times(x: Any, y: Any) -> Expression:
    """``x * y``: the matrix product of two expressions, or scaling by a number."""
    if not isinstance(y, Operand):
        return _cmult((x,), (), (_number("*", y),))
    if not isinstance(x, Operand):
        return _cmult((y,), (), (_number("*", x),))
    return _times_matrix.binary(x, y)


def matrix_product(x: Any, y: Any) -> Expression:
    """``x @ y``: the matrix product."""
    return _times_matrix.binary(x, y)


def divide(x: Any, y: Any) -> Expression:
    """``x / y``: elementwise, either of which may be a number."""
    if not isinstance(y, Operand):
        return _cdiv((x,), (), (_number("/", y),))
    if not isinstance(x, Operand):
        return _rdivide((y,), (), (_number("/", x),))
    return _cdiv.binary(x, y)


def _number(name: str, x: Any) -> Any:
    if type(x) is not float and type(x) is not int and not is_number(x):
        raise TypeError(
            f"{user_line()}: {name}: expected an Expression, a parameter or a number, not {type(x).__name__}"
        )
    return x


def cmult(x: Any, y: Any) -> Expression:
    """Elementwise product, broadcasting."""
    return _cmult.binary(x, y)


def cdiv(x: Any, y: Any) -> Expression:
    """Elementwise quotient, broadcasting."""
    return _cdiv.binary(x, y)


def pow(x: Any, y: Any) -> Expression:
    """``x`` to the power ``y`` (a number or a scalar expression), elementwise."""
    if isinstance(y, Operand):
        return _pow.binary(x, y)
    return _pow((as_operand(x),), (), (_number("pow", y),))


def bmax(x: Any, y: Any) -> Expression:
    """Elementwise maximum of two expressions."""
    return _bmax.binary(x, y)


def bmin(x: Any, y: Any) -> Expression:
    """Elementwise minimum of two expressions."""
    return _bmin.binary(x, y)


_bmax, _bmin = simple_op(ew.bmax), simple_op(ew.bmin)
_unary = {
    p.name: simple_op(p)
    for p in (
        ew.negate, ew.exp, ew.log, ew.sqrt, ew.square, ew.absolute, ew.tanh, ew.logistic, ew.rectify, ew.gelu,
        ew.softsign, ew.log_sigmoid, ew.stop_gradient, ew.flip_gradient,
    )
}  # fmt: skip
_negate, _exp, _log, _sqrt = _unary["negate"], _unary["exp"], _unary["log"], _unary["sqrt"]
_square, _absolute, _tanh, _logistic = _unary["square"], _unary["abs"], _unary["tanh"], _unary["logistic"]
_rectify, _gelu, _softsign = _unary["rectify"], _unary["gelu"], _unary["softsign"]
_log_sigmoid, _nobackprop, _flip_gradient = _unary["log_sigmoid"], _unary["nobackprop"], _unary["flip_gradient"]
_elu, _silu, _scale_gradient = simple_op(ew.elu), simple_op(ew.silu), simple_op(ew.scale_gradient)


def negate(x: Any) -> Expression:
    """``-x``."""
    return _negate.unary(x)


def exp(x: Any) -> Expression:
    """Exponential, elementwise."""
    return _exp.unary(x)


def log(x: Any) -> Expression:
    """Natural logarithm, elementwise."""
    return _log.unary(x)


def sqrt(x: Any) -> Expression:
    """Square root, elementwise."""
    return _sqrt.unary(x)


def square(x: Any) -> Expression:
    """Square, elementwise."""
    return _square.unary(x)


def abs(x: Any) -> Expression:
    """Absolute value, elementwise."""
    return _absolute.unary(x)


def tanh(x: Any) -> Expression:
    """Hyperbolic tangent, elementwise."""
    return _tanh.unary(x)


def logistic(x: Any) -> Expression:
    """The logistic function ``1 / (1 + exp(-x))``, elementwise."""
    return _logistic.unary(x)


def rectify(x: Any) -> Expression:
    """``max(x, 0)``, elementwise."""
    return _rectify.unary(x)


def elu(x: Any, alpha: float = 1.0) -> Expression:
    """``x`` where positive, else ``alpha * (exp(x) - 1)`` (Clevert, Unterthiner and Hochreiter 2016)."""
    return _elu((as_operand(x),), (), (alpha,))


def silu(x: Any, beta: float = 1.0) -> Expression:
    """``x * logistic(beta * x)`` (Elfwing, Uchibe and Doya 2018)."""
    return _silu((as_operand(x),), (), (beta,))


def gelu(x: Any) -> Expression:
    """``x`` times the normal distribution function of ``x``, exactly (Hendrycks and Gimpel 2016)."""
    return _gelu.unary(x)


def softsign(x: Any) -> Expression:
    """``x / (1 + |x|)``, elementwise."""
    return _softsign.unary(x)


def log_sigmoid(x: Any) -> Expression:
    """Logarithm of the logistic function, without overflow."""
    return _log_sigmoid.unary(x)


def nobackprop(x: Any) -> Expression:
    """``x`` as a constant: no gradient passes."""
    return _nobackprop.unary(x)


def flip_gradient(x: Any) -> Expression:
    """``x``; its gradient changes sign (Ganin and Lempitsky 2015)."""
    return _flip_gradient.unary(x)


def scale_gradient(x: Any, lambd: float = 1.0) -> Expression:
    """``x``; its gradient is multiplied by ``lambd``."""
    return _scale_gradient((as_operand(x),), (), (lambd,))
