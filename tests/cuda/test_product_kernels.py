"""Products of matrices of each row, and of a weight with gathered rows, against NumPy in double precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dynbatch.cuda import launches
from dynbatch.ops.linear import matmul
from tests.cuda.device import Device, needs_compiler

pytestmark = needs_compiler

DTYPES = ["float32", "float64"]
SIZES = [(1, 1, 1), (1, 7, 1), (7, 1, 1), (3, 4, 1), (33, 9, 1), (2, 3, 5), (9, 300, 2), (8, 8, 8)]
TOLERANCE = {"float32": 2e-7, "float64": 4e-16}
GUARD = -12345.0


def check(found: np.ndarray, wanted: np.ndarray, magnitude: np.ndarray, dtype: str, terms: int) -> None:
    """Equal but for rounding, of which each sum has at most as much as its terms are large."""
    error = np.abs(found.astype(np.float64) - wanted)
    assert (error <= TOLERANCE[dtype] * max(terms, 4) * magnitude).all()


@pytest.mark.parametrize("ta", [False, True])
@pytest.mark.parametrize("tb", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_each_rows_own_matrices(dtype: str, ta: bool, tb: bool) -> None:
    """By reference, or one matrix for all rows; what lies between results stays."""
    for m, k, n in SIZES:
        for rows in (1, 3):
            rng = np.random.default_rng(0)
            a = rng.normal(size=(rows, *((m, k) if ta else (k, m)))).astype(dtype)
            b = rng.normal(size=(rows, *((k, n) if tb else (n, k)))).astype(dtype)
            mem = np.full(2 * rows * (m * k + k * n + m * n + 8) + 100, GUARD, dtype)
            places, top = [], 3
            for x in (a, b):
                order = rng.permutation(rows)
                places.append(top + order * (x[0].size + 1))
                mem[places[-1][:, None] + np.arange(x[0].size)] = x.reshape(rows, -1)
                top += rows * (x[0].size + 1)
            step = m * n + 2
            sizes = np.int32([m, k, n])
            for shared in (False, True):
                left = a[:1] if shared else a
                wanted = matmul.numpy(left.astype(np.float64), b.astype(np.float64), ta=ta, tb=tb)
                magnitude = matmul.numpy(abs(left.astype(np.float64)), abs(b.astype(np.float64)), ta=ta, tb=tb)
                of_a: tuple[Any, ...] = (mem, None, int(places[0][0]), 0) if shared else (mem, places[0], 0, 0)
                operands = (*of_a, mem, places[1] - 1, 1, 0)
                args = (mem, rows, top, step, *operands, *sizes)
                device = Device(dtype, seed=rows)
                runs = [("product", launches.elements(rows * m * n), (np.int32(ta), np.int32(tb)))]
                if ta and not tb:
                    team = launches.teams(rows * m * n, k, launches.vector(dtype))
                    runs.append(("product_of_columns", team, ()))
                for name, launch, more in runs:
                    device.fixed(name, launch, *args, *more)
                    found = mem[top : top + rows * step].reshape(rows, step)
                    check(found[:, : m * n].reshape(wanted.shape), wanted, magnitude, dtype, k)
                    assert (found[:, m * n :] == GUARD).all()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_with_gathered_rows(dtype: str, transposed: bool) -> None:
    """Every tile, with rows and columns at its edges; all give the same bits, in whatever order the threads run."""
    for rows, inner, width in [(1, 1, 1), (1, 33, 9), (5, 7, 65), (17, 16, 64), (65, 300, 2), (66, 15, 130)]:
        rng = np.random.default_rng(0)
        x = rng.normal(size=(rows, inner)).astype(dtype)
        w = rng.normal(size=(inner, width)).astype(dtype)
        mem = np.full(2 * rows * (inner + width + 4) + 100, GUARD, dtype)
        offsets = 3 + rng.permutation(rows) * (inner + 1)
        mem[offsets[:, None] + np.arange(inner)] = x
        start, step = 3 + rows * (inner + 1), width + 2
        weight = np.ascontiguousarray(w.T) if transposed else w
        found = []
        name, launch = launches.gather_product(rows, width)
        others = [(f"gather_product_{tall}", tall) for tall in (64, 16, 4)]
        assert name in dict(others)
        for other, tall in others:
            grid = (-(-rows // tall), launch.grid[1], 1)
            for seed in (0, 1):
                mem[start:] = GUARD
                Device(dtype, seed).fixed(
                    other, launches.Launch(grid, launch.block), mem, rows, start, step, mem, offsets - 2, 2, 0, weight,
                    np.int32(inner), np.int32(width), np.int32(transposed),
                )  # fmt: skip
                block = mem[start : start + rows * step].reshape(rows, step)
                assert (block[:, width:] == GUARD).all()
                found.append(block[:, :width].copy())
        assert all((f == found[0]).all() for f in found)
        x, w = x.astype(np.float64), w.astype(np.float64)
        check(found[0], x @ w, abs(x) @ abs(w), dtype, inner)


def test_the_tile_follows_the_number_of_rows() -> None:
    assert [launches.gather_product(rows, 64)[0] for rows in (1, 8, 9, 128, 129)] == [
        "gather_product_4", "gather_product_4", "gather_product_16", "gather_product_16", "gather_product_64",
    ]  # fmt: skip
