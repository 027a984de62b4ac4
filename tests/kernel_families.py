"""Programs for tests of generated kernels, one a family of ops, and memory in which their values lie.

Each Program has the gradients that the ops declare; what kernels give is compared with the ops' NumPy references.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dynbatch.compiler.fuse_elementwise import Region, fuse_elementwise
from dynbatch.compiler.ir import ROW, SHARED, Builder, Program
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
SCRATCH = 50_000  # elements behind all values


Run = Callable[[Program, "Known", str], list[Any]]
"""Every value of a Program for given inputs in a precision, computed by kernels."""


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

    @property
    def others(self) -> int:
        """Elements of another list, of which rows have other numbers."""
        return self.input("list", 1, type_of(self.width, self.dtype), 2)

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


def two_lists(b: Family) -> tuple[int, ...]:
    total = b.emit(ew.add, b.emit(segment.segment_sum, b.elements, b.ptr(1)), b.x)
    return b.with_gradients(
        b.emit(ew.add, total, b.emit(segment.segment_max, b.others, b.ptr(2))),
        b.emit(segment.segment_logsumexp, b.others, b.ptr(2)),
        b.emit(segment.segment_length, b.ptr(1), dtype=b.dtype),
        b.emit(segment.segment_length, b.ptr(2), dtype=b.dtype),
    )


def draws(b: Family) -> tuple[int, ...]:
    attrs = {"shape": (b.width,), "dtype": b.dtype}
    return b.emit(random.uniform, b.index, salt=1, **attrs), b.emit(random.normal, b.index, salt=2, **attrs)


FAMILIES: list[Callable[[Family], tuple[int, ...]]] = [
    softmaxes, reductions, normalizations, matrices, matrix_maxima, matrix_softmaxes, lists, two_lists, draws,
]  # fmt: skip


def random_inputs(program: Program, rows: int, width: int, seed: int = 0) -> Known:
    rng = np.random.default_rng(seed)
    boundaries = {d: np.concatenate(([0], np.cumsum(1 + (np.arange(rows) + d - 1) % (2 + d)))) for d in (1, 2)}
    known: Known = {}
    for value in program.values:
        if value.op is None:
            count = {ROW: rows, SHARED: 1, **{d: int(ends[-1]) for d, ends in boundaries.items()}}[value.domain]
            key = value.kind, value.index
            if value.kind == "ptr":
                known[key] = boundaries[value.index]
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


class Memory:
    """A Program's values in one flat array, and each one's reference until a kernel has computed it.

    With ``scattered``, arguments and list elements lie in any order, nothing is aligned, and results have gaps
    between their rows; else values begin at multiples of 16 elements.

    Attributes:
        mem: the flat array; kernels may use what lies from ``top`` on.
        location, stride: of each value, where its first row lies, and the distance of rows.
        index: of each argument or list, where its rows lie.
        arrays: the values, overwritten by what kernels give.
    """

    def __init__(self, program: Program, known: Known, dtype: str, scattered: bool) -> None:
        self.program = program
        self.known = known
        self.scattered = scattered
        self.arrays = references(program, known)
        self.location: dict[int, int] = {}
        self.stride: dict[int, int] = {}
        self.index: dict[int, np.ndarray] = {}
        self.top = 64
        stored = [(v, x, self.arrays[v].shape[0]) for v, x in enumerate(program.values) if x.type and x.domain >= ROW]
        most = sum(count * (x.type.size + 3) + 20 for _, x, count in stored)  # type: ignore[union-attr]
        self.mem = np.full(self.top + most + SCRATCH, GUARD, dtype)
        rng = np.random.default_rng(1)
        for v, value, count in stored:
            size = value.type.size  # type: ignore[union-attr]
            gap = size + 3 if scattered and value.kind not in ("arg", "list") else size
            self.location[v], self.stride[v] = self.top, gap
            if value.op is None:
                order = rng.permutation(count)
                self.index[v] = self.top + order * gap
                for r in range(count):
                    at = self.top + (order[r] if value.kind in ("arg", "list") else r) * gap
                    self.mem[at : at + size] = self.arrays[v][r].ravel()
            self.top += gap * count + 5
            if not scattered:
                self.top = -(-self.top // 16) * 16

    def operands(self, source: Any, boundaries: tuple[int, ...] = ()) -> tuple[list[int], list[np.ndarray]]:
        """What a kernel takes for its operands: integers, ``boundaries`` among them for those of lists, and arrays."""
        integers: list[int] = []
        arrays: list[np.ndarray] = []
        for v, column, kind, _ in source.operands:
            if kind == "boundaries":
                integers += boundaries
            if kind == "affine":
                integers += [self.location[v] + column, self.stride[v]]
            elif kind == "index":
                integers.append(column)
                arrays.append(self.index[v])
            elif kind == "shared":
                arrays.append(np.ascontiguousarray(self.arrays[v]).reshape(-1))
            elif kind == "column":
                arrays.append(np.ascontiguousarray(self.arrays[v][:, 0]))
            else:
                arrays.append(self.arrays[v])
        return integers, arrays

    def results(self, source: Any) -> list[int]:
        """What a kernel takes for its outputs."""
        return [n for v in source.outputs for n in (self.location[v], self.stride[v])]

    def run(self, kernel: Callable[[Memory, Region], Any], stored: tuple[int, ...] = ()) -> int:
        """Compute every value, those of regions by ``kernel``; and say how many instructions were not in a region.

        What is written of a region is what others read, outputs, and ``stored`` values.
        """
        program, arrays = self.program, self.arrays
        alone = 0
        skip = {v for v, x in enumerate(program.values) if x.op is not None and x.domain == SHARED}
        for item in fuse_elementwise(program, skip, (*program.outputs, *stored)):
            if isinstance(item, Region):
                self._read(kernel(self, item))
                continue
            value = program.values[item]
            arrays[item] = value.op.numpy(*[arrays[a] for a in value.args], **dict(value.attrs))  # type: ignore[union-attr]
            if value.type is not None:
                for r, row in enumerate(arrays[item]):
                    self.mem[self.location[item] + r * self.stride[item] :][: row.size] = row.ravel()
            alone += value.op is not shape.reshape
        return alone

    def _read(self, source: Any) -> None:
        """What a kernel has written, and that it has not written in between."""
        for v in source.outputs:
            shaped = self.arrays[v].shape
            size = int(np.prod(shaped[1:]))
            rows = [self.mem[self.location[v] + r * self.stride[v] :][:size].copy() for r in range(shaped[0])]
            if self.scattered:
                for r in range(shaped[0]):
                    assert (self.mem[self.location[v] + r * self.stride[v] + size :][:3] == GUARD).all()
            self.arrays[v] = np.array(rows).reshape(shaped)


def check(
    found: list[np.ndarray], program: Program, known: Known, dtype: str, width: int, stored: tuple[int, ...] = ()
) -> None:
    """Compare a Program's outputs and ``stored`` values with its references."""
    wanted = references(program, known)
    for v in (*program.outputs, *stored):
        scale = max(1.0, float(np.abs(wanted[v][np.isfinite(wanted[v])]).max(initial=0.0)))
        close = TOLERANCE[dtype] * max(4, width)
        name = program.values[v].op
        with np.errstate(all="ignore"):
            np.testing.assert_allclose(found[v], wanted[v], rtol=close, atol=close * scale, err_msg=f"{name} %{v}")


def extreme_inputs(program: Program, width: int = 7) -> Known:
    """Rows in which one extreme value meets ordinary ones, and rows of that value alone."""
    known = random_inputs(program, 2 * len(EXTREME), width)
    for value in program.values:
        if value.op is None and value.kind in ("arg", "fwd", "list"):
            array = known[value.kind, value.index]
            for r, special in enumerate(EXTREME):
                array[2 * r].flat[r % 7] = special
                array[2 * r + 1] = special
    return known


def first_rows(program: Program, known: Known, rows: int) -> Known:
    """The inputs of the first rows alone."""
    counts = {ROW: rows, SHARED: 1} | {key[1]: int(known[key][rows]) for key in known if key[0] == "ptr"}
    few = {}
    for value in program.values:
        if value.op is None:
            key = value.kind, value.index
            count = rows + 1 if value.kind == "ptr" else counts[value.domain]
            few[key] = known[key][:count]
    return few


def check_rows_are_independent(make: Callable[[Family], tuple[int, ...]], width: int, run: Run, few: Run) -> None:
    """A row's results are the same bits beside other rows, by ``run``, and among the first few, by ``few``."""
    b = Family("float32", width)
    program = b.finish(make(b))
    known = random_inputs(program, 5, width)
    everything = run(program, known, "float32")
    some = few(program, first_rows(program, known, 2), "float32")
    for v in program.outputs:
        np.testing.assert_array_equal(some[v], everything[v][: some[v].shape[0]])


def check_draws(dtype: str, run: Run) -> None:
    """Uniform numbers are the reference's to the last bit, so that dropout drops the same elements everywhere."""
    b = Family(dtype, 33)
    program = b.finish((b.emit(random.uniform, b.index, shape=(33,), salt=3, dtype=dtype),))
    known = {("int", 0): np.array([0, 1, -1, 2**62, -(2**63)])}
    found = run(program, known, dtype)
    np.testing.assert_array_equal(found[program.outputs[0]], references(program, known)[program.outputs[0]])


def check_widths_share_a_text(generate: Callable[[Program, Region, str], Any]) -> None:
    """Nothing about the width is in a kernel's source."""
    texts = set()
    for width in (2, 64):
        b = Family("float32", width)
        program = b.finish(normalizations(b))
        (region,) = fuse_elementwise(program, (), program.outputs)
        assert isinstance(region, Region)
        texts.add(generate(program, region, "float32").text)
    assert len(texts) == 1
