"""Threads: one bound for dynbatch's own and for numba's, and BLAS on one thread while a plan runs.

Products and kernels are shared out over the threads of `dynbatch.cpu.team`. Threads of BLAS beside them would wait for
work by spinning and take their cores; so each piece of a product is a call of BLAS on one thread
(`dynbatch.cpu.pieces`). Outside of plans, BLAS is as the program has set it. numba's OpenMP layer beside NumPy's
OpenBLAS is a trap of the same kind: the layer is set for kernels that users bring.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numba
import threadpoolctl
from numba import config as numba_config

from dynbatch.config import config
from dynbatch.cpu import products
from dynbatch.cpu.team import TEAM

if "NUMBA_THREADING_LAYER" not in os.environ:
    numba_config.THREADING_LAYER = "workqueue"  # type: ignore[attr-defined]

_UNSET = -1
_applied: int | None = _UNSET


@contextmanager
def plan_threads() -> Iterator[None]:
    """Threads as plans want them, and BLAS as it was before afterwards."""
    _apply()
    before = [(library, library.num_threads) for library in _libraries()]
    wanted = 1 if TEAM.can_help else products.threads()
    for library, number in before:
        if number > wanted:
            library.set_num_threads(wanted)
    try:
        yield
    finally:
        for library, number in before:
            if number > wanted:
                library.set_num_threads(number)


@functools.cache
def _libraries() -> list[Any]:
    return [c for c in threadpoolctl.ThreadpoolController().lib_controllers if c.user_api == "blas"]


def _apply() -> None:
    """Bound helpers and numba by ``config.threads``; nothing to do where that was done before."""
    global _applied
    if config.threads == _applied:
        return
    _applied = config.threads
    products.apply_threads()
    most = numba_config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    numba.set_num_threads(min(products.threads(), most))
