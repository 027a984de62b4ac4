"""Compiled kernels of the trainers: one pass over values, gradients and optimizer state.

All arrays are flat; ``starts`` and ``stops`` say which parts of them take part: the dense parameters of a collection,
or the touched rows of a table. Every kernel clears the gradient it has used. Scalars are given in the arrays' dtype,
since one float64 literal would turn the arithmetic into float64. All kernels are serial: a value depends neither on
the number of threads nor on chance.

Names: ``x`` values, ``g`` gradient, ``clip`` what gradients are multiplied by, ``lr`` learning rate, ``keep`` what
values are multiplied by at the end (weight decay).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dynbatch.cpu.jit import jit

# No fused multiply-add and no other order of the sums: the rules round as they are written. error_model="numpy",
# since with Python's a division needs a branch and the loop does not vectorize.
_rule = jit(error_model="numpy")


def sum_of_squares(parts: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> float:
    """Of parts of arrays, as `squared_norm` takes them."""
    return sum(squared_norm(*part) for part in parts)


@jit(error_model="numpy", fastmath={"reassoc", "contract"})
def squared_norm(g: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> float:
    """Sum of squares, in float64 so that neither its size nor its order matters."""
    total = 0.0
    for s in range(len(starts)):
        part = g[starts[s] : stops[s]]
        for i in range(len(part)):
            element = np.float64(part[i])
            total += element * element
    return total


@_rule
def scale(x: np.ndarray, keep: float) -> None:
    """``x *= keep``."""
    for i in range(len(x)):
        x[i] *= keep


@jit()
def add_rows(
    gradient: np.ndarray, is_touched: np.ndarray, touched: np.ndarray, count: int, ids: np.ndarray, rows: np.ndarray
) -> int:
    """Add ``rows`` to ``gradient[ids]`` in their order, and list the rows met for the first time.

    Returns how many rows of ``touched`` are then in use; ``-1 - k`` where ``ids[k]`` is out of range, with nothing
    added.
    """
    for k in range(len(ids)):
        if ids[k] < 0 or ids[k] >= len(gradient):
            return -1 - k
    for k in range(len(ids)):
        row = ids[k]
        if not is_touched[row]:
            is_touched[row] = True
            touched[count] = row
            count += 1
        to = gradient[row]
        of = rows[k]
        for i in range(len(of)):
            to[i] += of[i]
    return count


@_rule
def sgd(x: np.ndarray, g: np.ndarray, starts: np.ndarray, stops: np.ndarray, keep: float, rate: float) -> None:
    """``x -= rate * g``, where ``rate`` is learning rate times clip."""
    for s in range(len(starts)):
        xs, gs = x[starts[s] : stops[s]], g[starts[s] : stops[s]]
        for i in range(len(xs)):
            xs[i] = (xs[i] - rate * gs[i]) * keep
            gs[i] = 0


@_rule
def momentum(
    x: np.ndarray,
    g: np.ndarray,
    velocity: np.ndarray,
    starts: np.ndarray,
    stops: np.ndarray,
    keep: float,
    rate: float,
    mom: float,
    tiny: float,
) -> None:
    """``velocity = mom * velocity - rate * g; x += velocity``, where ``rate`` is learning rate times clip."""
    for s in range(len(starts)):
        xs, gs, vs = x[starts[s] : stops[s]], g[starts[s] : stops[s]], velocity[starts[s] : stops[s]]
        for i in range(len(xs)):
            v = mom * vs[i] - rate * gs[i]
            vs[i] = v
            if abs(v) < tiny:
                vs[i] = 0
            xs[i] = (xs[i] + v) * keep
            gs[i] = 0


@_rule
def adagrad(
    x: np.ndarray,
    g: np.ndarray,
    squares: np.ndarray,
    starts: np.ndarray,
    stops: np.ndarray,
    keep: float,
    clip: float,
    lr: float,
    eps: float,
) -> None:
    """``squares += g^2; x -= lr * g / sqrt(squares + eps)``."""
    for s in range(len(starts)):
        xs, gs, vs = x[starts[s] : stops[s]], g[starts[s] : stops[s]], squares[starts[s] : stops[s]]
        for i in range(len(xs)):
            d = clip * gs[i]
            v = vs[i] + d * d
            vs[i] = v
            xs[i] = (xs[i] - lr * d / np.sqrt(v + eps)) * keep
            gs[i] = 0


@_rule
def rmsprop(
    x: np.ndarray,
    g: np.ndarray,
    squares: np.ndarray,
    starts: np.ndarray,
    stops: np.ndarray,
    keep: float,
    clip: float,
    lr: float,
    eps: float,
    rho: float,
    rest: float,
    tiny: float,
) -> None:
    """``squares = rho * squares + rest * g^2; x -= lr * g / sqrt(squares + eps)``, where ``rest`` is 1 - rho."""
    for s in range(len(starts)):
        xs, gs, vs = x[starts[s] : stops[s]], g[starts[s] : stops[s]], squares[starts[s] : stops[s]]
        for i in range(len(xs)):
            d = clip * gs[i]
            v = rho * vs[i] + rest * (d * d)
            vs[i] = v
            if v < tiny:
                vs[i] = 0
            xs[i] = (xs[i] - lr * d / np.sqrt(v + eps)) * keep
            gs[i] = 0


@_rule
def adam(
    x: np.ndarray,
    g: np.ndarray,
    mean: np.ndarray,
    squares: np.ndarray,
    starts: np.ndarray,
    stops: np.ndarray,
    keep: float,
    clip: float,
    lr: float,
    eps: float,
    beta_1: float,
    rest_1: float,
    beta_2: float,
    rest_2: float,
    tiny: float,
) -> None:
    """Moving averages of g and g^2; ``x -= lr * mean / (sqrt(squares) + eps)``, the bias correction being in ``lr``."""
    for s in range(len(starts)):
        xs, gs = x[starts[s] : stops[s]], g[starts[s] : stops[s]]
        ms, vs = mean[starts[s] : stops[s]], squares[starts[s] : stops[s]]
        for i in range(len(xs)):
            d = clip * gs[i]
            m = beta_1 * ms[i] + rest_1 * d
            v = beta_2 * vs[i] + rest_2 * (d * d)
            ms[i] = m
            if abs(m) < tiny:
                ms[i] = 0
            vs[i] = v
            if v < tiny:
                vs[i] = 0
            xs[i] = (xs[i] - lr * m / (np.sqrt(v) + eps)) * keep
            gs[i] = 0


@_rule
def amsgrad(
    x: np.ndarray,
    g: np.ndarray,
    mean: np.ndarray,
    squares: np.ndarray,
    largest: np.ndarray,
    starts: np.ndarray,
    stops: np.ndarray,
    keep: float,
    clip: float,
    lr: float,
    eps: float,
    beta_1: float,
    rest_1: float,
    beta_2: float,
    rest_2: float,
    tiny: float,
) -> None:
    """As `adam`, dividing by the largest average of g^2 so far."""
    for s in range(len(starts)):
        xs, gs = x[starts[s] : stops[s]], g[starts[s] : stops[s]]
        ms, vs, ls = mean[starts[s] : stops[s]], squares[starts[s] : stops[s]], largest[starts[s] : stops[s]]
        for i in range(len(xs)):
            d = clip * gs[i]
            m = beta_1 * ms[i] + rest_1 * d
            v = beta_2 * vs[i] + rest_2 * (d * d)
            ms[i] = m
            if abs(m) < tiny:
                ms[i] = 0
            vs[i] = v
            if v < tiny:
                vs[i] = 0
            largest_v = max(ls[i], v)
            ls[i] = largest_v
            if largest_v < tiny:
                ls[i] = 0
            xs[i] = (xs[i] - lr * m / (np.sqrt(largest_v) + eps)) * keep
            gs[i] = 0
