"""Primitive ops on each element; the gradient stands beside the formula."""

from __future__ import annotations

from typing import Any

import numpy as np

from dynbatch.compiler.ir import Builder
from dynbatch.ops.primitive import Array, Elementwise, Primitive, align
from dynbatch.types import Type, type_of

add = Elementwise("add", "x + y", "dy", "dy")
subtract = Elementwise("subtract", "x - y", "dy", "-dy")
cmult = Elementwise("cmult", "x * y", "dy * y", "dy * x")
cdiv = Elementwise("cdiv", "x / y", "dy / y", "-dy * out / y")
power = Elementwise(
    "pow",
    "power(x, y)",
    "where(y == 0.0, 0.0, dy * y * power(x, y - 1.0))",  # at zero, too
    "where(x > 0.0, dy * out * log(where(x > 0.0, x, 1.0)), 0.0)",
)
bmax = Elementwise("bmax", "where(x > y, x, y)", "where(x > y, dy, 0.0)", "where(x > y, 0.0, dy)")
bmin = Elementwise("bmin", "where(x < y, x, y)", "where(x < y, dy, 0.0)", "where(x < y, 0.0, dy)")
emax = Elementwise(  # unlike bmax it keeps NaN, and the gradient goes to the first of equal operands
    "emax",
    "where(x >= y, x, where(y > x, y, x + y))",
    "where(x >= y, dy, 0.0)",
    "where(y > x, dy, 0.0)",
)
logaddexp = Elementwise(
    "logsumexp",
    "where(x > y, x, y) + where(x == y, 0.6931471805599453, log1p(exp(-abs(x - y))))",  # equal infinities, too
    "dy * where(x == out, 1.0, exp(x - out))",
    "dy * where(y == out, 1.0, exp(y - out))",
)

negate = Elementwise("negate", "-x", "-dy")
exp = Elementwise("exp", "exp(x)", "dy * out")
log = Elementwise("log", "log(x)", "dy / x")
sqrt = Elementwise("sqrt", "sqrt(x)", "0.5 * dy / out")
square = Elementwise("square", "x * x", "2.0 * dy * x")
absolute = Elementwise("abs", "abs(x)", "dy * sign(x)")
tanh = Elementwise("tanh", "tanh(x)", "dy * (1.0 - out * out)")
logistic = Elementwise("logistic", "logistic(x)", "dy * out * (1.0 - out)")
rectify = Elementwise("rectify", "where(x < 0.0, 0.0, x)", "where(x > 0.0, dy, 0.0)")
elu = Elementwise(  # where() keeps exp from overflowing, and unlike minimum() it keeps NaN in every tier
    "elu",
    "where(x > 0.0, x, y * expm1(where(x > 0.0, 0.0, x)))",
    "where(x > 0.0, dy, dy * y * exp(where(x > 0.0, 0.0, x)))",
    "where(x > 0.0, 0.0, dy * expm1(where(x > 0.0, 0.0, x)))",
)
silu = Elementwise(
    "silu",
    "x * logistic(y * x)",
    "dy * logistic(y * x) * (1.0 + y * x * (1.0 - logistic(y * x)))",
    "dy * x * x * logistic(y * x) * (1.0 - logistic(y * x))",
)
gelu = Elementwise(
    "gelu",
    "0.5 * x * (1.0 + erf(0.7071067811865476 * x))",
    "dy * (0.5 * (1.0 + erf(0.7071067811865476 * x)) + 0.3989422804014327 * x * exp(-0.5 * x * x))",
)
softsign = Elementwise("softsign", "x / (1.0 + abs(x))", "dy / ((1.0 + abs(x)) * (1.0 + abs(x)))")
log_sigmoid = Elementwise("log_sigmoid", "minimum(x, 0.0) - log1p(exp(-abs(x)))", "dy * (1.0 - exp(out))")
binary_cross_entropy = Elementwise(
    "binary_log_loss",
    "where(y > 0.0, -y * log(where(y > 0.0, x, 1.0)), 0.0)"
    " - where(y < 1.0, (1.0 - y) * log(1.0 - where(y < 1.0, x, 0.0)), 0.0)",
    "dy * (where(y < 1.0, (1.0 - y) / (1.0 - where(y < 1.0, x, 0.0)), 0.0)"
    " - where(y > 0.0, y / where(y > 0.0, x, 1.0), 0.0))",
    "dy * (log(1.0 - x) - log(x))",
)
huber = Elementwise(
    "huber_distance",
    "where(abs(x) < y, 0.5 * x * x, y * (abs(x) - 0.5 * y))",
    "dy * where(abs(x) < y, x, y * sign(x))",
    None,
)
at_place = Elementwise("at_place", "where(x == y, z, 0.0)", None, None, None)  # unlike a product with a mask
softmax_weight = Elementwise("softmax_weight", "where(x == y, 1.0, exp(x - y))", None, None)  # of infinities, too
less = Elementwise("less", "where(x < y, 1.0, 0.0)", None, None)
gumbel = Elementwise("gumbel", "-log(-log(x))", None)
stop_gradient = Elementwise("nobackprop", "x", None)
flip_gradient = Elementwise("flip_gradient", "x", "-dy")


class ScaleGradient(Primitive):
    """The first operand as it is; its gradient is multiplied by the second (a scalar)."""

    name = "scale_gradient"
    view = True

    def infer(self, x: Type, factor: Type) -> Type:
        return x

    def numpy(self, x: Array, factor: Array) -> Array:  # type: ignore[override]
        return x

    def lower(self, b: Builder, args: tuple[int, ...], **attrs: Any) -> int | None:
        return args[0]

    def vjp(self, b: Builder, args: tuple[int, ...], out: int, dout: int) -> list[int | None]:  # type: ignore[override]
        return [b.emit(cmult, dout, args[1]), None]


class BroadcastTo(Primitive):
    """Stretch dimensions of one to ``shape``, aligned at the left."""

    name = "broadcast_to"
    is_block = True

    def infer(self, x: Type, shape: tuple[int, ...]) -> Type:
        return type_of(shape, x.dtype)

    def numpy(self, x: Array, shape: tuple[int, ...]) -> Array:  # type: ignore[override]
        target = np.empty((1, *shape[::-1]), np.bool_)
        aligned = align((x, target))[0]
        return np.broadcast_to(aligned, (x.shape[0], *shape[::-1]))

    def vjp(self, b: Builder, args: tuple[int, ...], out: int, dout: int, **attrs: Any) -> list[int | None]:
        from dynbatch.ops.reduction import sum_to

        return [b.emit(sum_to, dout, shape=b.type(args[0]).shape)]


class Constant(Primitive):
    """The same number everywhere; it depends on nothing, so it is shared by the whole batch."""

    name = "constant"
    is_block = True

    def infer(self, shape: tuple[int, ...], value: float, dtype: str) -> Type:
        return type_of(shape, dtype)

    def numpy(self, shape: tuple[int, ...], value: float, dtype: str) -> Array:  # type: ignore[override]
        return np.full((1, *shape[::-1]), value, dtype)


class ToFloat(Primitive):
    """An integer payload as a scalar."""

    name = "to_float"
    is_block = True

    def infer(self, x: None, dtype: str) -> Type:
        return type_of((1,), dtype)

    def numpy(self, x: Array, dtype: str) -> Array:  # type: ignore[override]
        return x.astype(dtype)[:, None]


scale_gradient = ScaleGradient()
broadcast_to = BroadcastTo()
constant = Constant()
to_float = ToFloat()
