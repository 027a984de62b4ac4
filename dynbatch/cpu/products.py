"""Products, and who computes them: dynbatch's own code for packed weights, NumPy's BLAS, or MKL.

A weight meets a few rows many times between two updates: it is prepared once (`Factor`), and compiled code multiplies
with it (`multiply`). For each shape and number of rows it is measured whether that goes faster with the own code or
with BLAS (`dynbatch.cpu.profile`). Other products go to BLAS: to one library, since the threads of two wait for each
other by spinning, and take each other's core.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import numpy as np

from dynbatch.config import config
from dynbatch.cpu import blas, gemm, packing, pieces, profile
from dynbatch.cpu.jit import jit
from dynbatch.cpu.team import TEAM
from dynbatch.errors import ConfigurationError

CHOICES = ("auto", "own", "numpy", "mkl")
_MEASURED_ROWS = (4, 16, 64, 256)
_UP_TO_ROWS = (8, 32, 128)
"""Numbers of rows are taken together up to these, and above the last: each with one that is measured."""

_TIMED = 1 << 21
"""Multiply-adds that are timed at once, some ten microseconds: small products several times."""

# Who computes a product.
_OWN, _NUMPY, _MKL = 0, 1, 2
_KINDS = {"own": _OWN, "numpy": _NUMPY, "mkl": _MKL}
# Fields of a factor's table.
_INNER, _WIDTH, _COLUMNS, _TEAM, _KERNEL, _PANELS, _GEMM, _BITS, _MATRIX, _TRANS, _LEADING = range(11)
_COMPUTE, _MKL_PACKED, _PIECE, _KIND = 11, 12, 13, 14
FIELDS = _KIND + len(_MEASURED_ROWS)
"""Length of a factor's table."""


def choice() -> str:
    """Who is to multiply, by ``DYNBATCH_BLAS``.

    Raises:
        ConfigurationError: an unknown name.
    """
    found = os.environ.get("DYNBATCH_BLAS", "auto")
    if found not in CHOICES:
        raise ConfigurationError(f"DYNBATCH_BLAS={found!r}: choose one of {', '.join(CHOICES)}")
    return found


def apply_threads() -> None:
    """Bound the threads that share out products, which have no use for more than there are cores."""
    TEAM.set_threads(min(threads(), _cores()))


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return _processors()


@functools.cache
def _loaded_mkl(path: str) -> blas.Mkl:
    library = blas.Mkl(path)
    library.set_threads(1 if TEAM.can_help else threads())  # as NumPy's has while plans run: `dynbatch.cpu.threads`
    return library


def threads() -> int:
    """The most threads that a product may use."""
    return config.threads or _processors()


@functools.cache
def _processors() -> int:  # the system is asked once: it takes longer to answer than a small batch takes
    return os.cpu_count() or 1


def mkl() -> blas.Mkl | None:
    """MKL where it is the library for products, else None, and NumPy's is.

    That is so where it is installed and was measured faster, which is no matter of course: on processors of other
    makers MKL may not use their widest vectors. ``DYNBATCH_BLAS`` decides instead where it names a library.

    Raises:
        ConfigurationError: MKL is asked for and not installed.
    """
    wanted = choice()
    path = blas.mkl_path() if wanted in ("auto", "mkl") else None
    if wanted == "mkl" and path is None:
        raise ConfigurationError("DYNBATCH_BLAS=mkl, but MKL is not installed: pip install dynbatch[mkl]")
    if path is None or (wanted == "auto" and not _mkl_is_faster(path)):
        return None
    return _loaded_mkl(path)


_kinds: dict[tuple[str, str], tuple[str, ...]] = {}
"""Who multiplies with a factor, by its name and `choice`."""


def state() -> dict[str, str]:
    """What has been chosen, for a checkpoint."""
    return profile.state()


def set_state(chosen: dict[str, str]) -> None:
    """Choose from now on as a checkpoint says; what it does not know is measured."""
    profile.set_state(chosen)
    _mkl_is_faster.cache_clear()
    _kinds.clear()


@functools.cache
def _mkl_is_faster(path: str) -> bool:
    x, m = np.full((512, 300), 0.01, np.float32), np.full((300, 1280), 0.01, np.float32)  # a weight's gradient
    out = np.empty((512, 1280), np.float32)
    candidates: dict[str, Callable[[], Callable[[], object]]] = {
        "numpy": lambda: functools.partial(pieces.product, x, m, out, *blas.numpy_gemm("float32")),
        "mkl": lambda: functools.partial(pieces.product, x, m, out, *_loaded_mkl(path).gemm("float32")),
    }
    return profile.answer("BLAS", candidates) == "mkl"


def product(x: np.ndarray, m: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """``x @ m`` of 2-D arrays by BLAS; what BLAS cannot take is left to NumPy."""
    library = mkl()
    if x.dtype.name in ("float32", "float64"):
        function, bits = library.gemm(x.dtype.name) if library is not None else blas.numpy_gemm(x.dtype.name)
        result = np.empty((x.shape[0], m.shape[1]), x.dtype) if out is None else out
        if pieces.product(x, m, result, function, bits):
            return result
    return np.matmul(x, m, out=out)


class Factor:
    """A right factor of shape (inner, width), in the forms that `multiply` uses for it on this machine.

    Attributes:
        table: what `multiply` takes; valid as long as this object and the matrix live and do not change.
        kinds: who multiplies, for each class of numbers of rows.
        name: its shape, and whether it is stored transposed.
    """

    __slots__ = ("_keep", "kinds", "name", "table")

    def __init__(self, matrix: np.ndarray, kinds: tuple[str, ...]) -> None:
        inner, width = matrix.shape
        dtype, item = matrix.dtype.name, matrix.itemsize
        self.name = _name(matrix)
        self.kinds = kinds
        self.table = np.zeros(FIELDS, np.int64)
        self._keep: list[np.ndarray] = []
        self._set(_INNER, inner)
        self._set(_WIDTH, width)
        self._set(_COLUMNS, packing.panel_columns(item))
        self._set(_TEAM, TEAM.address)
        for i, kind in enumerate(kinds):
            self._set(_KIND + i, _KINDS[kind])
        TEAM.start()
        if "own" in kinds:
            self._set(_KERNEL, gemm.kernel(dtype).address)
            self._set_array(_PANELS, packing.pack(matrix))
        if "numpy" in kinds or "mkl" in kinds:
            self._set(_PIECE, pieces.piece(dtype).address)
        if "numpy" in kinds:
            matrix, trans, leading = blas.as_operand(matrix)
            function, bits = blas.numpy_gemm(dtype)
            for field, value in ((_GEMM, function), (_BITS, bits), (_TRANS, trans), (_LEADING, leading)):
                self._set(field, value)
            self._set_array(_MATRIX, matrix)
        if "mkl" in kinds:
            library = _loaded_mkl(blas.mkl_path())
            self._set(_COMPUTE, library.gemm_compute(dtype))
            self._set_array(_MKL_PACKED, library.pack(matrix))

    def _set(self, field: int, value: int) -> None:
        self.table[field] = value

    def _set_array(self, field: int, array: np.ndarray) -> None:
        self._keep.append(array)
        self.table[field] = array.ctypes.data

    def kinds_text(self) -> str:
        """Who multiplies, by number of rows, for people."""
        parts = []
        for i, (kind, rows) in enumerate(zip(self.kinds, _UP_TO_ROWS)):
            if kind != self.kinds[i + 1]:
                parts.append(f"{kind} to {rows} rows")
        return ", ".join([*parts, f"then {self.kinds[-1]}" if parts else self.kinds[-1]])


def _name(matrix: np.ndarray) -> str:
    stored = "" if matrix.flags.c_contiguous else " transposed"
    return f"{matrix.dtype.name} {matrix.shape[0]}x{matrix.shape[1]}{stored}"


def factor(matrix: np.ndarray) -> Factor:
    """Prepare a right factor; the first of its shape on this machine is measured, which takes some milliseconds."""
    key = (_name(matrix), choice())
    kinds = _kinds.get(key)
    if kinds is None:
        kinds = _kinds[key] = _choose(matrix)
    return Factor(matrix, kinds)


def _choose(matrix: np.ndarray) -> tuple[str, ...]:
    wanted = choice()
    library = "own" if wanted == "own" else "mkl" if mkl() is not None else "numpy"
    if library == "numpy" and (not blas.numpy_gemm(matrix.dtype.name)[0] or matrix.size == 0):
        library = "own"
    if wanted != "auto" or library == "own":
        return (library,) * len(_MEASURED_ROWS)
    found = []
    for rows in _MEASURED_ROWS:
        candidates = {kind: functools.partial(_prepared_run, matrix, kind, rows) for kind in ("own", library)}
        found.append(profile.answer(f"{_name(matrix)}, {rows} rows", candidates))
    return tuple(found)


@jit(error_model="numpy")
def multiply(mem: np.ndarray, x: int, x_stride: int, rows: int, factor: np.ndarray, out: int, out_stride: int) -> None:
    """``mem[out + r * out_stride + j] = sum over k of mem[x + r * x_stride + k] * matrix[k, j]``, in compiled code.

    Arguments:
        mem: flat memory of the matrix's dtype.
        x, out: offsets of the first rows, in elements.
        x_stride, out_stride: distances between rows, in elements; at least inner and width.
        rows: how many; may be 0.
        factor: `Factor.table`.
    """
    if rows == 0:
        return
    item = mem.itemsize
    inner, width = factor[_INNER], factor[_WIDTH]
    one = mem.dtype.type(1)
    x_at, out_at = mem.ctypes.data + x * item, mem.ctypes.data + out * item
    kind = _kind(factor, rows)
    if kind == _OWN:
        gemm.packed_product(
            factor[_TEAM], factor[_KERNEL], x_at, x_stride, rows,
            factor[_PANELS], inner, width, out_at, out_stride, factor[_COLUMNS],
        )  # fmt: skip
    elif kind == _NUMPY:
        pieces.gemm(
            factor[_TEAM], factor[_PIECE], one, factor[_GEMM], factor[_BITS], rows, width, inner,
            x_at, blas.NO_TRANS, x_stride, factor[_MATRIX], factor[_TRANS], factor[_LEADING], out_at, out_stride, False,
        )  # fmt: skip
    else:
        pieces.gemm(
            factor[_TEAM], factor[_PIECE], one, factor[_COMPUTE], 32, rows, width, inner,
            x_at, blas.NO_TRANS, x_stride, factor[_MKL_PACKED], blas.NO_TRANS, width, out_at, out_stride, True,
        )  # fmt: skip


@jit(error_model="numpy")
def _kind(factor: np.ndarray, rows: int) -> int:
    """Who multiplies so many rows."""
    number = 0
    for limit in _UP_TO_ROWS:
        if rows > limit:
            number += 1
    return factor[_KIND + number]


def _prepared_run(matrix: np.ndarray, kind: str, rows: int) -> Callable[[], None]:
    """A function that multiplies some rows with a matrix, for timing."""
    prepared = Factor(matrix, (kind,) * len(_MEASURED_ROWS))
    inner, width = matrix.shape
    mem = np.full(rows * (inner + width), 0.01, matrix.dtype)
    times = max(1, _TIMED // matrix.size // rows)
    return functools.partial(_multiply_often, times, mem, rows, prepared.table)


@jit(error_model="numpy")
def _multiply_often(times: int, mem: np.ndarray, rows: int, factor: np.ndarray) -> None:
    inner, width = factor[_INNER], factor[_WIDTH]
    for _ in range(times):
        multiply(mem, 0, inner, rows, factor, rows * inner, width)
