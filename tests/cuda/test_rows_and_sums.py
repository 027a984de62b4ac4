"""Rows moved and summed: rows.cu and sums.cu against NumPy, and lists.cu."""

from __future__ import annotations

import numpy as np
import pytest

from dynbatch.cuda import launches
from dynbatch.cuda.edges import count_edges, list_edges
from dynbatch.ops.segment import segment_first
from tests.cuda.device import SEEDS, Device, needs_compiler

pytestmark = needs_compiler

WIDTHS = [1, 2, 7, 8, 9, 33, 300]
DTYPES = ["float32", "float64"]
GUARD = -12345.0


def numbers(dtype: str, size: int, seed: int = 0) -> np.ndarray:
    found = np.random.default_rng(seed).normal(size=size).astype(dtype)
    found[::7], found[1::11] = np.nan, -0.0
    return found


def teams(rows: int, width: int, dtype: str) -> launches.Launch:
    return launches.teams(rows, width, launches.vector(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_are_moved_as_they_are(width: int, dtype: str) -> None:
    """From any place to rows with gaps, aligned or not, down to the bits; and nothing else is written."""
    device = Device(dtype, seed=width)
    i32 = np.int32(width)
    for start, stride in ((16, -(-width // 4) * 4), (17, width + 3)):
        for rows in (0, 1, 5):
            rng = np.random.default_rng(rows)
            data, table = numbers(dtype, 4000), numbers(dtype, 11 * width)
            offsets = np.sort(rng.integers(0, 4000 - width - 3, rows))[::-1].copy() // 4 * 4
            indices = rng.integers(0, 11, rows)
            lines = data[offsets[:, None] + 3 + np.arange(width)]
            affine = np.full(4000, GUARD, dtype)
            spaced = 5 + np.arange(rows)[:, None] * (width + 1) + np.arange(width)
            affine[spaced] = lines
            wanted = {"gather": lines, "copy_rows": lines, "lookup_rows": table.reshape(11, width)[indices]}
            given = {"gather": (data, offsets, 3), "copy_rows": (5, width + 1), "lookup_rows": (table, indices)}
            for name, arguments in given.items():
                mem = affine.copy() if name == "copy_rows" else np.full(4000, GUARD, dtype)
                mem = np.concatenate((mem, np.full(4000, GUARD, dtype)))
                expected = mem.copy()
                expected[4000 + start + np.arange(rows)[:, None] * stride + np.arange(width)] = wanted[name]
                device.fixed(name, teams(rows, width, dtype), mem, rows, i32, 4000 + start, stride, *arguments)
                assert mem.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_sums_over_edges(width: int, dtype: str) -> None:
    """Rows with no edge, one, several, and edges from which no gradient comes; in the order of the edges."""
    device = Device(dtype, seed=width)
    rng = np.random.default_rng(0)
    counts = np.array([0, 1, 2, 0, 5, 1, 3, 0])  # by value: two outputs for each of four nodes
    ptr = np.concatenate(([0], np.cumsum(counts)))
    edges = rng.permutation(int(ptr[-1]))
    location = 3 + rng.permutation(int(ptr[-1])) * (width + 1)
    location[edges[-2]] = -1
    location[edges[1]] = -1
    for output in (0, 1):
        first = np.array([2, 0, 6, 4])
        total, start = count_edges(first, output, ptr, edges, location, width)
        boundaries, places = np.empty(5, np.int64), np.empty(total, np.int64)
        list_edges(first, output, ptr, edges, location, boundaries, places)
        assert (start, boundaries[-1]) == (-1, total)
        mem = np.concatenate((numbers(dtype, 8000), np.full(2000, GUARD, dtype)))
        expected = mem.copy()
        for r, node in enumerate(first):
            lines = [location[edges[e]] for e in range(ptr[node + output], ptr[node + output + 1])]
            lines = [mem[at : at + width] for at in lines if at >= 0]
            sums = lines[0].copy() if lines else np.zeros(width, dtype)
            for line in lines[1:]:
                sums += line
            expected[8000 + r * width : 8000 + (r + 1) * width] = sums
        launch = teams(4, width, dtype)
        device.fixed("sum_edges", launch, mem, 4, np.int32(width), 8000, boundaries, places)
        np.testing.assert_array_equal(mem, expected)


def test_single_edges_that_follow_each_other_are_found() -> None:
    """Also beside edges from which no gradient comes; in any other order they are summed."""
    ptr, edges, first = np.array([0, 1, 3, 4]), np.arange(4), np.arange(3)
    assert count_edges(first, 0, ptr, edges, np.array([40, -1, 45, 50]), 5) == (3, 40)
    assert count_edges(first, 0, ptr, edges, np.array([40, 45, -1, 55]), 5) == (3, -1)
    assert count_edges(first, 0, ptr, edges, np.array([40, 45, 50, 55]), 5) == (4, -1)
    assert count_edges(first, 0, ptr, edges, np.array([-1, 45, -1, 50]), 5) == (2, -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_gradient_of_a_lookup_table(width: int, dtype: str) -> None:
    """Rows that come once, often, or not at all, added to what is there in their order."""
    device = Device(dtype, seed=width)
    rng = np.random.default_rng(0)
    indices = np.array([3, 1, 3, 3, 0, 1, 9, 3])
    mem = numbers(dtype, 4000)
    places = 5 + rng.permutation(len(indices)) * (width + 2)
    gradient = rng.normal(size=(10, width)).astype(dtype)
    expected = gradient.copy()
    for index, place in zip(indices, places):
        expected[index] += mem[place : place + width]
    order = np.argsort(indices, kind="stable")
    ids, starts = np.unique(indices[order], return_index=True)
    boundaries = np.append(starts, len(indices))
    launch = teams(len(ids), width, dtype)
    device.fixed(
        "lookup_gradient", launch, gradient, len(ids), np.int32(width), ids, boundaries, places[order].copy(), mem
    )
    np.testing.assert_array_equal(gradient, expected)


def sum_rows(device: Device, rows: int, width: int, start: int, stride: int, mem: np.ndarray) -> np.ndarray:
    launch = launches.slices(rows, width)
    sums = np.empty((launch.grid[1], width), mem.dtype)
    device.fixed("sum_slices", launch, sums, rows, np.int32(width), mem, start, stride)
    result = np.ones(width, mem.dtype)
    device.fixed("add_slices", launches.elements(width), result, len(sums), np.int32(width), sums)
    return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_sums_over_a_batch(width: int, dtype: str) -> None:
    for rows in (0, 1, 2, 9, 257):
        mem = np.random.default_rng(rows).normal(size=3 + rows * (width + 1)).astype(dtype)
        lines = mem[3:].reshape(rows, width + 1)[:, :width].astype(np.float64)
        found = [sum_rows(Device(dtype, seed), rows, width, 3, width + 1, mem) for seed in SEEDS]
        assert all((f == found[0]).all() for f in found), "the order of threads must not matter"
        tolerance = {"float32": 1e-6, "float64": 1e-14}[dtype]
        np.testing.assert_allclose(
            found[0], lines.sum(0), rtol=tolerance, atol=tolerance * np.abs(lines).sum(0).max(initial=0)
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_are_added(dtype: str) -> None:
    """Of any size, also none; more of them than a grid is high."""
    for sizes in ([1, 700, 33, 0, 5], [1] * 70_000):
        device = Device(dtype, seed=len(sizes))
        item = np.dtype(dtype).itemsize
        starts = np.concatenate(([0], np.cumsum(np.array(sizes) + 1)))
        x, y = (numbers(dtype, int(starts[-1]), seed) for seed in range(2))
        x, y = (np.where(np.isnan(a), 1, a).astype(dtype) for a in (x, y))
        wanted = x.copy()
        for start, size in zip(starts, sizes):
            wanted[start : start + size] += y[start : start + size]
        there = [device.driver.allocate(a.nbytes) for a in (x, y)]
        for address, array in zip(there, (x, y)):
            device.driver.upload(address, array)
        to, of = (address + item * starts[:-1] for address in there)
        launch = launches.parts(len(sizes), max(sizes))
        device.fixed("add_parts", launch, to, of, np.array(sizes), len(sizes))
        device.driver.download(there[0], x)
        np.testing.assert_array_equal(x, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mask_of_a_lists_maximum(dtype: str) -> None:
    """Ties go to the first; a list with a NaN has none."""
    boundaries = np.array([0, 1, 4, 6])
    for width in (1, 7, 33):
        x = np.random.default_rng(0).integers(0, 3, (6, width)).astype(dtype)
        x[2, 0], x[5, width - 1] = np.nan, -np.inf
        mem = np.full(600, GUARD, dtype)
        offsets = np.arange(6)[::-1] * (width + 1)
        mem[offsets[:, None] + np.arange(width)] = x
        for operand in ((mem, offsets.copy(), 0, 0), (mem, None, int(offsets[0]), -(width + 1))):
            device = Device(dtype)
            device.fixed(
                "segment_first", launches.elements(3 * width), mem, 3, 300, width + 1, *operand, np.int32(width),
                boundaries,
            )  # fmt: skip
            found = mem[300 : 300 + 6 * (width + 1)].reshape(6, width + 1)
            np.testing.assert_array_equal(found[:, :width], segment_first.numpy(x, boundaries))
            assert (found[:, width] == GUARD).all()
