"""cuBLAS by its own functions, for products that become part of a graph: CuPy calls none while a stream is captured.

CuPy gives the handle its stream anew before each call, and raises `NotImplementedError` where that stream is captured.
The library itself allows it, once the handle has the stream, and memory to work in, before the capture begins (cuBLAS
documentation, "CUDA Graphs Support").
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from dynbatch.errors import DeviceError

WORKSPACE = 32 << 20
"""Bytes of memory to work in, as cuBLAS recommends for Hopper; older devices are content with less."""

_ADDRESS, _INT, _STRIDE = ctypes.c_size_t, ctypes.c_int, ctypes.c_longlong
_HEAD = (_ADDRESS, _INT, _INT, _INT, _INT, _INT, _ADDRESS)  # handle, operations, m, n, k, alpha
_GEMM = (*_HEAD, _ADDRESS, _INT, _ADDRESS, _INT, _ADDRESS, _ADDRESS, _INT)
_STRIDED = (
    *_HEAD, _ADDRESS, _INT, _STRIDE, _ADDRESS, _INT, _STRIDE, _ADDRESS, _ADDRESS, _INT, _STRIDE, _INT
)  # fmt: skip


class Cublas:
    """The library of a CUDA version, which CuPy has loaded.

    Arguments:
        version: of CUDA, the first number.

    Attributes:
        sgemm, dgemm, sgemmStridedBatched, dgemmStridedBatched: as CuPy has them, with the same arguments.
        set_workspace: memory to work in: handle, address, number of bytes.

    Raises:
        DeviceError: it is not loaded. The functions raise it for what cuBLAS refuses.
    """

    def __init__(self, version: int) -> None:
        name = f"libcublas.so.{version}"
        try:
            library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
        except OSError as error:
            raise DeviceError(f"{name}, which products in CUDA graphs need, is not loaded: {error}") from error

        def function(symbol: str, types: tuple[Any, ...]) -> Any:
            found: Any = library[symbol]
            found.argtypes, found.restype, found.errcheck = types, _INT, _check
            return found

        self.sgemm, self.dgemm = function("cublasSgemm_v2", _GEMM), function("cublasDgemm_v2", _GEMM)
        self.sgemmStridedBatched = function("cublasSgemmStridedBatched", _STRIDED)
        self.dgemmStridedBatched = function("cublasDgemmStridedBatched", _STRIDED)
        self.set_workspace = function("cublasSetWorkspace_v2", (_ADDRESS, _ADDRESS, _ADDRESS))


def _check(status: int, function: Any, _: Any) -> None:
    if status:
        raise DeviceError(f"{function.__name__} of cuBLAS returns status {status}")
