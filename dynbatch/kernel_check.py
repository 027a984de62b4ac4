"""What ``debug`` checks of kernels that users bring: rows that keep to themselves, what is written, gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dynbatch.errors import CustomOpError, user_line
from dynbatch.ops.custom import Custom, Kernel

Array = np.ndarray
Shape = tuple[int, ...]
Operands = Sequence[int | Shape | Array]
"""For each operand its shape, or an array near which values are drawn."""

_ROWS = 3
_STEP = 1e-5  # of finite differences
_PLACES = 64  # the most elements of an operand that are looked at
_ROW_TOLERANCE = 1e-10  # sums may run in another order where there are more rows
_GRADIENT_TOLERANCE = 1e-4  # beside 1, and beside the gradient


def check_kernels(custom: Custom, operands: Operands, shape: Shape) -> None:
    """Run the CPU kernels of an op on a few rows in float64.

    Arguments:
        custom: the op.
        operands: see `Operands`.
        shape: of the result.

    Raises:
        CustomOpError: there is a fault; names the op and the kernel, and the operand.
    """
    rng = np.random.default_rng(0)
    arrays = [_draw(rng, x) for x in operands]
    storage = [shape[::-1]]
    (out,) = _run(custom.name, "forward", custom.forward, arrays, storage)
    if not np.isfinite(out).all():
        raise CustomOpError(
            f"{user_line()}: {custom.name}: forward gives NaN or infinity for the operands of its check; give "
            f"custom_op() check=, with arrays where values may be drawn near"
        )
    backward = custom.gradient.backward
    if backward is not None:
        weights = rng.normal(size=out.shape)
        read = [weights, out, *arrays]
        grads = _run(custom.name, "backward", backward, read, [x.shape[1:] for x in arrays])
        for position, grad in enumerate(grads):
            _compare(custom, rng, position, arrays, weights, grad)


def operand_shape(operand: int | Shape | Array) -> Shape:
    """The shape of an operand for the check."""
    if isinstance(operand, np.ndarray):
        return operand.shape or (1,)
    return (operand,) if isinstance(operand, int) else tuple(operand)


def _draw(rng: np.random.Generator, operand: int | Shape | Array) -> Array:
    """Some rows, in storage order."""
    shape = (_ROWS, *operand_shape(operand))
    if isinstance(operand, np.ndarray):
        rows = operand * (1 + rng.uniform(-0.05, 0.05, size=shape))
    else:
        rows = rng.normal(size=shape)
    return np.ascontiguousarray(rows.transpose(0, *range(len(shape) - 1, 0, -1)))


def _run(name: str, which: str, kernel: Kernel, read: list[Array], storage: list[Shape]) -> list[Array]:
    """What a kernel writes for all rows, once it is certain that it does so for each row by itself."""
    before = [x.copy() for x in read]
    zeros, ones = ([np.full((_ROWS, *s), fill, np.float64) for s in storage] for fill in (0.0, 1.0))
    kernel(*read, *zeros)
    kernel(*read, *ones)
    for position, (x, old) in enumerate(zip(read, before)):
        if not np.array_equal(x, old, equal_nan=True):
            raise CustomOpError(f"{user_line()}: {name}: {which} changes its argument {position}, which it only reads")
    for position, (a, b) in enumerate(zip(zeros, ones)):
        if not np.array_equal(a, b, equal_nan=True):
            written = "out" if which == "forward" else f"the gradient of operand {position}"
            raise CustomOpError(
                f"{user_line()}: {name}: {which} does not write all of {written}, or adds to what is there"
            )
    for row in range(_ROWS):
        alone = [np.empty((1, *s)) for s in storage]
        kernel(*[x[row : row + 1].copy() for x in read], *alone)
        for a, b in zip(alone, zeros):
            if not np.allclose(a[0], b[row], _ROW_TOLERANCE, _ROW_TOLERANCE, equal_nan=True):
                raise CustomOpError(
                    f"{user_line()}: {name}: in {which} rows influence each other: row {row} of {_ROWS} gives another "
                    f"result alone (each row may depend on the same row of the arrays and on nothing else)"
                )
    return zeros


def _compare(
    custom: Custom, rng: np.random.Generator, position: int, arrays: list[Array], weights: Array, grad: Array
) -> None:
    """Compare the gradient of an operand with finite differences, in all rows at once."""
    operand = arrays[position]
    places = list(np.ndindex(*operand.shape[1:]))
    if len(places) > _PLACES:
        places = [places[i] for i in sorted(rng.choice(len(places), _PLACES, replace=False))]
    for place in places:
        at = (slice(None), *place)
        difference = _loss(custom.forward, arrays, position, at, _STEP, weights)
        difference -= _loss(custom.forward, arrays, position, at, -_STEP, weights)
        difference /= 2 * _STEP
        bad = ~np.isclose(grad[at], difference, _GRADIENT_TOLERANCE, _GRADIENT_TOLERANCE)
        if bad.any():
            row = int(np.argmax(bad))
            raise CustomOpError(
                f"{user_line()}: {custom.name}: backward gives {grad[at][row]:.6g} for element {place[::-1]} of the "
                f"gradient of operand {position}, finite differences give {difference[row]:.6g}"
            )


def _loss(
    kernel: Callable[..., Any], arrays: list[Array], position: int, at: Any, step: float, weights: Array
) -> Array:
    """For each row the weighted sum of the result, with a step added to one element of an operand."""
    moved = list(arrays)
    moved[position] = arrays[position].copy()
    moved[position][at] += step
    out = np.empty_like(weights)
    kernel(*moved, out)
    return (out * weights).reshape(_ROWS, -1).sum(axis=1)
