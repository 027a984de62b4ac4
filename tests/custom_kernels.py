"""Kernels as users bring them: an elementwise op and one on a matrix, for the CPU and for GPUs.

Those for GPUs are of both kinds: a thread for each row, and a block for each row.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
from numba import cuda

THREADS = 4
"""Of a block, for `weigh`."""


def gate_reference(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return x * np.tanh(y)


def gate_type(x: Any, y: Any) -> Any:
    if x != y or len(x) > 1:
        raise ValueError("two vectors of one size are wanted")
    return x


@numba.njit
def gate_forward(x, y, out):
    for r in range(out.shape[0]):
        for i in range(out.shape[1]):
            out[r, i] = x[r, i] * np.tanh(y[r, i])


@numba.njit
def gate_backward(dout, out, x, y, dx, dy):
    for r in range(dout.shape[0]):
        for i in range(dout.shape[1]):
            t = np.tanh(y[r, i])
            dx[r, i] = dout[r, i] * t
            dy[r, i] = dout[r, i] * x[r, i] * (1 - t * t)


@cuda.jit
def gate_cuda_forward(x, y, out):
    r = cuda.grid(1)
    if r < out.shape[0]:
        for i in range(out.shape[1]):
            out[r, i] = x[r, i] * math.tanh(y[r, i])


@cuda.jit
def gate_cuda_backward(dout, out, x, y, dx, dy):
    r = cuda.grid(1)
    if r < dout.shape[0]:
        for i in range(dout.shape[1]):
            t = math.tanh(y[r, i])
            dx[r, i] = dout[r, i] * t
            dy[r, i] = dout[r, i] * x[r, i] * (1 - t * t)


def weigh_reference(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    return w @ (x * x)


def weigh_type(w: Any, x: Any) -> Any:
    m, n = w
    assert x == (n,), "the vector has another size than the rows of the matrix"
    return m


@numba.njit
def weigh_forward(w, x, out):
    for r in range(out.shape[0]):
        for i in range(out.shape[1]):
            total = 0.0
            for j in range(x.shape[1]):
                total += w[r, j, i] * x[r, j] * x[r, j]
            out[r, i] = total


@numba.njit
def weigh_backward(dout, out, w, x, dw, dx):
    for r in range(dout.shape[0]):
        for j in range(x.shape[1]):
            total = 0.0
            for i in range(dout.shape[1]):
                dw[r, j, i] = dout[r, i] * x[r, j] * x[r, j]
                total += dout[r, i] * w[r, j, i]
            dx[r, j] = 2 * total * x[r, j]


@cuda.jit
def weigh_cuda_forward(w, x, out):
    r = cuda.blockIdx.x
    for i in range(cuda.threadIdx.x, out.shape[1], cuda.blockDim.x):
        total = 0.0
        for j in range(x.shape[1]):
            total += w[r, j, i] * x[r, j] * x[r, j]
        out[r, i] = total


@cuda.jit
def weigh_cuda_backward(dout, out, w, x, dw, dx):
    r, t = cuda.blockIdx.x, cuda.threadIdx.x
    parts = cuda.shared.array(THREADS, numba.float64)
    for j in range(x.shape[1]):
        parts[t] = 0.0
        for i in range(t, dout.shape[1], cuda.blockDim.x):
            dw[r, j, i] = dout[r, i] * x[r, j] * x[r, j]
            parts[t] += dout[r, i] * w[r, j, i]
        cuda.syncthreads()
        if t == 0:
            total = 0.0
            for k in range(THREADS):
                total += parts[k]
            dx[r, j] = 2 * total * x[r, j]
        cuda.syncthreads()


def on_cpu(which: str) -> dict[str, Any]:
    """Arguments of `custom_op` for one of the ops."""
    found = globals()
    return {
        "types": found[f"{which}_type"],
        "forward": found[f"{which}_forward"],
        "backward": found[f"{which}_backward"],
    }


def on_gpu(which: str) -> dict[str, Any]:
    """The same with the kernels for GPUs."""
    found = globals()
    return on_cpu(which) | {
        "cuda_forward": found[f"{which}_cuda_forward"],
        "cuda_backward": found[f"{which}_cuda_backward"],
        "threads": THREADS if which == "weigh" else None,
    }
