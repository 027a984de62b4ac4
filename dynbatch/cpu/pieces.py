"""Large products by BLAS in pieces, one for each thread of the team.

The threads of BLAS and those of dynbatch would take each other's core: OpenBLAS's go on looking for work for some
milliseconds after each product. While a plan runs, BLAS has one thread, and a large product is cut into as many pieces
as the team has threads, by rows or by columns of the result, whichever are more.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from dynbatch.cpu import blas, team
from dynbatch.cpu.jit import jit, job_function
from dynbatch.cpu.team import TEAM

CUT_FROM = 1 << 21
"""Multiply-adds from which on a product is cut; a piece costs BLAS some rearranging of its own."""
# Fields of a job, 64-bit integers.
_FUNCTION, _BITS, _ROWS, _WIDTH, _INNER, _X, _X_TRANS, _X_STRIDE, _M, _M_TRANS, _M_STRIDE, _OUT, _OUT_STRIDE = range(13)
_IS_PACKED, _BY_ROWS, _STEP = 13, 14, 15
_FIELDS = 16


@functools.cache
def piece(dtype: str) -> Any:
    """The compiled function that computes one piece, for ``float32`` or ``float64``; it has an ``address``."""
    return job_function(error_model="numpy")(_piece_float32 if dtype == "float32" else _piece_float64)


def _piece_float32(job: Any, index: int) -> None:
    _piece(np.float32(1), 4, job, index)


def _piece_float64(job: Any, index: int) -> None:
    _piece(np.float64(1), 8, job, index)


@jit(error_model="numpy")
def _piece(one: float, item: int, job: Any, index: int) -> None:
    begin = index * job[_STEP]
    rows, width, x, m, out = job[_ROWS], job[_WIDTH], job[_X], job[_M], job[_OUT]
    if job[_BY_ROWS]:
        rows = min(job[_STEP], rows - begin)
        x += begin * (job[_X_STRIDE] if job[_X_TRANS] == blas.NO_TRANS else 1) * item
        out += begin * job[_OUT_STRIDE] * item
    else:
        width = min(job[_STEP], width - begin)
        m += begin * (1 if job[_M_TRANS] == blas.NO_TRANS else job[_M_STRIDE]) * item
        out += begin * item
    if job[_IS_PACKED]:
        blas.gemm_compute(one, job[_FUNCTION], rows, width, job[_INNER], x, job[_X_STRIDE], m, out, job[_OUT_STRIDE])
    else:
        blas.gemm(
            one, job[_FUNCTION], job[_BITS], rows, width, job[_INNER],
            x, job[_X_TRANS], job[_X_STRIDE], m, job[_M_TRANS], job[_M_STRIDE], out, job[_OUT_STRIDE],
        )  # fmt: skip


@jit(error_model="numpy")
def gemm(
    team_address: int, piece: int, one: float, function: int, bits: int, rows: int, width: int, inner: int,
    x: int, x_trans: int, x_stride: int, m: int, m_trans: int, m_stride: int, out: int, out_stride: int,
    is_packed: bool,
) -> None:  # fmt: skip
    """`dynbatch.cpu.blas.gemm`, in pieces where it is large; with ``is_packed`` `gemm_compute`, its matrix at ``m``.

    Arguments:
        team_address: of the `Team` whose threads take the pieces.
        piece: `piece` of the elements' type.
    """
    job = np.empty(_FIELDS, np.int64)
    job[_FUNCTION], job[_BITS], job[_ROWS], job[_WIDTH], job[_INNER] = function, bits, rows, width, inner
    job[_X], job[_X_TRANS], job[_X_STRIDE] = x, x_trans, x_stride
    job[_M], job[_M_TRANS], job[_M_STRIDE] = m, m_trans, m_stride
    job[_OUT], job[_OUT_STRIDE], job[_IS_PACKED] = out, out_stride, is_packed
    by_rows = is_packed or rows >= width
    length = rows if by_rows else width
    pieces = team.active(team_address) if rows * width * inner >= CUT_FROM else 1
    step = (length + pieces - 1) // pieces
    job[_BY_ROWS], job[_STEP] = by_rows, step
    team.run(team_address, piece, job.ctypes.data, (length + step - 1) // step)


def product(x: np.ndarray, m: np.ndarray, out: np.ndarray, function: int, bits: int) -> bool:
    """``out = x @ m`` by the BLAS function at an address.

    False, and nothing done, where the arrays' layout is not BLAS's or they are not all of one type.
    """
    if not function or not x.dtype == m.dtype == out.dtype:
        return False
    layouts = [blas.layout(a) for a in (x, m, out)]
    if any(a is None for a in layouts) or layouts[2][0] != blas.NO_TRANS:  # type: ignore[index]
        return False
    TEAM.start()
    (tx, lx), (tm, lm), (_, lo) = layouts  # type: ignore[misc]
    gemm(
        TEAM.address, piece(x.dtype.name).address, x.dtype.type(1), function, bits, x.shape[0], m.shape[1], x.shape[1],
        x.ctypes.data, tx, lx, m.ctypes.data, tm, lm, out.ctypes.data, lo, False,
    )  # fmt: skip
    return True
