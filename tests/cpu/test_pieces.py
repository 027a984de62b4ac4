"""Large products by BLAS in pieces: any shape and layout, on any number of threads, against NumPy's."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from dynbatch.cpu import blas, pieces, products
from dynbatch.cpu.team import TEAM

SHAPES = [(1, 1, 1), (7, 9, 5), (129, 130, 150), (7, 701, 500), (701, 7, 500), (1, 3001, 800), (3001, 1, 800)]
"""All but the first two are cut."""

pytestmark = pytest.mark.skipif(not blas.numpy_gemm("float32")[0], reason="NumPy's BLAS is not one that is known")


@pytest.fixture(autouse=True)
def threads_put_back() -> Iterator[None]:
    threads = TEAM._threads
    yield
    TEAM.set_threads(threads)


def layouts(a: np.ndarray) -> dict[str, np.ndarray]:
    """The same matrix in memory in each way that BLAS takes."""
    wide = np.zeros((a.shape[0], a.shape[1] + 3), a.dtype)
    wide[:, : a.shape[1]] = a
    return {"rows": a, "columns": np.asfortranarray(a), "part": wide[:, : a.shape[1]]}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pieces_make_the_whole(shape: tuple[int, int, int], threads: int, dtype: str) -> None:
    rows, width, inner = shape
    TEAM.set_threads(threads)
    rng = np.random.default_rng(0)
    x, m = rng.normal(size=(rows, inner)).astype(dtype), rng.normal(size=(inner, width)).astype(dtype)
    expected = x.astype(np.float64) @ m.astype(np.float64)
    for a in layouts(x).values():
        for b in layouts(m).values():
            whole = np.full((rows + 2, width + 5), 7, dtype)
            out = whole[1:-1, 2:-3]
            assert pieces.product(a, b, out, *blas.numpy_gemm(dtype))
            np.testing.assert_allclose(out, expected, rtol=1e-3, atol=1e-3)
            out[:] = 7
            assert (whole == 7).all()  # nothing beside it was written


def test_a_product_large_enough_is_cut() -> None:
    TEAM.set_threads(2)
    x, m = np.ones((300, 400), np.float32), np.ones((400, 500), np.float32)
    assert x.size * m.shape[1] >= pieces.CUT_FROM
    out = np.zeros((300, 500), np.float32)
    assert pieces.product(x, m, out, *blas.numpy_gemm("float32"))
    assert (out == 400).all()


def test_what_blas_cannot_take_is_left_to_numpy() -> None:
    x, m, out = np.ones((4, 6), np.float32), np.ones((6, 3), np.float32), np.zeros((4, 3), np.float32)
    function, bits = blas.numpy_gemm("float32")
    assert not pieces.product(np.ones((4, 12), np.float32)[:, ::2], m, out, function, bits)
    assert not pieces.product(x, m, np.asfortranarray(out), function, bits)
    assert not pieces.product(x, m, out, 0, 0)
    assert not pieces.product(x, m.astype(np.float64), out, function, bits)
    assert not pieces.product(x, m, out.astype(np.float64), function, bits)
    assert (out == 0).all()


@pytest.mark.parametrize("types", [("float32", "float64"), ("float64", "float32"), ("int64", "int64")], ids=str)
def test_other_types_are_multiplied_as_numpy_does(types: tuple[str, str]) -> None:
    x, m = np.arange(12).reshape(3, 4).astype(types[0]), np.arange(20).reshape(4, 5).astype(types[1])
    found = products.product(x, m)
    np.testing.assert_array_equal(found, x @ m)
    assert found.dtype == (x @ m).dtype
