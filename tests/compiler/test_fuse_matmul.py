"""Horizontal fusion: products over the same inputs become one."""

from __future__ import annotations

from hypothesis import given
from small_programs import (
    M,
    N,
    V,
    arg,
    check_same,
    gates,
    ops,
    product,
    programs,
    slot,
)

from dynbatch.compiler.fuse_matmul import fuse_matmul
from dynbatch.compiler.ir import SHARED, Builder, Program
from dynbatch.ops import elementwise as ew
from dynbatch.ops.linear import matmul
from dynbatch.ops.segment import segment_sum


def test_gates_become_one_product() -> None:
    b = Builder()
    found, _, _ = gates(b)
    before = b.finish(tuple(b.emit(ew.tanh, g) for g in found), layout=(2, 0, 0, 0, 12))
    after = fuse_matmul(before)
    assert ops(before).count("matmul") == 8 and ops(after).count("matmul") == 1
    check_same(before, after)
    stack = next(after.values[v] for v in after.instructions if after.values[v].op is matmul)
    assert after.values[stack.args[0]].domain == SHARED  # the stacking runs once a parameter version
    assert after.values[stack.args[0]].type.shape == (12, 6)  # type: ignore[union-attr]


def test_a_gate_may_read_what_another_gave() -> None:
    """The candidate of a GRU reads the reset gate; its product with the input still joins the others."""
    b = Builder()
    (reset, update), x, h = gates(b, 2)
    candidate = b.emit(ew.add, product(b, slot(b, 6), x), product(b, slot(b, 7), b.emit(ew.cmult, reset, h)))
    both = b.emit(ew.add, b.emit(ew.tanh, candidate), b.emit(ew.cmult, update, h))
    before = b.finish((both,), layout=(2, 0, 0, 0, 8))
    after = fuse_matmul(before)
    assert ops(after).count("matmul") == 2 < ops(before).count("matmul")
    check_same(before, after)


def test_one_sum_of_products_becomes_one_product() -> None:
    b = Builder()
    x, h = arg(b), arg(b, 1)
    total = b.emit(ew.add, product(b, slot(b), x), product(b, slot(b), h))  # one parameter, used twice
    before = b.finish((total,), layout=(2, 0, 0, 0, 1))
    after = fuse_matmul(before)
    assert ops(after) == ["concatenate", "concatenate", "matmul"]
    check_same(before, after)


def test_nothing_to_stack_is_left_alone() -> None:
    b = Builder()
    x = arg(b)
    lone = b.finish((b.emit(ew.add, product(b, slot(b), x), slot(b, 1, V)),))
    assert fuse_matmul(lone) is lone
    b = Builder()
    per_row = b.finish((b.emit(ew.add, product(b, arg(b, 0, M), arg(b, 1)), product(b, arg(b, 2, M), arg(b, 1))),))
    assert fuse_matmul(per_row) is per_row
    b = Builder()
    twice = b.finish((b.emit(ew.add, product(b, slot(b), arg(b)), product(b, slot(b, 1), arg(b))),))
    check_same(twice, fuse_matmul(twice))


def test_a_product_that_something_else_reads_stays() -> None:
    b = Builder()
    x, h = arg(b), arg(b, 1)
    wx, uh = product(b, slot(b), x), product(b, slot(b, 1), h)
    before = b.finish((b.emit(ew.add, wx, uh), b.emit(ew.tanh, wx)), layout=(2, 0, 0, 0, 2))
    check_same(before, fuse_matmul(before))


def test_products_of_different_heights_and_of_list_elements() -> None:
    b = Builder()
    x, c = arg(b), b.input("list", 0, V, 1)
    narrow, wide = product(b, slot(b, 0, N), x), product(b, slot(b, 1), x)
    element = b.emit(ew.add, product(b, slot(b, 2), c), product(b, slot(b, 3), b.emit(ew.tanh, c)))
    other = product(b, slot(b, 4), c)
    total = b.emit(segment_sum, b.emit(ew.cmult, element, other), b.ptr(1))
    before = b.finish((narrow, wide, total), layout=(1, 1, 0, 0, 5))
    after = fuse_matmul(before)
    assert ops(after).count("matmul") < ops(before).count("matmul")
    check_same(before, after)


def test_fusing_twice_changes_nothing() -> None:
    b = Builder()
    found, _, _ = gates(b)
    once = fuse_matmul(b.finish(tuple(found), layout=(2, 0, 0, 0, 12)))
    assert fuse_matmul(once) is once


@given(program=programs())
def test_random_programs_compute_the_same(program: Program) -> None:
    check_same(program, fuse_matmul(program))
