"""Matrices in the layout that a product reads from front to back: panels of as many columns as a `tile` has.

Within a panel the numbers of each step along the inner dimension lie together. The last panel of a matrix has as many
whole vectors as its columns need, filled up with zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from dynbatch.cpu.jit import jit
from dynbatch.cpu.tile import MOST_VECTORS, VECTOR_BYTES, lanes


def panel_columns(itemsize: int) -> int:
    """Columns of a panel."""
    return MOST_VECTORS * lanes(itemsize)


def pack(matrix: np.ndarray) -> np.ndarray:
    """The panels of a right factor of shape (inner, width), float32 or float64; aligned to a vector."""
    inner, width = matrix.shape
    item = matrix.itemsize
    vector = lanes(item)
    space = np.empty(inner * -(-width // vector) * vector + vector, matrix.dtype)
    start = -space.ctypes.data % VECTOR_BYTES // item
    packed = space[start : start + space.size - vector]
    if matrix.flags.f_contiguous and not matrix.flags.c_contiguous:
        _pack_transposed(matrix.T, packed, vector, panel_columns(item))
    else:
        _pack(np.ascontiguousarray(matrix), packed, vector, panel_columns(item))
    return packed


@jit(error_model="numpy")
def _pack(matrix: np.ndarray, packed: np.ndarray, vector: int, columns: int) -> None:
    inner, width = matrix.shape
    for first in range(0, width, columns):
        here = min(columns, width - first)
        step = (here + vector - 1) // vector * vector
        for k in range(inner):
            source = matrix[k, first : first + here]  # slices, without which the copy is no vector instruction
            target = packed[first * inner + k * step : first * inner + (k + 1) * step]
            for j in range(here):
                target[j] = source[j]
            target[here:] = 0


@jit(error_model="numpy")
def _pack_transposed(matrix: np.ndarray, packed: np.ndarray, vector: int, columns: int) -> None:
    """The same of ``matrix.T``: squares are transposed in registers, what is left over one by one."""
    width, inner = matrix.shape
    squares_end = inner - inner % vector
    for first in range(0, width, columns):
        here = min(columns, width - first)
        step = (here + vector - 1) // vector * vector
        panel = packed[first * inner : first * inner + inner * step]
        for k in range(0, squares_end, vector):
            for j in range(0, here - here % vector, vector):
                transpose_square(
                    panel.dtype.type(0),
                    matrix[first + j, k:].ctypes.data,
                    inner,
                    panel[k * step + j :].ctypes.data,
                    step,
                )
        for j in range(here):
            for k in range(squares_end if j < here - here % vector else 0, inner):
                panel[k * step + j] = matrix[first + j, k]
        for k in range(inner if here < step else 0):
            panel[k * step + here : (k + 1) * step] = 0


@intrinsic
def transpose_square(typingctx: Any, zero: Any, source: Any, stride: Any, target: Any, target_stride: Any) -> Any:
    """Transpose a square of `lanes` rows and columns.

    Arguments:
        zero: of the type of the elements.
        source, stride: address of the first row, and elements between rows.
        target, target_stride: the same of the result, which lies elsewhere.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        item = 4 if zero == types.float32 else 8
        size = lanes(item)
        _, source, stride, target, target_stride = args
        vector = ir.VectorType(ir.FloatType() if item == 4 else ir.DoubleType(), size)

        def place(start: Any, distance: Any, row: int) -> Any:
            offset = builder.mul(distance, ir.Constant(ir.IntType(64), row * item))
            return builder.inttoptr(builder.add(start, offset), vector.as_pointer())

        rows = [builder.load(place(source, stride, r), align=item) for r in range(size)]
        span = 1
        while span < size:  # swap the off-diagonal squares of 1, 2, 4, ... in each square of twice that size
            upper = [j if not j & span else size + j - span for j in range(size)]
            lower = [j + span if not j & span else size + j for j in range(size)]
            for r in range(size):
                if not r & span:
                    pair = rows[r], rows[r + span]
                    rows[r], rows[r + span] = (
                        builder.shuffle_vector(*pair, ir.Constant(ir.VectorType(ir.IntType(32), size), which))
                        for which in (upper, lower)
                    )
            span *= 2
        for r, row in enumerate(rows):
            builder.store(row, place(target, target_stride, r), align=item)
        return context.get_dummy_value()

    if zero not in (types.float32, types.float64):
        return None
    return types.void(zero, *[types.int64] * 4), generate
