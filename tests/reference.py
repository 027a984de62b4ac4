"""A tape of NumPy arrays with gradients: the plain evaluation that dynbatch is held against.

One instance at a time, in float64, in the user's shapes, with nothing shared with the package. `Skip` is raised where
a comparison would be meaningless: within rounding of a kink, or where values grow out of hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Array = np.ndarray
Pull = Callable[[Array], Array]
_KINK = 1e-5


class Skip(Exception):
    """This op cannot be compared at these operands."""


class Var:
    """A value, and for each operand how a gradient is pulled back to it."""

    def __init__(self, value: Array, edges: Sequence[tuple[Var, Pull]] = ()) -> None:
        self.value = np.asarray(value, dtype=np.float64)
        if self.value.ndim == 0:
            self.value = self.value.reshape(1)
        if not np.isfinite(self.value).all() or np.abs(self.value).max() > 1e3:
            raise Skip
        self.edges = list(edges)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape


def gradients(loss: Var) -> dict[Var, Array]:
    """Gradient of a scalar with respect to everything it depends on."""
    order: list[Var] = []
    seen: set[Var] = set()

    def visit(var: Var) -> None:
        stack = [(var, iter(var.edges))]
        seen.add(var)
        while stack:
            top, edges = stack[-1]
            for operand, _ in edges:
                if operand not in seen:
                    seen.add(operand)
                    stack.append((operand, iter(operand.edges)))
                    break
            else:
                order.append(top)
                stack.pop()

    visit(loss)
    found = {loss: np.ones(loss.shape)}
    for var in reversed(order):
        for operand, pull in var.edges:
            part = pull(found[var])
            assert part.shape == operand.shape
            found[operand] = found.get(operand, 0) + part
    return found


# ---- broadcasting ----------------------------------------------------------------------------------------------------


def _column(x: Array, rank: int) -> Array:
    """Shapes are aligned at the left."""
    return x.reshape(x.shape + (1,) * (rank - x.ndim))


def _unbroadcast(g: Array, shape: tuple[int, ...]) -> Array:
    padded = shape + (1,) * (g.ndim - len(shape))
    axes = tuple(d for d, (n, m) in enumerate(zip(padded, g.shape)) if n == 1 and m != 1)
    return g.sum(axis=axes, keepdims=True).reshape(shape)


def _binary(
    x: Var, y: Var, f: Callable[[Array, Array], Array], dx: Callable[..., Array], dy: Callable[..., Array]
) -> Var:
    rank = max(x.value.ndim, y.value.ndim)
    a, b = _column(x.value, rank), _column(y.value, rank)
    return Var(
        f(a, b),
        [(x, lambda g: _unbroadcast(dx(g, a, b), x.shape)), (y, lambda g: _unbroadcast(dy(g, a, b), y.shape))],
    )


def _unary(x: Var, f: Array, derivative: Array) -> Var:
    return Var(f, [(x, lambda g: g * derivative)])


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def add(x: Var, y: Var) -> Var:
    return _binary(x, y, lambda a, b: a + b, lambda g, a, b: g + 0 * (a + b), lambda g, a, b: g + 0 * (a + b))


def subtract(x: Var, y: Var) -> Var:
    return _binary(x, y, lambda a, b: a - b, lambda g, a, b: g + 0 * (a - b), lambda g, a, b: -g + 0 * (a - b))


def cmult(x: Var, y: Var) -> Var:
    return _binary(x, y, lambda a, b: a * b, lambda g, a, b: g * b, lambda g, a, b: g * a)


def cdiv(x: Var, y: Var) -> Var:
    if np.abs(y.value).min() < 0.2:
        raise Skip
    return _binary(x, y, lambda a, b: a / b, lambda g, a, b: g / b, lambda g, a, b: -g * a / b**2)


def scale(x: Var, a: float) -> Var:
    return _unary(x, x.value * a, np.asarray(a))


def shift(x: Var, a: float) -> Var:
    return _unary(x, x.value + a, np.ones(x.shape))


def matmul(x: Var, y: Var) -> Var:
    a, b = x.value, y.value
    if b.ndim == 1:
        return Var(a @ b, [(x, lambda g: np.outer(g, b)), (y, lambda g: a.T @ g)])
    return Var(a @ b, [(x, lambda g: g @ b.T), (y, lambda g: a.T @ g)])


def affine(bias: Var, *factors: Var) -> Var:
    total = scale(bias, 1.0)
    for w, x in zip(factors[::2], factors[1::2]):
        total = add(total, matmul(w, x))
    return total


def transpose(x: Var) -> Var:
    return Var(x.value.T, [(x, lambda g: g.T)])


def dot(x: Var, y: Var) -> Var:
    return sum_elems(cmult(x, y))


# ---- elementwise -----------------------------------------------------------------------------------------------------


def tanh(x: Var) -> Var:
    y = np.tanh(x.value)
    return _unary(x, y, 1 - y * y)


def logistic(x: Var) -> Var:
    y = 1 / (1 + np.exp(-x.value))
    return _unary(x, y, y * (1 - y))


def exp(x: Var) -> Var:
    with np.errstate(over="ignore"):
        y = np.exp(x.value)
    return _unary(x, y, y)


def square(x: Var) -> Var:
    return _unary(x, x.value**2, 2 * x.value)


def rectify(x: Var) -> Var:
    _away_from_zero(x.value)
    return _unary(x, np.maximum(x.value, 0), (x.value > 0).astype(float))


def absolute(x: Var) -> Var:
    _away_from_zero(x.value)
    return _unary(x, np.abs(x.value), np.sign(x.value))


def bmax(x: Var, y: Var) -> Var:
    rank = max(x.value.ndim, y.value.ndim)
    _away_from_zero(_column(x.value, rank) - _column(y.value, rank))
    return _binary(x, y, np.maximum, lambda g, a, b: g * (a > b), lambda g, a, b: g * (a < b))


def nobackprop(x: Var) -> Var:
    return Var(x.value)


def scale_gradient(x: Var, a: float) -> Var:
    return _unary(x, x.value, np.asarray(a))


def _away_from_zero(x: Array) -> None:
    if np.abs(x).min() < _KINK:
        raise Skip


# ---- reductions ------------------------------------------------------------------------------------------------------


def esum(xs: Sequence[Var]) -> Var:
    return Var(np.sum([x.value for x in xs], axis=0), [(x, lambda g: g) for x in xs])


def average(xs: Sequence[Var]) -> Var:
    return scale(esum(xs), 1 / len(xs))


def emax(xs: Sequence[Var]) -> Var:
    stacked = np.stack([x.value for x in xs])
    if len(xs) > 1:
        ordered = np.sort(stacked, axis=0)
        _away_from_zero(ordered[-1] - ordered[-2])
    first = stacked.argmax(axis=0)
    return Var(stacked.max(axis=0), [(x, lambda g, k=k: g * (first == k)) for k, x in enumerate(xs)])  # type: ignore[misc]


def logsumexp(xs: Sequence[Var]) -> Var:
    stacked = np.stack([x.value for x in xs])
    total = np.log(np.exp(stacked - stacked.max()).sum(axis=0)) + stacked.max()
    return Var(total, [(x, lambda g, x=x: g * np.exp(x.value - total)) for x in xs])  # type: ignore[misc]


def sum_elems(x: Var) -> Var:
    return Var(x.value.sum(), [(x, lambda g: np.broadcast_to(g.reshape((1,) * x.value.ndim), x.shape))])


def sum_dim(x: Var, d: int) -> Var:
    return Var(x.value.sum(axis=d), [(x, lambda g: np.broadcast_to(np.expand_dims(g, d), x.shape))])


def max_dim(x: Var, d: int) -> Var:
    ordered = np.sort(x.value, axis=d)
    _away_from_zero(np.take(ordered, -1, axis=d) - np.take(ordered, -2, axis=d))
    top = x.value.max(axis=d, keepdims=True)
    return Var(x.value.max(axis=d), [(x, lambda g: g.reshape(top.shape) * (x.value == top))])


# ---- softmax ---------------------------------------------------------------------------------------------------------


def softmax(x: Var, d: int = 0) -> Var:
    e = np.exp(x.value - x.value.max())
    y = e / e.sum(axis=d, keepdims=True)
    return Var(y, [(x, lambda g: y * (g - (g * y).sum(axis=d, keepdims=True)))])


def log_softmax(x: Var, d: int = 0) -> Var:
    e = np.exp(x.value - x.value.max())
    y = e / e.sum(axis=d, keepdims=True)
    return Var(np.log(y), [(x, lambda g: g - y * g.sum(axis=d, keepdims=True))])


def pick_neg_log_softmax(x: Var, index: int) -> Var:
    return scale(pick(log_softmax(x), index, 0), -1.0)


def hinge(x: Var, index: int, margin: float) -> Var:
    others = [k for k in range(x.value.size) if k != index]
    return esum([rectify(shift(subtract(pick(x, k, 0), pick(x, index, 0)), margin)) for k in others])


def layer_norm(x: Var, g: Var, b: Var) -> Var:
    n = x.shape[0]
    ones = Var(np.full((1, n), 1 / n))

    def mean(v: Var) -> Var:
        return matmul(ones, v)

    def spread(v: Var) -> Var:
        return matmul(Var(np.ones((n, 1))), v)

    matrix = x.value.ndim == 2
    centered = subtract(x, spread(mean(x))) if matrix else subtract(x, mean(x))
    variance = mean(square(centered))
    if variance.value.min() < 1e-3:
        raise Skip
    inverse = Var(variance.value**-0.5, [(variance, lambda d: -0.5 * d * variance.value**-1.5)])
    return add(cmult(cmult(centered, spread(inverse) if matrix else inverse), g), b)


# ---- shapes ----------------------------------------------------------------------------------------------------------


def pick(x: Var, index: int, d: int) -> Var:
    def pull(g: Array) -> Array:
        result = np.zeros(x.shape)
        np.moveaxis(result, d, 0)[index] = g.reshape(np.take(x.value, index, axis=d).shape)
        return result

    return Var(np.take(x.value, index, axis=d), [(x, pull)])


def select(x: Var, indices: Sequence[int], d: int) -> Var:
    def pull(g: Array) -> Array:
        result = np.zeros(x.shape)
        np.add.at(np.moveaxis(result, d, 0), list(indices), np.moveaxis(g, d, 0))
        return result

    return Var(np.take(x.value, indices, axis=d), [(x, pull)])


def concatenate(xs: Sequence[Var], d: int = 0) -> Var:
    rank = max(d + 1, *(x.value.ndim for x in xs))
    columns = [_column(x.value, rank) for x in xs]
    ends = np.cumsum([c.shape[d] for c in columns])
    edges = [
        (x, lambda g, x=x, s=range(e - c.shape[d], e): np.take(g, s, axis=d).reshape(x.shape))  # type: ignore[misc]
        for x, c, e in zip(xs, columns, ends)
    ]
    return Var(np.concatenate(columns, axis=d), edges)


def reshape(x: Var, shape: tuple[int, ...]) -> Var:
    return Var(x.value.reshape(shape, order="F"), [(x, lambda g: g.reshape(x.shape, order="F"))])
