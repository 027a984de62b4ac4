"""Values moved, reduced and normalized within their rows: shapes.cu, lines.cu and broadcasting ops against NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dynbatch.cuda import launches
from dynbatch.cuda.broadcast import broadcasting
from dynbatch.ops import elementwise, indexing, linear, normalization, reduction, shape, softmax
from tests.cuda.device import SEEDS, Device, needs_compiler

pytestmark = needs_compiler

DTYPES = ["float32", "float64"]
SHAPES = [(1,), (7,), (1, 5), (4, 1), (3, 4), (9, 2), (2, 3, 4), (33, 1, 2), (1, 2, 1, 3), (2, 3, 2, 2)]
ROWS = [0, 1, 3]
GUARD = -12345.0
TOLERANCE = {"float32": 2e-6, "float64": 1e-14}


def four(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape, *[1] * (4 - len(shape)))


def strides(shape: tuple[int, ...], to: tuple[int, ...] = ()) -> list[int]:
    """Of dimensions, the first one varying first; 0 along those that stretch to a larger shape."""
    found, step = [], 1
    for n, wanted in zip(four(shape), four(to or shape)):
        found.append(0 if n == 1 and wanted != 1 else step)
        step *= n
    return found


def split(shape: tuple[int, ...], dim: int) -> tuple[np.int32, np.int32, np.int32]:
    """The numbers of elements before a dimension, along it and behind it."""
    before, behind = int(np.prod(shape[:dim])), int(np.prod(shape[dim + 1 :]))
    return np.int32(before), np.int32(shape[dim]), np.int32(behind)


class Rows:
    """Rows of values in one flat array, each operand's scattered or at equal distances; and results behind them."""

    def __init__(self, dtype: str, seed: int, *values: np.ndarray, scattered: bool) -> None:
        self.device = Device(dtype, seed)
        self.dtype = dtype
        self.mem = np.full(20_000, GUARD, dtype)
        self.operands: list[tuple[Any, ...]] = []
        top, rng = 3, np.random.default_rng(0)
        for x in values:
            rows, size = len(x), int(np.prod(x.shape[1:]))
            order = rng.permutation(rows) if scattered else np.arange(rows)
            places = top + order * (size + 1)
            self.mem[places[:, None] + np.arange(size)] = x.reshape(rows, size)
            self.operands.append((self.mem, places - 2, 2, 0) if scattered else (self.mem, None, top, size + 1))
            top += rows * (size + 1)

    def run(self, kernel: Any, launch: launches.Launch, wanted: np.ndarray, *args: Any, exact: bool = True) -> None:
        """Launch a kernel that computes these rows, and compare; what lies between them must stay."""
        rows, size = len(wanted), int(np.prod(wanted.shape[1:]))
        handle = self.device.kernels.fixed(kernel) if isinstance(kernel, str) else kernel
        before = self.mem.copy()
        start, step = 10_001, size + 2
        self.device.run(handle, launch, self.mem, rows, start, step, *args)
        places = start + np.arange(rows)[:, None] * step + np.arange(size)
        found = self.mem[places]
        tolerance = 0 if exact else TOLERANCE[self.dtype] * max(4, size)
        np.testing.assert_allclose(found, wanted.reshape(rows, size), rtol=tolerance, atol=tolerance)
        self.mem[places] = before[places]
        np.testing.assert_array_equal(self.mem, before)


def inputs(dtype: str, rows: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=(rows, *s[::-1])).astype(dtype) for s in shapes]


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rearranged(dtype: str, scattered: bool) -> None:
    """Transposed, cut, stretched, and put into a concatenation."""
    for rows in ROWS:
        for m, n in ((1, 1), (1, 5), (7, 3), (33, 2)):
            (x,) = inputs(dtype, rows, (m, n))
            here = Rows(dtype, 0, x, scattered=scattered)
            sizes = [np.int32(k) for k in four((n, m))]
            launch = launches.elements(rows * m * n)
            transposed = linear.transpose.numpy(x)
            here.run("rearrange", launch, transposed, *here.operands[0], *sizes, m, 1, 0, 0, *strides((n, m)))
        for of in SHAPES:
            (x,) = inputs(dtype, rows, of)
            for dim, size in enumerate(of):
                cut = (*of[:dim], size - size // 2, *of[dim + 1 :])
                wanted = shape.pick_range.numpy(x, start=size // 2, stop=size, dim=dim)
                here = Rows(dtype, 0, x, scattered=scattered)
                mem, offsets, place, stride = here.operands[0]
                place += size // 2 * strides(of)[dim]
                sizes = [np.int32(k) for k in four(cut)]
                launch = launches.elements(wanted.size)
                here.run(
                    "rearrange", launch, wanted, mem, offsets, place, stride, *sizes, *strides(of), *strides(cut)
                )  # fmt: skip
                wide = (*of[:dim], 3 * size, *of[dim + 1 :])
                if size == 1:
                    stretched = elementwise.broadcast_to.numpy(x, shape=wide)
                    sizes = [np.int32(k) for k in four(wide)]
                    launch = launches.elements(stretched.size)
                    here.run(
                        "rearrange", launch, stretched, *here.operands[0], *sizes, *strides(of, wide), *strides(wide)
                    )  # fmt: skip
                padded = shape.pad_range.numpy(x, start=1, size=size + 2, dim=dim)
                inner, _, outer = split(of, dim)
                here.run(
                    "pad_range", launches.elements(padded.size), padded, *here.operands[0], inner, np.int32(size + 2),
                    outer, np.int32(1), np.int32(size),
                )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_concatenated(dtype: str) -> None:
    """Two parts along each dimension, each written where it belongs."""
    for of in SHAPES:
        for dim in range(len(of)):
            x, y = inputs(dtype, 3, of, of)
            wanted = shape.concatenate.numpy(x, y, dim=dim)
            whole = (*of[:dim], 2 * of[dim], *of[dim + 1 :])
            here = Rows(dtype, 0, x, y, scattered=True)
            sizes = [np.int32(k) for k in four(of)]
            size = int(np.prod(whole))
            for k, operand in enumerate(here.operands):
                start = 12_000 + k * of[dim] * strides(whole)[dim]
                here.device.fixed(
                    "rearrange", launches.elements(x.size), here.mem, 3, start, size, *operand, *sizes, *strides(of),
                    *strides(whole),
                )  # fmt: skip
            np.testing.assert_array_equal(here.mem[12_000 : 12_000 + 3 * size], wanted.ravel())


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_selected(dtype: str, scattered: bool) -> None:
    """By indices that differ from row to row, some twice; and the gradient. Picks are selections of one."""
    for rows in ROWS:
        for of in SHAPES:
            for dim, size in enumerate(of):
                for count in (1, 3):
                    chosen = np.random.default_rng(0).integers(0, size, (count, rows))
                    (x,) = inputs(dtype, rows, of)
                    inner, along, outer = split(of, dim)
                    wanted = indexing.select.numpy(x, *chosen, dim=dim)
                    here = Rows(dtype, 0, x, wanted, scattered=scattered)
                    rest = (inner, along, outer, np.int32(count), chosen, rows)
                    here.run("select_along", launches.elements(wanted.size), wanted, *here.operands[0], *rest)
                    back = indexing.select_gradient.numpy(wanted, *chosen, size=size, dim=dim)
                    here.run("select_along_gradient", launches.elements(back.size), back, *here.operands[1], *rest)
                    if count == 1:
                        picked = indexing.pick.numpy(x, chosen[0], dim=dim)
                        here.run("select_along", launches.elements(picked.size), picked, *here.operands[0], *rest)


@pytest.mark.parametrize("op", [reduction.sum_to, reduction.mean_to, reduction.max_to])
@pytest.mark.parametrize("dtype", DTYPES)
def test_reduced(op: reduction.Reduction, dtype: str) -> None:
    """Every set of dimensions; NaN stays NaN."""
    for of in SHAPES:
        (x,) = inputs(dtype, 3, of)
        x[1].flat[0] = np.nan
        for kept in range(1 << len(of)):
            to = tuple(n if kept >> d & 1 else 1 for d, n in enumerate(of))
            wanted = op.numpy(x, shape=to)
            here = Rows(dtype, 0, x, scattered=True)
            sizes = [np.int32(k) for k in four(to)]
            reduced = [np.int32(a // b) for a, b in zip(four(of), four(to))]
            steps = strides(of)
            launch = launches.elements(wanted.size)
            here.run(op.name, launch, wanted, *here.operands[0], *sizes, *steps, *reduced, *steps, exact=False)


def no_attrs(dim: int) -> dict[str, Any]:
    return {"dim": dim}


def eps(dim: int) -> dict[str, Any]:
    return {"eps": 1e-12}


LINES: list[tuple[Any, int, Callable[[int], dict[str, Any]]]] = [
    (softmax.softmax, 1, no_attrs),
    (softmax.log_softmax, 1, no_attrs),
    (softmax.softmax_gradient, 2, no_attrs),
    (softmax.log_softmax_gradient, 2, no_attrs),
    (reduction.one_hot_argmax, 1, no_attrs),
    (normalization.normalize, 1, eps),
    (normalization.normalize_gradient, 3, eps),
]
NAMES = ["softmax", "log_softmax", "softmax_gradient", "log_softmax_gradient", "one_hot_argmax", "normalize",
         "normalize_gradient"]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", range(len(LINES)), ids=NAMES)
def test_lines(which: int, dtype: str) -> None:
    """Along each dimension, with masked entries, all of them masked, ties and NaN."""
    op, count, attrs = LINES[which]
    for of in [*SHAPES, (300, 2)]:
        for dim in range(1 if attrs is eps else len(of)):
            values = inputs(dtype, 4, *[of] * count)
            if count == 1 and attrs is no_attrs:
                values[0][1].flat[0] = -np.inf
                values[0][2] = -np.inf
                values[0][3].flat[-1] = np.nan
            with np.errstate(all="ignore"):
                wanted = op.numpy(*values, **attrs(dim))
            here = Rows(dtype, SEEDS[dim % 3], *values, scattered=dim % 2 == 0)
            inner, along, outer = split(of, dim)
            launch = launches.teams(4 * int(inner) * int(outer), int(along))
            operands = [part for operand in here.operands for part in operand]
            rest = [np.dtype(dtype).type(1e-12)] if attrs is eps else []
            here.run(NAMES[which], launch, wanted, inner, along, outer, *operands, *rest, exact=False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_elementwise_ops_that_broadcast_in_three_dimensions(dtype: str) -> None:
    cases: list[tuple[elementwise.Elementwise, list[tuple[int, ...]]]] = [
        (elementwise.add, [(2, 3, 4), (2, 1, 4)]),
        (elementwise.cdiv, [(2,), (2, 3, 4)]),
        (elementwise.tanh, [(2, 3, 4)]),
        (elementwise.at_place, [(2, 1, 4), (1, 3, 1), (2, 3)]),
        (elementwise.logaddexp, [(1, 2, 1, 3), (2, 2, 2, 1)]),
    ]
    for op, shapes in cases:
        values = inputs(dtype, 3, *shapes)
        wanted = op.numpy(*values)
        to = tuple(wanted.shape[:0:-1])
        here = Rows(dtype, 0, *values, scattered=True)
        args: list[Any] = [np.int32(k) for k in four(to)]
        for operand, of in zip(here.operands, shapes):
            args += [*operand, *strides(of, to)]
        kernel = here.device.kernels.generated(broadcasting(op))
        here.run(kernel, launches.elements(wanted.size), wanted, *args, exact=False)
