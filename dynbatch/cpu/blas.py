"""The matrix products of BLAS, for arrays and by address for compiled code: NumPy's own library, and MKL.

NumPy gives no access to the library it multiplies with, but it is loaded, and its C interface can be called. Addresses
are found anew in each process.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import os
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np
import threadpoolctl

from dynbatch.cpu.jit import jit
from dynbatch.cpu.native import call

ROW_MAJOR, NO_TRANS, TRANS, PACKED, B_MATRIX = 101, 111, 112, 151, 162  # of CBLAS, and of MKL's extension
_LETTERS = {"float32": "s", "float64": "d"}
# CBLAS's names in builds of OpenBLAS, and the bits of their integers.
_NAMES = (("scipy_cblas_{}64_", 64), ("cblas_{}64_", 64), ("scipy_cblas_{}", 32), ("cblas_{}", 32))


@functools.cache
def numpy_gemm(dtype: str) -> tuple[int, int]:
    """Address of ``cblas_?gemm`` in the library that NumPy multiplies with, and the bits of its integers.

    Both are 0 where it is not found: NumPy has been built with a library that threadpoolctl does not know.
    """
    package = Path(np.__file__).parent
    for found in threadpoolctl.threadpool_info():
        path = Path(found["filepath"])
        if found["user_api"] != "blas" or not _belongs(path, package):
            continue
        library = ctypes.CDLL(str(path))
        for name, bits in _NAMES:
            function = getattr(library, name.format(_LETTERS[dtype] + "gemm"), None)
            if function is not None:
                return address(function), bits
    return 0, 0


def _belongs(library: Path, package: Path) -> bool:
    """Whether a library came in NumPy's wheel: other packages bring copies of their own."""
    return any(folder in library.parents for folder in (package, package.parent / "numpy.libs"))


def address(function: Any) -> int:
    """Address of a C function."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def layout(a: np.ndarray) -> tuple[int, int] | None:
    """(transposition, leading dimension) of a matrix as BLAS takes it, row-major; None where it does not."""
    if a.size == 0:
        return None
    row, column = (s // a.itemsize for s in a.strides)
    if column == 1 or a.shape[1] == 1:
        if row >= a.shape[1]:
            return NO_TRANS, row
        return (NO_TRANS, max(1, a.shape[1])) if a.shape[0] == 1 else None
    if row == 1 or a.shape[0] == 1:
        return (TRANS, column) if column >= a.shape[0] else None
    return None


def as_operand(a: np.ndarray) -> tuple[np.ndarray, int, int]:
    """The matrix as BLAS takes it, a copy where its layout is none of BLAS's; its transposition, leading dimension."""
    found = layout(a)
    if found is None:
        return np.ascontiguousarray(a), NO_TRANS, max(1, a.shape[1])
    return a, *found


@jit(error_model="numpy")
def gemm(
    one: float, function: int, bits: int, rows: int, width: int, inner: int,
    x: int, x_trans: int, x_stride: int, m: int, m_trans: int, m_stride: int, out: int, out_stride: int,
) -> None:  # fmt: skip
    """``out = op(x) @ op(m)``, row-major, in compiled code.

    Arguments:
        one: 1 of the elements' type.
        function, bits: of `numpy_gemm`.
        rows, width, inner: of the product.
        x, m, out: addresses.
        x_trans, m_trans: `NO_TRANS` or `TRANS`.
        x_stride, m_stride, out_stride: leading dimensions, in elements.
    """
    order, tx, tm = np.int32(ROW_MAJOR), np.int32(x_trans), np.int32(m_trans)
    if bits == 64:
        call(
            function,
            (order, tx, tm, rows, width, inner, one, x, x_stride, m, m_stride, one - one, out, out_stride),
        )
    else:
        call(
            function,
            (
                order, tx, tm, np.int32(rows), np.int32(width), np.int32(inner), one, x, np.int32(x_stride),
                m, np.int32(m_stride), one - one, out, np.int32(out_stride),
            ),
        )  # fmt: skip


class Mkl:
    """The few functions of MKL that are used."""

    def __init__(self, path: str) -> None:
        os.environ.setdefault("KMP_BLOCKTIME", "1")  # ms: spinning threads would take the core from the kernels
        self._library = ctypes.CDLL(path)

    def set_threads(self, threads: int) -> None:
        """Bound the threads of every call."""
        self._library.MKL_Set_Num_Threads(threads)

    def gemm(self, dtype: str) -> tuple[int, int]:
        """Address of ``cblas_?gemm``, and the bits of its integers."""
        return address(getattr(self._library, f"cblas_{_LETTERS[dtype]}gemm")), 32

    def gemm_compute(self, dtype: str) -> int:
        """Address of ``cblas_?gemm_compute``, which takes a packed factor."""
        return address(getattr(self._library, f"cblas_{_LETTERS[dtype]}gemm_compute"))

    def pack(self, matrix: np.ndarray) -> np.ndarray:
        """A right factor of shape (inner, width) in MKL's packed layout."""
        inner, width = matrix.shape
        matrix, trans, leading = as_operand(matrix)
        letter = _LETTERS[matrix.dtype.name]
        real = ctypes.c_float if letter == "s" else ctypes.c_double
        size = getattr(self._library, f"cblas_{letter}gemm_pack_get_size")
        size.restype = ctypes.c_size_t
        rows = 64  # a pack serves any number of rows
        packed = np.empty(size(B_MATRIX, rows, width, inner) + 64, np.uint8)
        getattr(self._library, f"cblas_{letter}gemm_pack")(
            ROW_MAJOR, B_MATRIX, trans, rows, width, inner, real(1),
            ctypes.c_void_p(matrix.ctypes.data), leading, ctypes.c_void_p(packed.ctypes.data),
        )  # fmt: skip
        return packed


@jit(error_model="numpy")
def gemm_compute(
    one: float, function: int, rows: int, width: int, inner: int, x: int, x_stride: int, packed: int,
    out: int, out_stride: int,
) -> None:  # fmt: skip
    """``out = x @ packed`` by `Mkl.gemm_compute`, in compiled code; see `gemm`."""
    call(
        function,
        (
            np.int32(ROW_MAJOR), np.int32(NO_TRANS), np.int32(PACKED), np.int32(rows), np.int32(width),
            np.int32(inner), x, np.int32(x_stride), packed, np.int32(width), one - one, out, np.int32(out_stride),
        ),
    )  # fmt: skip


@functools.cache
def mkl_path() -> str | None:
    """The library of MKL where it is installed (the extra ``mkl``)."""
    if platform.machine() not in ("x86_64", "AMD64") or sys.platform == "darwin":
        return None
    pattern = "Library/bin/mkl_rt*.dll" if sys.platform == "win32" else "lib/libmkl_rt.so*"
    found = sorted(p for prefix in (sys.prefix, sys.base_prefix) for p in glob.glob(os.path.join(prefix, pattern)))
    return found[0] if found else None
