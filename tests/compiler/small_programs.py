"""Small Programs made by hand or at random, and what they compute by their ops' NumPy references."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from dynbatch.compiler.ir import ROW, SHARED, Builder, Program
from dynbatch.ops import elementwise as ew
from dynbatch.ops.linear import matmul
from dynbatch.ops.reduction import sum_to
from dynbatch.ops.segment import segment_sum
from dynbatch.ops.shape import concatenate, pick_range
from dynbatch.ops.softmax import softmax
from dynbatch.types import type_of

ROWS = 4
LENGTHS = [2, 1, 3, 1]
V, M = type_of(3, "float64"), type_of((3, 3), "float64")
N = type_of((2, 3), "float64")

Values = dict[tuple[str, int], np.ndarray]


def arg(b: Builder, index: int = 0, type: Any = V) -> int:
    return b.input("arg", index, type, ROW)


def slot(b: Builder, index: int = 0, type: Any = M) -> int:
    return b.input("slot", index, type, SHARED)


def product(b: Builder, w: int, x: int) -> int:
    return b.emit(matmul, w, x, vector=True)


def ops(program: Program) -> list[str]:
    """Names of the instructions, in order."""
    return [program.values[v].op.name for v in program.instructions]  # type: ignore[union-attr]


def inputs(*programs: Program, seed: int = 0) -> Values:
    """Random values of every input."""
    rng = np.random.default_rng(seed)
    pointers = {d: np.concatenate(([0], np.cumsum(np.roll(LENGTHS, d - 1) + d - 1))) for d in range(1, 4)}
    found: Values = {}
    for program in programs:
        for value in program.values:
            key = value.kind, value.index
            if value.op is not None or key in found or value.kind == "fwd":
                continue
            count = {ROW: ROWS, SHARED: 1, **{d: int(ends[-1]) for d, ends in pointers.items()}}[value.domain]
            if value.kind == "ptr":
                found[key] = pointers[value.index]
            elif value.kind == "int":
                found[key] = rng.integers(0, 2, ROWS)
            else:
                found[key] = rng.normal(size=(count, *value.type.storage))  # type: ignore[union-attr]
    return found


def evaluate(program: Program, known: Values, forward: list[np.ndarray] | None = None) -> list[Any]:
    """Every value of a Program by its ops' NumPy references."""
    arrays: list[Any] = []
    for value in program.values:
        if value.op is not None:
            arrays.append(value.op.numpy(*[arrays[a] for a in value.args], **dict(value.attrs)))
        elif value.kind == "fwd":
            assert forward is not None
            arrays.append(forward[value.index])
        else:
            arrays.append(known[value.kind, value.index])
    return arrays


def outputs(program: Program, known: Values) -> list[np.ndarray]:
    arrays = evaluate(program, known)
    return [arrays[v] for v in program.outputs]


def check_same(before: Program, after: Program) -> None:
    assert after.layout == before.layout and after.name == before.name
    known = inputs(before)
    for a, b in zip(outputs(before, known), outputs(after, known)):
        np.testing.assert_allclose(b, a, rtol=1e-12)


def gates(b: Builder, count: int = 4) -> tuple[list[int], int, int]:
    """``bias + W x + U h`` for several gates."""
    x, h = arg(b), arg(b, 1)
    found = []
    for k in range(count):
        w, u, bias = slot(b, 3 * k), slot(b, 3 * k + 1), slot(b, 3 * k + 2, V)
        found.append(b.emit(ew.add, b.emit(ew.add, bias, product(b, w, x)), product(b, u, h)))
    return found, x, h


CHOICES = ["tanh", "add", "cmult", "scalar", "product", "softmax", "slice", "element", "reduce", "shared"]


@st.composite
def programs(draw: Any) -> Program:
    """Straight-line Programs over vectors, scalars, list elements and shared values."""
    b = Builder()
    rows = [arg(b), arg(b, 1)]
    scalars = [arg(b, 2, type_of(1, "float64"))]
    lists = [[b.input("list", k, V, k + 1)] for k in range(2)]
    for _ in range(draw(st.integers(1, 14))):
        name = draw(st.sampled_from(CHOICES))
        i, j = draw(st.integers(0, 9)), draw(st.integers(0, 9))
        x, y = rows[-1 - i % len(rows)], rows[-1 - j % len(rows)]
        if name == "tanh":
            rows.append(b.emit(ew.tanh, x))
        elif name in ("add", "cmult"):
            rows.append(b.emit(getattr(ew, name), x, y))
        elif name == "scalar":
            scalars.append(b.emit(ew.tanh, b.emit(ew.add, scalars[-1], b.emit(sum_to, x, shape=(1,)))))
            rows.append(b.emit(ew.cmult, y, scalars[-1]))
        elif name == "product":
            rows.append(b.emit(ew.add, product(b, slot(b, i % 3), x), product(b, slot(b, j % 3), y)))
        elif name == "softmax":
            rows.append(b.emit(softmax, x, dim=0))
        elif name == "slice":
            both = b.emit(concatenate, x, y, dim=0)
            rows.append(b.emit(pick_range, both, start=i % 4, stop=i % 4 + 3, dim=0))
        elif name == "element":
            elements = lists[j % 2]
            elements.append(b.emit(ew.logistic, b.emit(ew.add, elements[-1 - i % len(elements)], y)))
        elif name == "reduce":
            elements = lists[j % 2]
            rows.append(b.emit(segment_sum, elements[-1 - i % len(elements)], b.ptr(1 + j % 2)))
        else:
            rows.append(b.emit(ew.add, x, b.emit(ew.tanh, slot(b, 4, V))))
    ends = [rows[-1 - draw(st.integers(0, 5)) % len(rows)] for _ in range(draw(st.integers(1, 3)))]
    return b.finish(tuple(ends), name="random", layout=(3, 2, 0, 0, 5))
