"""That cuBLAS's functions are called as they are declared: by a library with these names, made by g++."""

from __future__ import annotations

import ctypes
import subprocess
from typing import Any

import numpy as np
import pytest

from dynbatch.cuda.cublas import Cublas
from dynbatch.errors import DeviceError
from tests.cuda.device import needs_compiler

pytestmark = needs_compiler

SOURCE = r"""
template <class T>  // column-major, as the real one
static int gemm(void* handle, int ta, int tb, int m, int n, int k, const T* alpha, const T* a, int lda, long long sa,
                const T* b, int ldb, long long sb, const T* beta, T* c, int ldc, long long sc, int count) {
    if (handle != (void*)99) return 1;
    for (int x = 0; x < count; ++x)
        for (int j = 0; j < n; ++j)
            for (int i = 0; i < m; ++i) {
                T sum = 0;
                for (int l = 0; l < k; ++l)
                    sum += a[x * sa + (ta ? l + i * lda : i + l * lda)] * b[x * sb + (tb ? j + l * ldb : l + j * ldb)];
                T& to = c[x * sc + i + j * ldc];
                to = *alpha * sum + (*beta == 0 ? 0 : *beta * to);
            }
    return 0;
}
#define PRODUCTS(letter, T)                                                                                           \
    extern "C" int cublas##letter##gemm_v2(void* handle, int ta, int tb, int m, int n, int k, const T* alpha,          \
                                           const T* a, int lda, const T* b, int ldb, const T* beta, T* c, int ldc) {   \
        return gemm<T>(handle, ta, tb, m, n, k, alpha, a, lda, 0, b, ldb, 0, beta, c, ldc, 0, 1);                     \
    }                                                                                                                 \
    extern "C" int cublas##letter##gemmStridedBatched(                                                                \
        void* handle, int ta, int tb, int m, int n, int k, const T* alpha, const T* a, int lda, long long sa,         \
        const T* b, int ldb, long long sb, const T* beta, T* c, int ldc, long long sc, int count) {                   \
        return gemm<T>(handle, ta, tb, m, n, k, alpha, a, lda, sa, b, ldb, sb, beta, c, ldc, sc, count);              \
    }
PRODUCTS(S, float)
PRODUCTS(D, double)
extern "C" int cublasSetWorkspace_v2(void* handle, void* memory, unsigned long nbytes) {
    return handle == (void*)99 && memory == (void*)0x700000001000 && nbytes == 1l << 33 ? 0 : 14;
}
"""


@pytest.fixture(scope="module")
def cublas(tmp_path_factory: pytest.TempPathFactory) -> Cublas:
    path = tmp_path_factory.mktemp("cublas") / "library.so"
    command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(path), "-Wl,-soname,libcublas.so.99"]
    subprocess.run(command, input=SOURCE, text=True, check=True)
    ctypes.CDLL(str(path))
    return Cublas(99)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("ta", [0, 1])
@pytest.mark.parametrize("tb", [0, 1])
@pytest.mark.parametrize("count", [1, 3])
def test_products(cublas: Any, dtype: str, ta: int, tb: int, count: int) -> None:
    m, n, k = 4, 3, 5
    rng = np.random.default_rng(1)
    a, b, c = (rng.normal(size=(count, *s)).astype(dtype) for s in ((k, m), (n, k), (n, m)))  # columns by rows
    a, b = a.swapaxes(1, 2).copy() if ta else a, b.swapaxes(1, 2).copy() if tb else b
    left, right = a if ta else a.swapaxes(1, 2), b if tb else b.swapaxes(1, 2)
    wanted = (2 * (left @ right) + 0.5 * c.swapaxes(1, 2)).swapaxes(1, 2)
    scale = np.array([2, 0.5], dtype)
    alpha, beta = scale.ctypes.data, scale.ctypes.data + scale.itemsize
    given = [(x.ctypes.data, x.shape[2], x.shape[1] * x.shape[2]) for x in (a, b, c)]
    letter = "s" if dtype == "float32" else "d"
    if count == 1:
        (pa, lda, _), (pb, ldb, _), (pc, ldc, _) = given
        getattr(cublas, f"{letter}gemm")(99, ta, tb, m, n, k, alpha, pa, lda, pb, ldb, beta, pc, ldc)
    else:
        product = getattr(cublas, f"{letter}gemmStridedBatched")
        product(99, ta, tb, m, n, k, alpha, *given[0], *given[1], beta, *given[2], np.int64(count))
    np.testing.assert_allclose(c, wanted, rtol=1e-5 if dtype == "float32" else 1e-12)


def test_addresses_and_sizes_are_of_64_bits(cublas: Any) -> None:
    cublas.set_workspace(99, np.uint64(0x700000001000), 1 << 33)


def test_what_cublas_refuses(cublas: Any) -> None:
    with pytest.raises(DeviceError, match=r"cublasSetWorkspace_v2 of cuBLAS returns status 14"):
        cublas.set_workspace(99, 0, 0)


def test_a_library_that_is_not_loaded() -> None:
    with pytest.raises(DeviceError, match=r"libcublas\.so\.98, which products in CUDA graphs need, is not loaded"):
        Cublas(98)
