"""Dense products: MKL with packed weights where the extra ``mkl`` is installed, else NumPy's BLAS.

A weight is multiplied many times between two updates, by a few rows at a time; packing it once into the layout that
the kernel reads saves most of what a small product costs. All products go through one library: the threads of two
libraries wait for each other by spinning, and take each other's core.
"""

from __future__ import annotations

import ctypes
import glob
import os
import platform
import sys
from typing import Any

import numpy as np

_ROW_MAJOR, _NO_TRANS, _TRANS, _PACKED, _B_MATRIX = 101, 111, 112, 151, 162  # from MKL's C interface
_CHOICES = ("auto", "mkl", "numpy")


class Packed:
    """A matrix in MKL's packed layout.

    Attributes:
        inner, width: its shape, as the right factor.
        address: of the packed data.
    """

    __slots__ = ("_buffer", "address", "inner", "width")

    def __init__(self, buffer: np.ndarray, inner: int, width: int) -> None:
        self._buffer = buffer
        self.address = buffer.ctypes.data
        self.inner = inner
        self.width = width


class Mkl:
    """The few functions of MKL that are used, in single precision."""

    def __init__(self, path: str) -> None:
        os.environ.setdefault("KMP_BLOCKTIME", "0")  # its threads would spin while kernels and Python need the core
        library = ctypes.CDLL(path)
        integer, pointer, real = ctypes.c_int, ctypes.c_void_p, ctypes.c_float
        self._size = library.cblas_sgemm_pack_get_size
        self._size.restype = ctypes.c_size_t
        self._pack = library.cblas_sgemm_pack
        self._pack.argtypes = [integer] * 6 + [real, pointer, integer, pointer]
        self._pack.restype = None
        self._compute = library.cblas_sgemm_compute
        self._compute.argtypes = [integer] * 6 + [pointer, integer, pointer, integer, real, pointer, integer]
        self._compute.restype = None
        self._gemm = library.cblas_sgemm
        self._gemm.argtypes = [integer] * 6 + [real, pointer, integer, pointer, integer, real, pointer, integer]
        self._gemm.restype = None
        self._set_threads = library.MKL_Set_Num_Threads

    def set_threads(self, threads: int) -> None:
        """Bound the threads of every call."""
        self._set_threads(threads)

    def pack(self, matrix: np.ndarray) -> Packed:
        """Pack a right factor of shape (inner, width)."""
        inner, width = matrix.shape
        layout = _layout(matrix)
        if layout is None:
            matrix = np.ascontiguousarray(matrix)
            layout = _NO_TRANS, width
        trans, leading = layout
        rows = 64  # a pack serves any number of rows
        buffer = np.empty(self._size(_B_MATRIX, rows, width, inner) // 4 + 16, np.float32)
        self._pack(
            _ROW_MAJOR, _B_MATRIX, trans, rows, width, inner, 1.0, matrix.ctypes.data, leading, buffer.ctypes.data
        )
        return Packed(buffer, inner, width)

    def compute(self, packed: Packed, rows: int, x: int, x_stride: int, out: int, out_stride: int) -> None:
        """``out = x @ packed``: addresses, and distances between rows in elements."""
        self._compute(
            _ROW_MAJOR, _NO_TRANS, _PACKED, rows, packed.width, packed.inner,
            x, x_stride, packed.address, packed.width, 0.0, out, out_stride,
        )  # fmt: skip

    def product(self, x: np.ndarray, m: np.ndarray, out: np.ndarray) -> bool:
        """``out = x @ m`` of 2-D arrays; False (and nothing done) where their layout is not BLAS's."""
        layouts = [_layout(a) for a in (x, m, out)]
        if any(a is None for a in layouts) or layouts[2][0] != _NO_TRANS:  # type: ignore[index]
            return False
        (tx, lx), (tm, lm), (_, lo) = layouts  # type: ignore[misc]
        self._gemm(
            _ROW_MAJOR, tx, tm, x.shape[0], m.shape[1], x.shape[1], 1.0,
            x.ctypes.data, lx, m.ctypes.data, lm, 0.0, out.ctypes.data, lo,
        )  # fmt: skip
        return True


def _layout(a: np.ndarray) -> tuple[int, int] | None:
    """(transposition, leading dimension) of a float32 matrix as BLAS takes it, or None."""
    if a.dtype != np.float32 or a.size == 0:
        return None
    row, column = (s // 4 for s in a.strides)
    if column == 1 or a.shape[1] == 1:
        if row >= a.shape[1]:
            return _NO_TRANS, row
        return (_NO_TRANS, max(1, a.shape[1])) if a.shape[0] == 1 else None
    if row == 1 or a.shape[0] == 1:
        return (_TRANS, column) if column >= a.shape[0] else None
    return None


_mkl: Mkl | None = None
_sought = False


def mkl() -> Mkl | None:
    """MKL, if it is installed and not declined by ``DYNBATCH_BLAS=numpy``."""
    global _mkl, _sought
    if not _sought:
        _sought = True
        choice = os.environ.get("DYNBATCH_BLAS", "auto")
        if choice not in _CHOICES:
            from dynbatch.errors import ConfigurationError

            raise ConfigurationError(f"DYNBATCH_BLAS={choice!r}: choose one of {', '.join(_CHOICES)}")
        path = None if choice == "numpy" else _find()
        if path is not None:
            _mkl = Mkl(path)
        elif choice == "mkl":
            from dynbatch.errors import ConfigurationError

            raise ConfigurationError("DYNBATCH_BLAS=mkl, but MKL is not installed: pip install dynbatch[mkl]")
    return _mkl


def _find() -> str | None:
    if platform.machine() not in ("x86_64", "AMD64") or sys.platform == "darwin":
        return None
    pattern = "Library/bin/mkl_rt*.dll" if sys.platform == "win32" else "lib/libmkl_rt.so*"
    found = sorted(p for prefix in (sys.prefix, sys.base_prefix) for p in glob.glob(os.path.join(prefix, pattern)))
    return found[0] if found else None


def blas_name() -> str:
    """``mkl`` or ``numpy``: the library that multiplies."""
    return "mkl" if mkl() is not None else "numpy"


def product(x: np.ndarray, m: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """``x @ m`` of 2-D arrays, through the library in use."""
    library = mkl()
    if library is not None and x.dtype == np.float32:
        if out is None:
            out = np.empty((x.shape[0], m.shape[1]), np.float32)
        if library.product(x, m, out):
            return out
    return np.matmul(x, m, out=out)


def packed(matrix: np.ndarray) -> Any:
    """The right factor in the form that `multiply` takes: packed for MKL, as it is for NumPy."""
    library = mkl()
    return library.pack(matrix) if library is not None and matrix.dtype == np.float32 else matrix
