"""Vertical fusion: what runs in one kernel, and that everything runs after what it reads."""

from __future__ import annotations

from hypothesis import given
from small_programs import (
    M,
    V,
    arg,
    product,
    programs,
    slot,
)

from dynbatch.compiler.fuse_elementwise import Region, fuse_elementwise
from dynbatch.compiler.fuse_matmul import fuse_matmul
from dynbatch.compiler.ir import SHARED, Builder, Program
from dynbatch.compiler.lower import join, kernel_extents
from dynbatch.ops import elementwise as ew
from dynbatch.ops.linear import matmul
from dynbatch.ops.reduction import sum_to
from dynbatch.types import type_of


def check_schedule(program: Program, skip: set[int], stored: set[int]) -> list[Region | int]:
    """Everything runs once, after what it reads; a region says which of its values others read."""
    schedule = fuse_elementwise(program, skip, stored)
    position: dict[int, int] = {}
    for k, item in enumerate(schedule):
        for v in item.members if isinstance(item, Region) else [item]:
            assert v not in position
            position[v] = k
    assert set(position) == set(program.instructions) - skip
    for v, k in position.items():
        for a in program.values[v].args:
            if a in position:
                item = schedule[position[a]]
                assert position[a] < k or (position[a] == k and isinstance(item, Region) and a < v)
                if position[a] < k and isinstance(item, Region):
                    assert a in item.outside
    for item in schedule:
        if isinstance(item, Region):
            assert item.outside <= set(item.members) and item.outside >= stored & set(item.members)
            assert {program.values[v].domain for v in item.members} == {item.domain}
            extents = [kernel_extents(program, v) for v in item.members]
            assert None not in extents and join(*extents) == item.extents  # type: ignore[arg-type]
    return schedule


def test_a_chain_is_one_region() -> None:
    b = Builder()
    x, y = arg(b), arg(b, 1)
    z = b.emit(ew.tanh, b.emit(ew.add, b.emit(ew.cmult, x, y), b.emit(ew.logistic, x)))
    program = b.finish((z,))
    schedule = check_schedule(program, set(), {program.outputs[0]})
    assert len(schedule) == 1
    assert schedule[0].outside == {program.outputs[0]}  # type: ignore[union-attr]


def test_a_product_cuts_a_chain() -> None:
    b = Builder()
    a = b.emit(ew.tanh, arg(b))
    p = product(b, slot(b), a)
    program = b.finish((b.emit(ew.exp, b.emit(ew.add, p, a)),))
    schedule = check_schedule(program, set(), {program.outputs[0]})
    kinds = [item.members if isinstance(item, Region) else item for item in schedule]
    assert len(kinds) == 3 and not isinstance(kinds[1], list)
    assert program.values[kinds[1]].op is matmul  # type: ignore[index]


def test_a_number_a_row_runs_with_what_it_is_made_of() -> None:
    b = Builder()
    x = arg(b)
    norm = b.emit(sum_to, b.emit(ew.square, x), shape=(1,))
    scaled = b.emit(ew.cmult, x, b.emit(ew.sqrt, b.emit(ew.add, norm, slot(b, 0, type_of(1, "float64")))))
    matrix = b.emit(ew.add, arg(b, 1, M), scaled)  # a vector is added to each column
    program = b.finish((b.emit(ew.tanh, matrix), b.emit(ew.tanh, scaled)))
    (region,) = check_schedule(program, set(), set(program.outputs))
    assert isinstance(region, Region) and region.extents == (3, 3)


def test_other_widths_run_in_regions_of_their_own() -> None:
    b = Builder()
    two, three = b.emit(ew.tanh, arg(b, 0, type_of(2, "float64"))), b.emit(ew.tanh, arg(b, 1))
    total = b.emit(ew.add, *(b.emit(sum_to, v, shape=(1,)) for v in (two, three)))
    program = b.finish((total, two, three))
    schedule = check_schedule(program, set(), set(program.outputs))
    assert sorted(item.extents for item in schedule) == [(2, 1), (3, 1)]  # type: ignore[union-attr]


def test_what_the_batch_shares_is_skipped() -> None:
    b = Builder()
    w = b.emit(ew.tanh, slot(b, 0, V))
    program = b.finish((b.emit(ew.add, w, arg(b)),))
    shared = {v for v in program.instructions if program.values[v].domain == SHARED}
    assert len(shared) == 1
    assert len(check_schedule(program, shared, set(program.outputs))) == 1


@given(program=programs())
def test_schedules_of_random_programs(program: Program) -> None:
    after = fuse_matmul(program)
    skip = {v for v in after.instructions if after.values[v].domain == SHARED}
    check_schedule(after, skip, set(after.outputs))
