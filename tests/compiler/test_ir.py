"""The Builder: common subexpressions, dead code, domains (what is hoisted out of batches), interning."""

from __future__ import annotations

from typing import Any

import pytest
from small_programs import (
    ROWS,
    V,
    arg,
    inputs,
    ops,
    product,
    slot,
)

from dynbatch.compiler.fuse_elementwise import fuse_elementwise
from dynbatch.compiler.ir import ROW, SHARED, Builder, Program
from dynbatch.errors import ShapeError
from dynbatch.ops import elementwise as ew
from dynbatch.ops.linear import matmul
from dynbatch.ops.segment import expand, segment_sum
from dynbatch.ops.shape import reshape
from dynbatch.types import type_of


def test_equal_instructions_become_one() -> None:
    b = Builder()
    x = arg(b)
    assert arg(b) == x and arg(b, 1) != x
    once = b.emit(ew.tanh, x)
    assert b.emit(ew.tanh, x) == once
    assert b.emit(ew.scale_gradient, once, x) != b.emit(ew.scale_gradient, x, once)
    assert b.emit(reshape, x, shape=(3, 1)) == b.emit(reshape, x, shape=(3, 1)) != b.emit(reshape, x, shape=(1, 3))
    assert ops(b.finish((b.emit(ew.add, once, b.emit(ew.tanh, x)),))) == ["tanh", "add"]


def test_unused_values_are_dropped_and_the_rest_renumbered() -> None:
    b = Builder()
    unused, x = arg(b, 0), arg(b, 1)
    b.emit(ew.exp, unused)
    y = b.emit(ew.tanh, x)
    b.emit(ew.cmult, y, unused)
    program = b.finish((y,), name="one", layout=(2, 0, 0, 0, 0))
    assert [v.kind for v in program.values] == ["arg", "op"]
    assert program.values[0].index == 1 and program.values[1].args == (0,) and program.outputs == (1,)


def test_programs_are_interned_by_structure() -> None:
    def make(op: Any, name: str = "same", extra: bool = False) -> Program:
        b = Builder()
        x = arg(b)
        if extra:
            b.emit(ew.exp, x)
        return b.finish((b.emit(op, x),), name=name, layout=(1, 0, 0, 0, 0))

    assert make(ew.tanh) is make(ew.tanh, extra=True)
    assert make(ew.tanh) is not make(ew.exp)
    assert make(ew.tanh) is not make(ew.tanh, name="other")
    assert "tanh" in repr(make(ew.tanh)) and "float64[3]" in repr(make(ew.tanh))


def test_domains_are_joined_and_rows_expanded() -> None:
    b = Builder()
    w, x, c = slot(b, 0, V), arg(b), b.input("list", 0, V, 1)
    assert b.values[b.emit(ew.add, w, w)].domain == SHARED
    assert b.values[b.emit(ew.add, w, x)].domain == ROW
    both = b.emit(ew.cmult, x, c)
    assert b.values[both].domain == 1
    assert b.values[b.values[both].args[0]].op is expand
    assert b.values[b.emit(ew.cmult, w, c)].args == (w, c)
    assert b.values[b.emit(segment_sum, both, b.ptr(1))].domain == ROW


def test_lists_that_are_combined_share_a_domain() -> None:
    b = Builder()
    first, second, other = (b.input("list", k, V, k + 1) for k in range(3))
    early = b.emit(ew.tanh, second)
    joined = b.emit(ew.add, first, second)
    domains = [b.values[v].domain for v in (joined, early, other)]
    assert domains == [1, 1, 3]
    total = b.emit(ew.add, b.emit(segment_sum, joined, b.ptr(1)), b.emit(segment_sum, early, b.ptr(1)))
    program = b.finish((b.emit(ew.add, total, b.emit(segment_sum, other, b.ptr(3))),), layout=(0, 3, 0, 0, 0))
    assert program.groups == {0: 1, 1: 1, 2: 3}
    known = inputs(program)
    assert known["ptr", 1].size == ROWS + 1 and ("ptr", 2) not in known


def test_shapes_are_checked_where_they_are_made() -> None:
    b = Builder()
    with pytest.raises(ShapeError, match="broadcast"):
        b.emit(ew.add, arg(b), arg(b, 1, type_of(2, "float64")))
    with pytest.raises(ShapeError, match="matrix product"):
        b.emit(matmul, arg(b), arg(b), vector=True)


def test_what_depends_on_parameters_alone_is_shared() -> None:
    """It is computed once for each version of the parameters, and not by a batch: nothing that a row needs is in it."""
    b = Builder()
    w, x = slot(b), arg(b)
    scaled = b.emit(ew.cmult, b.emit(ew.tanh, w), b.emit(ew.exp, slot(b, 1, V)))
    outside = b.emit(ew.stop_gradient, product(b, scaled, x))
    program = b.finish((outside,), layout=(1, 0, 0, 0, 2))
    domains = {v.op.name: v.domain for v in program.values if v.op}  # type: ignore[union-attr]
    assert domains == {"tanh": SHARED, "exp": SHARED, "cmult": SHARED, "matmul": ROW, "nobackprop": ROW}
    assert not any(isinstance(item, int) and program.values[item].domain == SHARED
                   for item in fuse_elementwise(program, [v for v in program.instructions
                                                          if program.values[v].domain == SHARED], ()))  # fmt: skip
