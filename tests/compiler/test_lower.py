"""Lowering: composite ops in building blocks, against their own references, and the extents of their loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from small_programs import M, N, V, arg, evaluate, inputs

from dynbatch.compiler.ir import ROW, Builder, Program
from dynbatch.compiler.lower import NoLowering, join, kernel_extents, lower
from dynbatch.ops import elementwise as ew
from dynbatch.ops import indexing, normalization, reduction, segment, shape, softmax
from dynbatch.ops.linear import matmul
from dynbatch.ops.primitive import Primitive
from dynbatch.types import type_of

INT = None
CASES: list[tuple[Primitive, tuple[Any, ...], dict[str, Any]]] = [
    *[(op, (t,), {"dim": d}) for op in (softmax.softmax, softmax.log_softmax) for t, d in ((V, 0), (N, 0), (N, 1))],
    *[(softmax.softmax_gradient, (t, t), {"dim": d}) for t, d in ((V, 0), (N, 1))],
    *[(softmax.log_softmax_gradient, (t, t), {"dim": d}) for t, d in ((V, 0), (N, 1))],
    (softmax.pick_neg_log_softmax, (V, INT), {}),
    (softmax.softmax_minus_one_hot, (V, INT), {}),
    (normalization.normalize, (N,), {"eps": 1e-12}),
    (normalization.normalize_gradient, (N, N, N), {"eps": 1e-12}),
    (reduction.max_dim, (V,), {"dim": 0}),
    (reduction.max_dim, (N,), {"dim": 0}),
    (reduction.max_dim, (N,), {"dim": 1}),
    *[(reduction.one_hot_argmax, (t,), {"dim": d}) for t, d in ((V, 0), (N, 0), (N, 1))],
    (indexing.pick, (V, INT), {"dim": 0}),
    (indexing.select_gradient, (type_of(1, "float64"), INT), {"size": 3, "dim": 0}),
    (indexing.select_gradient, (type_of((2, 1), "float64"), INT), {"size": 3, "dim": 1}),
    (ew.scale_gradient, (V, type_of(1, "float64")), {}),
]  # fmt: skip


def alone(op: Primitive, types: tuple[Any, ...], attrs: dict[str, Any]) -> Program:
    b = Builder()
    args = [b.input("int" if t is INT else "arg", k, t, ROW) for k, t in enumerate(types)]
    return b.finish((b.emit(op, *args, **attrs),))


@pytest.mark.parametrize("op, types, attrs", CASES)
def test_blocks_compute_what_the_reference_does(op: Primitive, types: tuple[Any, ...], attrs: dict[str, Any]) -> None:
    program = alone(op, types, attrs)
    known = inputs(program)
    body = lower(program, program.outputs)
    assert all(x.op is None or x.op.is_block for x in body.values)
    arrays: list[Any] = []
    for i, x in enumerate(body.values):
        if x.op is None:
            outer = program.values[body.outer[i]]
            arrays.append(known[outer.kind, outer.index])
        else:
            arrays.append(x.op.numpy(*[arrays[a] for a in x.args], **dict(x.attrs)))
    wanted = evaluate(program, known)[program.outputs[0]]
    np.testing.assert_allclose(
        arrays[body.inner[program.outputs[0]]].reshape(wanted.shape), wanted, rtol=1e-12, atol=1e-14
    )


def test_members_share_what_they_have_in_common() -> None:
    b = Builder()
    x = arg(b)
    both = b.emit(softmax.softmax, x, dim=0), b.emit(softmax.log_softmax, x, dim=0)
    program = b.finish(both)
    names = [v.op.name for v in lower(program, program.instructions).values if v.op]
    assert names.count("exp") == 1 and names.count("max_to") == 1


def test_what_has_no_form_for_kernels() -> None:
    b = Builder()
    x, m, big = arg(b), arg(b, 1, M), arg(b, 2, type_of((2, 3, 2), "float64"))
    values = (
        b.emit(matmul, m, x, vector=True),
        b.emit(indexing.select, x, b.input("int", 0, None, ROW), dim=0),
        b.emit(softmax.softmax, big, dim=0),  # its sums have a shape of which no loop over columns knows
        b.emit(shape.concatenate, x, x, dim=0),
    )
    program = b.finish(values)
    assert [kernel_extents(program, v) for v in program.outputs] == [None] * 4
    with pytest.raises(NoLowering, match="matmul"):
        lower(program, [program.outputs[0]])


def test_extents() -> None:
    b = Builder()
    x, m, n, one = arg(b), arg(b, 1, M), arg(b, 2, N), arg(b, 3, type_of(1, "float64"))
    big = arg(b, 4, type_of((2, 3, 2), "float64"))
    values = (
        b.emit(ew.add, x, one),
        b.emit(ew.add, m, x),
        b.emit(reduction.sum_to, n, shape=(1,)),
        b.emit(ew.tanh, big),
        b.emit(ew.tanh, one),
        b.emit(segment.segment_sum, b.input("list", 0, V, 1), b.ptr(1)),
    )
    program = b.finish(values)
    found = [kernel_extents(program, v) for v in program.outputs]
    assert found == [(3, 1), (3, 3), (2, 3), (12, 1), (1, 1), (3, 1)]
    assert join((3, 1), (1, 1)) == (3, 1) and join((3, 1), (3, 5)) == (3, 5) and join((1, 5), (3, 1)) == (3, 5)
    assert join((3, 1), (2, 1)) is None
