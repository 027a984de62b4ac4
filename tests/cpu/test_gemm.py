"""Packed products against NumPy in double precision: any size, rows anywhere, one bit pattern for a row."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

from dynbatch.cpu import gemm, packing
from dynbatch.cpu.team import Team

WIDTHS = (1, 2, 3, 5, 15, 16, 17, 47, 48, 49, 96, 130)
INNER = (0, 1, 2, 17, 300)
ROWS = (0, 1, 2, 5, 6, 7, 8, 9, 23, 100)
TOLERANCE = {"float32": 2e-4, "float64": 1e-12}
GUARD = 12345.0


@pytest.fixture(scope="module")
def team():
    found = Team()
    found.start()
    yield found
    found.end()


def product(team: Team, x: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """``x @ matrix`` into a wider array, the rest of which must stay."""
    panels = packing.pack(matrix)
    inner, width = matrix.shape
    rows = x.shape[0]
    out = np.full((rows + 1, width + 3), GUARD, x.dtype)
    gemm.packed_product(
        team.address, gemm.kernel(x.dtype.name).address, x.ctypes.data,
        x.strides[0] // x.itemsize, rows, panels.ctypes.data, inner, width, out.ctypes.data, width + 3,
        packing.panel_columns(x.itemsize),
    )  # fmt: skip
    assert (out[rows] == GUARD).all() and (out[:, width:] == GUARD).all()
    return out[:rows, :width]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_size_and_layout(team: Team, dtype: str, threads: int) -> None:
    team.set_threads(threads)
    rng = np.random.default_rng(1)
    for inner in INNER:
        for width in WIDTHS:
            w = rng.normal(size=(inner, width)).astype(dtype)
            x = rng.normal(size=(max(ROWS), inner + 2)).astype(dtype)[:, :inner]  # rows are apart
            whole = product(team, x, w)
            np.testing.assert_allclose(
                whole, x.astype("float64") @ w.astype("float64"), rtol=0, atol=TOLERANCE[dtype] * max(1, inner) ** 0.5
            )
            for layout in (np.asfortranarray(w), np.repeat(w, 2, axis=1)[:, ::2]):
                np.testing.assert_array_equal(product(team, x, layout), whole)
            for rows in ROWS:
                np.testing.assert_array_equal(product(team, x[:rows], w), whole[:rows])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("threads", [1, 2])
def test_large_products_are_split_without_a_trace(team: Team, dtype: str, threads: int) -> None:
    """By columns or by rows; the bits are those of one row alone."""
    rng = np.random.default_rng(2)
    for rows, inner, width in ((3, 512, 1283), (300, 200, 40), (37, 333, 450), (2000, 3, 300)):
        assert rows * inner * width >= gemm.PARALLEL_FROM
        x = rng.normal(size=(rows, inner)).astype(dtype)
        w = rng.normal(size=(inner, width)).astype(dtype)
        team.set_threads(threads)
        found = product(team, x, w)
        np.testing.assert_allclose(found, x.astype("float64") @ w.astype("float64"), atol=1e-3, rtol=1e-4)
        team.set_threads(1)
        for r in (0, rows // 2, rows - 1):
            np.testing.assert_array_equal(product(team, x[r : r + 1], w), found[r : r + 1])


def test_what_is_not_finite_stays_in_its_row_and_column(team: Team) -> None:
    x, w = np.ones((9, 20), np.float32), np.ones((20, 50), np.float32)
    x[4, 3] = np.nan
    x[5, 0] = np.inf
    w[2, 7] = np.inf
    found = product(team, x, w)
    expected = x.astype("float64") @ w.astype("float64")
    np.testing.assert_array_equal(found, expected.astype(np.float32))
    w[0, 49] = 0  # infinity times zero
    assert np.isnan(product(team, x, w)[5, 49])


def test_several_threads_of_python_multiply_at_once(team: Team) -> None:
    """One has the helpers, the others do without; all get what is right."""
    team.set_threads(2)
    rng = np.random.default_rng(4)
    operands = [(rng.normal(size=(60, 128)).astype("f"), rng.normal(size=(128, 320)).astype("f")) for _ in range(4)]
    expected = [product(team, x, w) for x, w in operands]
    wrong = []

    def work(k: int) -> None:
        for _ in range(200):
            if not np.array_equal(product(team, *operands[k]), expected[k]):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_threads_come_and_go() -> None:
    team = Team()
    team.start()
    x, w = np.ones((64, 128), np.float32), np.ones((128, 320), np.float32)
    for threads in (1, 3, 2, 1, 4):
        team.set_threads(threads)
        for _ in range(20):
            assert (product(team, x, w) == 128).all()
    assert sum(t.name.startswith("dynbatch-") for t in threading.enumerate()) >= 3
    team.end()
    assert (product(team, x, w) == 128).all()  # alone
    team.set_threads(2)
    team.start()
    assert (product(team, x, w) == 128).all()
    team.end()


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names of x86's features")
@pytest.mark.parametrize("processor", ["haswell +avx,+avx2,+fma", "x86-64 +sse2"])
def test_processors_with_narrower_vectors(processor: str) -> None:
    """Other tiles, and a cache of their own beside this processor's."""
    name, features = processor.split()
    script = """
        import numpy as np
        from dynbatch.cpu import gemm, packing, tile
        from dynbatch.cpu.team import TEAM

        rng = np.random.default_rng(5)
        for dtype in ("float32", "float64"):
            for rows, inner, width in ((1, 5, 3), (7, 33, 50), (40, 16, 100)):
                x, w = (rng.integers(-9, 9, n).astype(dtype) for n in ((rows, inner), (inner, width)))
                panels, out = packing.pack(w), np.empty((rows, width), dtype)
                gemm.packed_product(
                    TEAM.address, gemm.kernel(dtype).address, x.ctypes.data, inner, rows,
                    panels.ctypes.data, inner, width, out.ctypes.data, width, packing.panel_columns(x.itemsize),
                )
                assert (out == x @ w).all()
        print(tile.VECTOR_BYTES, tile.MOST_ROWS)
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == (["32", "6"] if name == "haswell" else ["16", "4"]), done.stderr
