"""Threads: one bound for products and for numba, and the threading layer that goes with NumPy's BLAS.

numba's OpenMP layer beside NumPy's OpenBLAS is a trap: both keep threads spinning, and a product followed by a
parallel kernel takes twenty times as long as with the workqueue layer. dynbatch's own kernels are serial, and its
products have helpers of their own (`dynbatch.cpu.team`); the layer is set for kernels that users bring.
"""

from __future__ import annotations

import os

import numba
import threadpoolctl
from numba import config as numba_config

from dynbatch.config import config
from dynbatch.cpu import products

if "NUMBA_THREADING_LAYER" not in os.environ:
    numba_config.THREADING_LAYER = "workqueue"  # type: ignore[attr-defined]

_UNSET = -1
_applied: int | None = _UNSET


def apply_threads() -> None:
    """Bound BLAS, helpers and numba by ``config.threads``; nothing to do where that was done before."""
    global _applied
    if config.threads == _applied:
        return
    _applied = config.threads
    most = numba_config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    wanted = products.threads()
    threadpoolctl.threadpool_limits(wanted, user_api="blas")
    products.apply_threads()
    numba.set_num_threads(min(wanted, most))
