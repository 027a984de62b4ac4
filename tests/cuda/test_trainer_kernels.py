"""The trainers' kernels against those of the CPU: the rules round as they are written, so results are the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dynbatch.cpu import trainer_kernels
from dynbatch.cuda import launches
from tests.cuda.device import SEEDS, Device, needs_compiler

pytestmark = needs_compiler

DTYPES = ["float32", "float64"]
ARRAYS = {"sgd": 2, "momentum": 3, "adagrad": 3, "rmsprop": 3, "adam": 4, "amsgrad": 5}
SCALARS: dict[str, list[float]] = {
    "sgd": [0.1],
    "momentum": [0.1, 0.9],
    "adagrad": [0.5, 0.1, 1e-20],
    "rmsprop": [0.5, 0.1, 1e-8, 0.9, 0.1],
    "adam": [0.5, 0.01, 1e-8, 0.9, 0.1, 0.999, 0.001],
    "amsgrad": [0.5, 0.01, 1e-8, 0.9, 0.1, 0.999, 0.001],
}
HAS_TINY = {"momentum", "rmsprop", "adam", "amsgrad"}


def parts_of(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """All of an array; or rows of a table, out of order, of which one is long enough for several blocks."""
    if kind == "dense":
        return np.array([0]), np.array([1500])
    return np.array([40, 3, 700, 10]), np.array([50, 4, 1300, 10])


@pytest.mark.parametrize("parts", ["dense", "sparse"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", ARRAYS)
def test_rules(rule: str, dtype: str, parts: str) -> None:
    """Three updates, with decay, gradients of zero, numbers so small that they are dropped, NaN and infinities."""
    real = np.dtype(dtype).type
    rng = np.random.default_rng(0)
    starts, stops = parts_of(parts)
    arrays = [rng.normal(size=1500).astype(dtype) for _ in range(2)]
    arrays += [np.abs(rng.normal(size=1500)).astype(dtype) for _ in range(ARRAYS[rule] - 2)]
    for state in arrays[2:]:
        state[::5] = np.finfo(dtype).tiny * 1.01
    mine = [a.copy() for a in arrays]
    device = Device(dtype)
    for seed in SEEDS:
        device.driver.seed = seed  # type: ignore[attr-defined]
        gradient = rng.normal(size=1500).astype(dtype)
        gradient[::5] = 0
        gradient[45:48] = np.nan, np.inf, -np.inf
        arrays[1][...] = mine[1][...] = gradient
        scalars = [real(s) for s in SCALARS[rule]] + ([np.finfo(dtype).tiny] if rule in HAS_TINY else [])
        keep = real(0.999)
        with np.errstate(all="ignore"):
            getattr(trainer_kernels, rule)(*arrays, starts, stops, keep, *scalars)
        launch = launches.parts(len(starts), int((stops - starts).max()))
        device.fixed(rule, launch, *mine, starts, stops, len(starts), keep, *map(real, scalars))
        for name, a, b in zip(["x", "g", "state", "state", "state"], mine, arrays):
            np.testing.assert_array_equal(a, b, err_msg=name)


@pytest.mark.parametrize("parts", ["dense", "sparse"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm(dtype: str, parts: str) -> None:
    """In double precision, whatever the numbers are; the same for every order of threads."""
    g = (np.random.default_rng(0).normal(size=1500) * 1e25).astype(dtype)
    starts, stops = parts_of(parts)
    wanted = sum(float((g[a:b].astype(np.float64) ** 2).sum()) for a, b in zip(starts, stops))
    found = set()
    for seed in SEEDS:
        launch = launches.parts(len(starts), int((stops - starts).max()))
        sums, norm = np.zeros(launch.grid[0] * launch.grid[1]), np.zeros(1)
        device = Device(dtype, seed)
        device.fixed("squared_norm", launch, sums, g, starts, stops, len(starts))
        device.fixed("add_norms", launches.parts(1, 1), norm, len(sums), sums)
        found.add(float(norm[0]))
    assert len(found) == 1
    np.testing.assert_allclose(found.pop(), wanted, rtol=1e-13)


def test_more_parts_than_a_grid_is_high() -> None:
    """A table of which more rows were touched than blocks may lie below each other."""
    size = 70_000
    x, g = np.ones(size, np.float32), np.ones(size, np.float32)
    starts = np.arange(size)
    one: Any = np.float32(1)
    device = Device("float32")
    device.fixed("sgd", launches.parts(size, 1), x, g, starts, starts + 1, size, one, np.float32(0.25))
    assert (x == 0.75).all() and (g == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_scaled(dtype: str) -> None:
    x = np.random.default_rng(0).normal(size=300).astype(dtype)
    wanted = x * np.dtype(dtype).type(0.3)
    Device(dtype).fixed("scale", launches.elements(len(x)), x, len(x), np.dtype(dtype).type(0.3))
    np.testing.assert_array_equal(x, wanted)
