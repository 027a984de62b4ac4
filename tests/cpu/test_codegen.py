"""Generated kernels, called as they are, against the NumPy references of the ops that they were made from.

One Program a family of ops, with the gradients that the ops declare; each is compiled once a dtype and serves all
widths. Width one is a scalar, and so has kernels of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dynbatch.compiler.fuse_elementwise import Region, fuse_elementwise
from dynbatch.compiler.ir import ROW, SHARED, Builder, Program
from dynbatch.cpu import kernels
from dynbatch.cpu.codegen import generate
from dynbatch.ops import elementwise as ew
from dynbatch.ops import indexing, normalization, random, reduction, segment, shape, softmax
from dynbatch.types import type_of

WIDTHS = [1, 2, 7, 8, 9, 33]
ROWS = [1, 2, 5]
DTYPES = ["float32", "float64"]
TOLERANCE = {"float32": 2e-6, "float64": 1e-14}
EXTREME = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e30, -1e30, 1e-30, 88.5, -88.5, -103.0, 3.0]

Known = dict[tuple[str, int], np.ndarray]
GUARD = -12345.0


class Family(Builder):
    """A Builder with two vectors, a matrix, a number and an index a row, a shared vector, and a list of vectors."""

    def __init__(self, dtype: str, width: int, columns: int = 3) -> None:
        super().__init__()
        self.dtype, self.width, self.columns = dtype, width, columns
        vector = type_of(width, dtype)
        self.x, self.y = (self.input("arg", k, vector, ROW) for k in range(2))
        self.s = self.input("float", 0, type_of(1, dtype), ROW)
        self.index = self.input("int", 0, None, ROW)
        self.shared = self.input("slot", 0, vector, SHARED)

    @property
    def matrix(self) -> int:
        return self.input("fwd", 0, type_of((self.width, self.columns), self.dtype), ROW)

    @property
    def elements(self) -> int:
        return self.input("list", 0, type_of(self.width, self.dtype), 1)

    def with_gradients(self, *values: int) -> tuple[int, ...]:
        """The values, and for each the gradients of its operands."""
        found = []
        for v in values:
            value = self.values[v]
            found.append(v)
            dout = self.input("dout", v, value.type, value.domain)
            grads = value.op.vjp(self, value.args, v, dout, **dict(value.attrs))  # type: ignore[union-attr]
            found += [g for g in grads if g is not None and self.values[g].op is not None]
        return tuple(dict.fromkeys(found))


def softmaxes(b: Family) -> tuple[int, ...]:
    masked = b.emit(ew.add, b.x, b.shared)
    return b.with_gradients(
        b.emit(softmax.softmax, b.x, dim=0),
        b.emit(softmax.log_softmax, masked, dim=0),
        b.emit(softmax.pick_neg_log_softmax, b.y, b.index),
    )


def reductions(b: Family) -> tuple[int, ...]:
    dot = b.emit(reduction.sum_to, b.emit(ew.cmult, b.x, b.y), shape=(1,))
    margin = b.emit(
        ew.rectify, b.emit(ew.add, b.emit(ew.subtract, b.x, b.emit(indexing.pick, b.x, b.index, dim=0)), b.s)
    )
    return b.with_gradients(
        b.emit(ew.tanh, dot),
        b.emit(reduction.max_dim, b.y, dim=0),
        b.emit(reduction.one_hot_argmax, b.x, dim=0),
        b.emit(indexing.pick, b.y, b.index, dim=0),
        b.emit(reduction.sum_to, margin, shape=(1,)),
        b.emit(ew.cmult, b.y, dot),
        b.emit(ew.to_float, b.index, dtype=b.dtype),
        b.emit(ew.scale_gradient, b.y, b.s),
    )


def normalizations(b: Family) -> tuple[int, ...]:
    return b.with_gradients(b.emit(normalization.normalize, b.x, eps=1e-12))


def matrices(b: Family) -> tuple[int, ...]:
    m, n = b.width, b.columns
    row = b.emit(shape.reshape, b.emit(reduction.max_dim, b.matrix, dim=0), shape=(1, n))
    return b.with_gradients(
        b.emit(ew.add, b.matrix, b.x),  # to each column
        b.emit(ew.cmult, b.matrix, b.emit(ew.tanh, row)),  # each row
        b.emit(ew.cmult, b.x, row),  # an outer product
        b.emit(reduction.sum_to, b.matrix, shape=(m,)),
        b.emit(reduction.sum_to, b.matrix, shape=(1, n)),
        b.emit(reduction.sum_to, b.matrix, shape=(1,)),
        b.emit(ew.broadcast_to, b.x, shape=(m, n)),
    )


def matrix_maxima(b: Family) -> tuple[int, ...]:
    row = b.emit(indexing.select_gradient, b.s, b.index, size=b.width, dim=0)
    column = b.emit(shape.reshape, b.x, shape=(b.width, 1))
    chosen = b.emit(indexing.select_gradient, column, b.index, size=b.width, dim=1)
    return (
        *b.with_gradients(*(b.emit(reduction.max_dim, b.matrix, dim=d) for d in range(2))),
        *(b.emit(reduction.one_hot_argmax, b.matrix, dim=d) for d in range(2)),
        row,
        chosen,
    )


def matrix_softmaxes(b: Family) -> tuple[int, ...]:
    return b.with_gradients(
        *(b.emit(op, b.matrix, dim=d) for op in (softmax.softmax, softmax.log_softmax) for d in range(2)),
        b.emit(normalization.normalize, b.matrix, eps=1e-12),
    )


def lists(b: Family) -> tuple[int, ...]:
    ptr = b.ptr(1)
    scores = b.emit(reduction.sum_to, b.emit(ew.cmult, b.elements, b.x), shape=(1,))
    return b.with_gradients(
        b.emit(segment.segment_sum, b.elements, ptr),
        b.emit(segment.segment_logsumexp, b.elements, ptr),
        b.emit(segment.segment_length, ptr, dtype=b.dtype),
        b.emit(segment.expand, b.y, ptr),
        b.emit(segment.segment_sum, scores, ptr),
        b.emit(ew.tanh, b.emit(segment.segment_max, b.elements, ptr)),
    )


def draws(b: Family) -> tuple[int, ...]:
    attrs = {"shape": (b.width,), "dtype": b.dtype}
    return b.emit(random.uniform, b.index, salt=1, **attrs), b.emit(random.normal, b.index, salt=2, **attrs)


FAMILIES: list[Callable[[Family], tuple[int, ...]]] = [
    softmaxes, reductions, normalizations, matrices, matrix_maxima, matrix_softmaxes, lists, draws,
]  # fmt: skip


def random_inputs(program: Program, rows: int, width: int, seed: int = 0) -> Known:
    rng = np.random.default_rng(seed)
    boundaries = np.concatenate(([0], np.cumsum(1 + np.arange(rows) % 3)))
    known: Known = {}
    for value in program.values:
        if value.op is None:
            count = {ROW: rows, SHARED: 1}.get(value.domain, int(boundaries[-1]))
            key = value.kind, value.index
            if value.kind == "ptr":
                known[key] = boundaries
            elif value.kind == "int":
                known[key] = rng.integers(0, width, rows)
            else:
                assert value.type is not None
                known[key] = rng.normal(size=(count, *value.type.storage)).astype(value.type.dtype)
    return known


def references(program: Program, known: Known) -> list[np.ndarray]:
    arrays: list[np.ndarray] = []
    with np.errstate(all="ignore"):
        for value in program.values:
            if value.op is None:
                arrays.append(known[value.kind, value.index])
            else:
                arrays.append(value.op.numpy(*[arrays[a] for a in value.args], **dict(value.attrs)))
    return arrays


def call(text: str, *args: Any) -> None:
    """Call a kernel, as compiled steps do."""
    step = f"""
from dynbatch.cpu.jit import jit

# kernel0 is {kernels.digest(text)}


@jit(error_model="numpy")
def step(*args):
    kernel0(*args)
"""
    kernels.load(step, {"kernel0": text})["step"](*args)


def run_kernels(program: Program, known: Known, dtype: str, scattered: bool) -> tuple[list[Any], int]:
    """Every value of a Program, those of regions by kernels; and how many instructions were not in a region.

    With ``scattered``, arguments and list elements lie in any order, and results have gaps between their rows.
    """
    mem = np.full(2_000_000 // 8, GUARD, dtype)
    top = 64
    arrays = references(program, known)  # overwritten by what kernels give
    location, stride, index = {}, {}, {}
    rng = np.random.default_rng(1)
    for v, value in enumerate(program.values):
        if value.type is None or value.domain == SHARED:
            continue
        count, size = arrays[v].shape[0], value.type.size
        gap = size + 3 if scattered and value.kind not in ("arg", "list") else size
        location[v], stride[v] = top, gap
        if value.op is None:
            order = rng.permutation(count)
            index[v] = top + order * gap
            for r in range(count):
                at = top + (order[r] if value.kind in ("arg", "list") else r) * gap
                mem[at : at + size] = arrays[v][r].ravel()
        top += gap * count + 5
    alone = 0
    skip = {v for v, x in enumerate(program.values) if x.op is not None and x.domain == SHARED}
    for item in fuse_elementwise(program, skip, program.outputs):
        if not isinstance(item, Region):
            value = program.values[item]
            arrays[item] = value.op.numpy(*[arrays[a] for a in value.args], **dict(value.attrs))  # type: ignore[union-attr]
            if value.type is not None:
                for r, row in enumerate(arrays[item]):
                    mem[location[item] + r * stride[item] :][: row.size] = row.ravel()
            alone += value.op is not shape.reshape
            continue
        source = generate(program, item, dtype)
        numbers: list[int] = []
        operands: list[np.ndarray] = []
        for value_id, column, kind, _ in source.operands:
            if kind == "affine":
                numbers += [location[value_id] + column, stride[value_id]]
            elif kind == "index":
                numbers.append(column)
                operands.append(index[value_id])
            elif kind == "shared":
                operands.append(np.ascontiguousarray(arrays[value_id]).reshape(-1))
            elif kind == "column":
                operands.append(arrays[value_id][:, 0])
            else:
                operands.append(arrays[value_id])
        for v in source.outputs:
            numbers += [location[v], stride[v]]
        count = arrays[source.outputs[0]].shape[0] if source.domain == item.domain else known["ptr", 1].size - 1
        call(source.text, mem, 0, count, *source.sizes, *numbers, *operands)
        for v in source.outputs:
            shaped = arrays[v].shape
            size = int(np.prod(shaped[1:]))
            rows = [mem[location[v] + r * stride[v] :][:size].copy() for r in range(shaped[0])]
            if scattered:
                for r in range(shaped[0]):
                    assert (mem[location[v] + r * stride[v] + size :][:3] == GUARD).all()
            arrays[v] = np.array(rows).reshape(shaped)
    return arrays, alone


def check(make: Callable[[Family], tuple[int, ...]], dtype: str, width: int, known: Callable[[Program], Known]) -> int:
    b = Family(dtype, width)
    program = b.finish(make(b), name=make.__name__)
    given = known(program)
    wanted = references(program, given)
    found, alone = run_kernels(program, given, dtype, scattered=width % 2 == 1)
    for v in program.outputs:
        scale = max(1.0, float(np.abs(wanted[v][np.isfinite(wanted[v])]).max(initial=0.0)))
        close = TOLERANCE[dtype] * max(4, width)
        name = program.values[v].op.name  # type: ignore[union-attr]
        with np.errstate(all="ignore"):
            np.testing.assert_allclose(found[v], wanted[v], rtol=close, atol=close * scale, err_msg=f"{name} %{v}")
    return alone


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", FAMILIES)
def test_kernels_equal_the_references(make: Any, dtype: str) -> None:
    for width in WIDTHS:
        for rows in ROWS:
            check(make, dtype, width, lambda p, rows=rows, width=width: random_inputs(p, rows, width))  # type: ignore[misc]


@pytest.mark.parametrize("make", FAMILIES)
def test_nothing_runs_alone(make: Any) -> None:
    """Every op here has a form for kernels, but for the mask that compares list elements."""
    b = Family("float32", 7)
    program = b.finish(make(b))
    schedule = fuse_elementwise(program, (), program.outputs)
    alone = {program.values[item].op for item in schedule if not isinstance(item, Region)}
    assert alone <= {shape.reshape, segment.segment_first}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [softmaxes, reductions, normalizations, matrix_maxima, matrix_softmaxes, lists])
def test_kernels_keep_nan_and_infinity(make: Any, dtype: str) -> None:
    """Rows in which one extreme value meets ordinary ones, and rows of that value alone."""

    def extreme(program: Program) -> Known:
        known = random_inputs(program, 2 * len(EXTREME), 7)
        for value in program.values:
            if value.op is None and value.kind in ("arg", "fwd", "list"):
                array = known[value.kind, value.index]
                for r, special in enumerate(EXTREME):
                    array[2 * r].flat[r % 7] = special
                    array[2 * r + 1] = special
        return known

    check(make, dtype, 7, extreme)


def test_a_row_does_not_depend_on_the_number_of_rows() -> None:
    for make in (softmaxes, normalizations, lists):
        b = Family("float32", 33)
        program = b.finish(make(b))
        known = random_inputs(program, 5, 33)
        everything, _ = run_kernels(program, known, "float32", scattered=False)
        elements = {1: int(known["ptr", 1][2])} if ("ptr", 1) in known else {}
        few = {}
        for value in program.values:
            if value.op is None:
                key = value.kind, value.index
                count = 3 if value.kind == "ptr" else {ROW: 2, SHARED: 1}.get(value.domain, elements.get(1, 0))
                few[key] = known[key][:count]
        some, _ = run_kernels(program, few, "float32", scattered=False)
        for v in program.outputs:
            np.testing.assert_array_equal(some[v], everything[v][: some[v].shape[0]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_draws_are_the_same_numbers(dtype: str) -> None:
    """Uniform numbers to the last bit: dropout drops the same elements in both tiers."""
    b = Family(dtype, 33)
    program = b.finish((b.emit(random.uniform, b.index, shape=(33,), salt=3, dtype=dtype),))
    known = {("int", 0): np.array([0, 1, -1, 2**62, -(2**63)])}
    found, _ = run_kernels(program, known, dtype, scattered=False)
    np.testing.assert_array_equal(found[program.outputs[0]], references(program, known)[program.outputs[0]])


def test_one_kernel_serves_all_widths() -> None:
    texts = set()
    for width in (2, 64):
        b = Family("float32", width)
        program = b.finish(normalizations(b))
        (region,) = fuse_elementwise(program, (), program.outputs)
        texts.add(generate(program, region, "float32").text)  # type: ignore[arg-type]
    assert len(texts) == 1
