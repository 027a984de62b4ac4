"""Dense products: MKL with packed weights where the extra ``mkl`` is installed and faster, else NumPy's BLAS.

A weight is multiplied many times between two updates, by a few rows at a time; packing it once into the layout that
the kernel reads saves most of what a small product costs. All products go through one library: the threads of two
libraries wait for each other by spinning, and take each other's core.
"""

from __future__ import annotations

import ctypes
import glob
import json
import os
import platform
import sys
import time
from typing import Any

import numpy as np
import threadpoolctl
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from dynbatch.config import config
from dynbatch.cpu.cache import cache_directory
from dynbatch.cpu.jit import jit
from dynbatch.errors import ConfigurationError

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
        os.environ.setdefault("KMP_BLOCKTIME", "1")  # ms: spinning threads would take the core from the kernels
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
    """MKL, where it is installed and measured faster than NumPy's BLAS on this machine.

    ``DYNBATCH_BLAS`` decides instead: ``mkl`` or ``numpy``.
    """
    global _mkl, _sought
    if not _sought:
        _sought = True
        choice = os.environ.get("DYNBATCH_BLAS", "auto")
        if choice not in _CHOICES:
            raise ConfigurationError(f"DYNBATCH_BLAS={choice!r}: choose one of {', '.join(_CHOICES)}")
        path = None if choice == "numpy" else _find()
        if path is None and choice == "mkl":
            raise ConfigurationError("DYNBATCH_BLAS=mkl, but MKL is not installed: pip install dynbatch[mkl]")
        if path is not None and (choice == "mkl" or _is_faster(path)):
            _mkl = Mkl(path)
    return _mkl


def _is_faster(path: str) -> bool:
    """Whether packed products of MKL beat NumPy's BLAS here, measured once and kept in the cache directory.

    Not a matter of course: on processors of other makers MKL may not use their widest vectors.
    """
    threads = config.threads or os.cpu_count() or 1
    settings = {k: v for k, v in os.environ.items() if k.startswith(("OPENBLAS_", "MKL_", "OMP_"))}
    key = repr((path, np.__version__, platform.node(), platform.processor(), threads, sorted(settings.items())))
    file = cache_directory() / "blas.json"
    try:
        known = json.loads(file.read_text())
        if known.get(key) in ("mkl", "numpy"):
            return known[key] == "mkl"
    except (OSError, ValueError, AttributeError):
        known = {}
    if not isinstance(known, dict):
        known = {}
    faster = _measure(Mkl(path), threads)
    known[key] = "mkl" if faster else "numpy"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(known, indent=1))
        os.replace(temporary, file)
    except OSError:
        pass  # measured again next time; the kernel cache warns about a folder that cannot be written
    return faster


def _measure(library: Mkl, threads: int) -> bool:
    """Time both on the products of a tree model: few rows, one weight many times."""
    library.set_threads(threads)
    weight = np.full((512, 1280), 0.01, np.float32)
    packed_weight = library.pack(weight)
    rows = [np.full((n, 512), 0.01, np.float32) for n in (4, 16, 64, 256)]
    outs = [np.empty((x.shape[0], 1280), np.float32) for x in rows]

    def by_mkl() -> None:
        for x, out in zip(rows, outs):
            library.compute(packed_weight, x.shape[0], x.ctypes.data, 512, out.ctypes.data, 1280)

    def by_numpy() -> None:
        for x, out in zip(rows, outs):
            np.matmul(x, weight, out=out)

    times: dict[Any, list[float]] = {by_mkl: [], by_numpy: []}
    for _ in range(12):
        for run, found in times.items():
            begin = time.perf_counter()
            run()
            found.append(time.perf_counter() - begin)
    return sorted(times[by_mkl])[5] < sorted(times[by_numpy])[5]


def _find() -> str | None:
    if platform.machine() not in ("x86_64", "AMD64") or sys.platform == "darwin":
        return None
    pattern = "Library/bin/mkl_rt*.dll" if sys.platform == "win32" else "lib/libmkl_rt.so*"
    found = sorted(p for prefix in (sys.prefix, sys.base_prefix) for p in glob.glob(os.path.join(prefix, pattern)))
    return found[0] if found else None


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


@intrinsic
def _gemm(typing, address, trans, m, n, k, mem, a, lda, b, ldb, c, ldc):
    """Call the BLAS function at an address: row-major ``c = a @ op(b)``, operands by address."""
    signature = types.void(*[types.int64] * 5, mem, *[types.int64] * 6)

    def generate(context, builder, signature, args):
        address, trans, m, n, k, _, a, lda, b, ldb, c, ldc = args
        i32, i64, pointer = ir.IntType(32), ir.IntType(64), ir.IntType(8).as_pointer()
        real = ir.FloatType() if mem.dtype == types.float32 else ir.DoubleType()
        arguments = [i32, i32, i32, i64, i64, i64, real, pointer, i64, pointer, i64, real, pointer, i64]
        function = builder.inttoptr(address, ir.FunctionType(ir.VoidType(), arguments).as_pointer())
        a, b, c = (builder.inttoptr(x, pointer) for x in (a, b, c))
        trans = builder.trunc(trans, i32)
        builder.call(
            function,
            [i32(_ROW_MAJOR), i32(_NO_TRANS), trans, m, n, k, real(1.0), a, lda, b, ldb, real(0.0), c, ldc],
        )
        return context.get_dummy_value()

    return signature, generate


@jit(boundscheck=False)
def multiply(gemm, mem, x, x_stride, rows, matrix, inner, width, transposed, out, out_stride):
    """Rows ``x`` times a matrix, which lies as (inner, width), or as (width, inner) where it is transposed."""
    item = mem.itemsize
    base = mem.ctypes.data
    if rows and width:
        _gemm(
            gemm, _TRANS if transposed else _NO_TRANS, rows, width, inner, mem,
            base + x * item, x_stride, matrix.ctypes.data, inner if transposed else width, base + out * item, out_stride,
        )  # fmt: skip


def gemm_address(dtype: str) -> int:
    info = next(i for i in threadpoolctl.threadpool_info() if i["internal_api"] == "openblas")
    library = ctypes.CDLL(info["filepath"])
    name = "scipy_cblas_sgemm64_" if dtype == "float32" else "scipy_cblas_dgemm64_"
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value
