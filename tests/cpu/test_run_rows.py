"""Kernels whose rows are shared out over threads: the same bits as on one, whatever the number of rows."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import dynbatch as dy
from dynbatch.cpu import products, team, tiers
from dynbatch.cpu.team import TEAM


@dy.cell
def gates(table: Any, word: int, x: Any, y: Any, rate: float) -> Any:
    h = dy.cmult(dy.logistic(x), dy.tanh(y * rate)) + dy.lookup(table, word)
    return h, dy.pickneglogsoftmax(h, word)


@dy.cell
def attend(x: Any, ys: list[Any]) -> Any:
    return dy.esum([dy.cmult(x, dy.exp(y)) for y in ys])


@pytest.fixture(autouse=True)
def compiled_always() -> Iterator[None]:
    mode = tiers.mode
    tiers.set_mode("always")
    yield
    tiers.set_mode(mode)
    TEAM.split_from(team.SPLIT_FROM)


def measure(rows: int, width: int) -> list[np.ndarray]:
    """Values and gradients of a graph with operands of every kind: scattered, in runs, shared, numbers, lists."""
    dy.renew_cg()
    pc = dy.ParameterCollection()
    table = pc.add_lookup_parameters((3, width))
    table.init_from_array(np.random.default_rng(1).normal(size=(3, width)))
    rng = np.random.default_rng(rows)
    xs = [dy.inputTensor(rng.normal(size=width)) for _ in range(rows)]
    ys = [xs[i] for i in rng.permutation(rows)]
    made = [gates(table, r % 3, x, y, 0.5 + r) for r, (x, y) in enumerate(zip(xs, ys))]
    mixed = [attend(h, ys[: 1 + r % 4]) for r, (h, _) in enumerate(made)]
    loss = dy.esum([e for _, e in made] + [dy.squared_norm(m) for m in mixed])
    loss.backward(full=True)
    assert {r.tier for r in dy.plan().batch_reports} == {"compiled"}
    values = [e.npvalue() for pair in made for e in pair] + [m.npvalue() for m in mixed]
    return [*values, *[x.gradient() for x in xs], table.grad_as_array()]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("rows", "width"), [(1, 5), (2, 8), (7, 33), (40, 3)])
def test_rows_shared_out_give_the_same_bits(rows: int, width: int, dtype: str) -> None:
    dy.init(dtype=dtype, threads=1)
    expected = measure(rows, width)
    TEAM.split_from(1)
    for threads in (1, 2, 3):
        dy.init(dtype=dtype, threads=threads)
        for found, wanted in zip(measure(rows, width), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)


def chunks(rows: int, size: int) -> list[int]:
    """In how many rows at a time a kernel is called that has so many."""
    found = []

    @ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_int64), ctypes.c_int64)
    def kernel(job: Any, index: int) -> None:
        found.append(min(job[2], job[1] - index * job[2]))

    job = np.array([0, rows, -1], np.int64)
    team.run_rows(TEAM.address, ctypes.cast(kernel, ctypes.c_void_p).value, job.ctypes.data, size)
    return found


def test_small_kernels_run_on_one_thread() -> None:
    TEAM.set_threads(2)
    TEAM.start()
    with TEAM.resting():
        assert chunks(0, 10) == [0]
        assert chunks(team.SPLIT_FROM, 10) == [team.SPLIT_FROM]
    assert chunks(team.SPLIT_FROM // 10, 10) == [team.SPLIT_FROM // 10]
    assert chunks(team.SPLIT_FROM // 10 + 1, 0) == [team.SPLIT_FROM // 10 + 1]
    assert len(chunks(team.SPLIT_FROM // 10 + 1, 10)) > 1
    assert sum(chunks(team.SPLIT_FROM // 10 + 1, 10)) == team.SPLIT_FROM // 10 + 1
    TEAM.set_threads(1)
    assert chunks(team.SPLIT_FROM, 10) == [team.SPLIT_FROM]
    products.apply_threads()
