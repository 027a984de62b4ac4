"""Keep or recompute: what is chosen for Programs whose answer is plain, and that it suffices for the gradient."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from small_programs import M, V, arg, product, programs, slot

from dynbatch.compiler.fuse_matmul import fuse_matmul
from dynbatch.compiler.gradient import gradient, read_by_gradient
from dynbatch.compiler.ir import ROW, Builder, Program
from dynbatch.compiler.keep import arithmetic_cost, choose_kept, is_keepable
from dynbatch.ops import elementwise as ew
from dynbatch.ops import random
from dynbatch.ops.indexing import pick
from dynbatch.ops.normalization import normalize
from dynbatch.ops.segment import segment_sum
from dynbatch.ops.shape import concatenate, reshape
from dynbatch.types import type_of


def kept(b: Builder, *outputs: int, layout: tuple[int, int, int, int, int]) -> list[str]:
    """Names of what is kept of a Program with these outputs."""
    program = b.finish(outputs, layout=layout)
    chosen = choose_kept(program, read_by_gradient(program))
    return sorted(program.values[v].op.name for v in chosen)  # type: ignore[union-attr]


def test_functions_are_kept_and_arithmetic_is_done_again() -> None:
    b = Builder()
    x, y = product(b, slot(b), arg(b)), arg(b, 1)
    gate = b.emit(ew.logistic, x)  # its gradient reads it
    mixed = b.emit(ew.cmult, b.emit(ew.subtract, y, gate), b.emit(ew.add, gate, y))  # so does that of both factors
    assert kept(b, b.emit(ew.tanh, mixed), layout=(2, 0, 0, 0, 1)) == ["logistic"]


def test_the_memory_of_a_tree_node_is_an_output_and_its_tanh_is_kept() -> None:
    b = Builder()
    c = b.emit(ew.add, product(b, slot(b), arg(b)), arg(b, 1))
    h = b.emit(ew.cmult, arg(b, 2), b.emit(ew.tanh, c))
    assert kept(b, h, c, layout=(3, 0, 0, 0, 1)) == ["tanh"]


def test_a_product_is_never_done_again() -> None:
    b = Builder()
    z = b.emit(ew.add, product(b, slot(b), arg(b)), slot(b, 1, V))
    out = b.emit(ew.square, z)  # its gradient reads the sum; the product is in memory already, and the rest is cheap
    assert kept(b, out, layout=(1, 0, 0, 0, 2)) == ["matmul"]


def test_the_operand_of_a_product_is_kept_instead_of_gathered_again() -> None:
    b = Builder()
    both = b.emit(concatenate, arg(b), arg(b, 1), dim=0)
    out = b.emit(ew.tanh, b.emit(ew.cmult, product(b, slot(b, 0, type_of((3, 6), "float64")), both), arg(b, 2)))
    assert "concatenate" in kept(b, out, layout=(3, 0, 0, 0, 1))


def test_random_numbers_are_drawn_again() -> None:
    b = Builder()
    key = b.input("int", 0, None, ROW)
    mask = b.emit(
        ew.less,
        b.emit(random.uniform, key, shape=(3,), salt=1, dtype="float64"),
        b.input("float", 0, type_of(1, "float64"), ROW),
    )
    out = b.emit(ew.tanh, b.emit(ew.cmult, arg(b), mask))
    assert kept(b, out, layout=(1, 0, 1, 1, 0)) == []


def test_what_elements_of_a_list_give_cannot_be_kept() -> None:
    b = Builder()
    element = b.emit(ew.tanh, b.input("list", 0, V, 1))
    total = b.emit(segment_sum, b.emit(ew.cmult, element, element), b.ptr(1))
    program = b.finish((total,), layout=(0, 1, 0, 0, 0))
    assert choose_kept(program, read_by_gradient(program)) == frozenset()
    assert not any(is_keepable(program, v) for v in range(len(program.values)) if program.values[v].domain > ROW)


def test_views_and_integers_cannot_be_kept() -> None:
    b = Builder()
    row = b.emit(reshape, b.emit(ew.tanh, arg(b)), shape=(1, 3))
    program = b.finish((b.emit(ew.exp, row),), layout=(1, 0, 0, 0, 0))
    assert [v.op.name for i, v in enumerate(program.values) if is_keepable(program, i)] == ["tanh", "exp"]  # type: ignore[union-attr]


def test_nothing_is_kept_that_is_not_read() -> None:
    b = Builder()
    out = b.emit(ew.add, b.emit(ew.exp, arg(b)), b.emit(ew.negate, arg(b, 1)))
    program = b.finish((out,), layout=(2, 0, 0, 0, 0))
    assert choose_kept(program, ()) == frozenset()


def test_costs_count_blocks_and_their_sizes() -> None:
    b = Builder()
    x, m = arg(b), arg(b, 1, M)
    values = [b.emit(op, x) for op in (ew.negate, ew.tanh)]
    values += [b.emit(normalize, x, eps=1e-12), b.emit(ew.negate, m)]
    values.append(b.emit(pick, m, b.input("int", 0, None, ROW), dim=0))
    program = b.finish(tuple(values), layout=(2, 0, 0, 0, 0))
    cheap, function, composite, matrix, reference = (arithmetic_cost(program, v) for v in program.outputs)
    assert matrix == pytest.approx(3 * cheap)
    assert cheap < composite < function < reference


@given(program=programs())
def test_random_programs_have_all_that_their_gradients_read(program: Program) -> None:
    """Recomputing never runs a product, and never reads what was not kept."""
    stacked = fuse_matmul(program)
    read = read_by_gradient(stacked)
    chosen = choose_kept(stacked, read)
    assert all(is_keepable(stacked, v) for v in chosen)
    args, lists, _, _, slots = stacked.layout
    wanted: Any = ((True,) * args, (True,) * slots, (True,) * lists)
    found = gradient(stacked, *wanted, chosen)
    everything = gradient(stacked, *wanted, [v for v in range(len(stacked.values)) if is_keepable(stacked, v)])
    known = {v.index for v in found.values if v.kind == "fwd" and v.domain == ROW}
    assert known <= chosen | set(stacked.outputs)
    assert chosen <= known  # or it would be kept for nothing
    assert [p.op.name for p in found.values if p.op].count("matmul") == [  # type: ignore[union-attr]
        p.op.name
        for p in everything.values
        if p.op  # type: ignore[union-attr]
    ].count("matmul")
