"""The Builder and the passes, on small Programs made by hand: what they give, and that it computes the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbatch.compiler.fuse_elementwise import Region, fuse_elementwise
from dynbatch.compiler.fuse_matmul import fuse_matmul
from dynbatch.compiler.gradient import gradient
from dynbatch.compiler.ir import ROW, SHARED, Builder, Program
from dynbatch.compiler.lower import join, kernel_extents
from dynbatch.errors import ShapeError
from dynbatch.ops import elementwise as ew
from dynbatch.ops.linear import matmul, matmul_rows
from dynbatch.ops.reduction import sum_rows, sum_to
from dynbatch.ops.segment import expand, segment_sum
from dynbatch.ops.shape import concatenate, pick_range, reshape
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
    pointers = np.concatenate(([0], np.cumsum(LENGTHS)))
    found: Values = {}
    for program in programs:
        for value in program.values:
            key = value.kind, value.index
            if value.op is not None or key in found or value.kind == "fwd":
                continue
            count = {ROW: ROWS, SHARED: 1}.get(value.domain, int(pointers[-1]))
            if value.kind == "ptr":
                found[key] = pointers
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


# ---- the builder -----------------------------------------------------------------------------------------------------


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


# ---- products over the same inputs -----------------------------------------------------------------------------------


def gates(b: Builder, count: int = 4) -> tuple[list[int], int, int]:
    """``bias + W x + U h`` for several gates."""
    x, h = arg(b), arg(b, 1)
    found = []
    for k in range(count):
        w, u, bias = slot(b, 3 * k), slot(b, 3 * k + 1), slot(b, 3 * k + 2, V)
        found.append(b.emit(ew.add, b.emit(ew.add, bias, product(b, w, x)), product(b, u, h)))
    return found, x, h


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


# ---- elementwise regions ---------------------------------------------------------------------------------------------


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


CHOICES = ["tanh", "add", "cmult", "scalar", "product", "softmax", "slice", "element", "reduce", "shared"]


@st.composite
def programs(draw: Any) -> Program:
    """Straight-line Programs over vectors, scalars, list elements and shared values."""
    b = Builder()
    rows = [arg(b), arg(b, 1)]
    scalars = [arg(b, 2, type_of(1, "float64"))]
    elements = [b.input("list", 0, V, 1)]
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
            elements.append(b.emit(ew.logistic, b.emit(ew.add, elements[-1 - i % len(elements)], y)))
        elif name == "reduce":
            rows.append(b.emit(segment_sum, elements[-1 - i % len(elements)], b.ptr(1)))
        else:
            rows.append(b.emit(ew.add, x, b.emit(ew.tanh, slot(b, 4, V))))
    ends = [rows[-1 - draw(st.integers(0, 5)) % len(rows)] for _ in range(draw(st.integers(1, 3)))]
    return b.finish(tuple(ends), name="random", layout=(3, 1, 0, 0, 5))


@given(program=programs())
def test_passes_keep_what_a_program_computes(program: Program) -> None:
    after = fuse_matmul(program)
    check_same(program, after)
    skip = {v for v in after.instructions if after.values[v].domain == SHARED}
    check_schedule(after, skip, set(after.outputs))


# ---- gradients -------------------------------------------------------------------------------------------------------


def check_gradient(program: Program, recompute: bool) -> Program:
    """The gradient Program against central differences of a weighted sum of the outputs."""
    args, lists, _, _, slots = program.layout
    found = gradient(program, (True,) * args, (True,) * slots, (True,) * lists, recompute)
    known = inputs(program, found)
    forward = evaluate(program, known)
    weights = [known.get(("dout", index)) for index in range(len(program.outputs))]
    for index, v in enumerate(program.outputs):
        if weights[index] is None:
            weights[index] = np.zeros(np.broadcast_shapes(forward[v].shape, (ROWS, *[1] * (forward[v].ndim - 1))))

    def loss() -> float:
        arrays = evaluate(program, known)
        return sum(float((arrays[v] * w).sum()) for v, w in zip(program.outputs, weights))

    kept = [None if recompute and x.domain == ROW and v not in program.outputs else array
            for v, (x, array) in enumerate(zip(program.values, forward))]  # fmt: skip
    arrays = evaluate(found, known, kept)  # type: ignore[arg-type]
    for role, index, v in found.results:
        x = known[role, index]
        numeric = np.zeros_like(x)
        for at in np.ndindex(x.shape):
            kept_value, ends = x[at], []
            for step in (1e-5, -1e-5):
                x[at] = kept_value + step
                ends.append(loss())
            x[at] = kept_value
            numeric[at] = (ends[0] - ends[1]) / 2e-5
        np.testing.assert_allclose(arrays[v], numeric, rtol=1e-5, atol=1e-7, err_msg=f"{role} {index}")
    return found


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_of_gates(recompute: bool) -> None:
    b = Builder()
    found, x, h = gates(b, 2)
    c = b.emit(ew.cmult, b.emit(ew.logistic, found[0]), b.emit(ew.tanh, found[1]))
    program = b.finish((b.emit(ew.tanh, c), c, b.emit(ew.add, x, h)), layout=(2, 0, 0, 0, 6))
    for version in (program, fuse_matmul(program)):
        result = check_gradient(version, recompute)
        assert {(role, index) for role, index, _ in result.results} == {
            *[("arg", k) for k in range(2)], *[("slot", k) for k in range(6)]
        }  # fmt: skip
        read = {v.index for v in result.values if v.kind == "fwd" and v.domain == ROW}
        assert (read <= set(version.outputs)) if recompute else read


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_of_lists_and_shared_values(recompute: bool) -> None:
    b = Builder()
    x, c, w = arg(b), b.input("list", 0, V, 1), b.emit(ew.tanh, slot(b))
    element = b.emit(ew.logistic, b.emit(ew.add, product(b, w, c), x))
    total = b.emit(segment_sum, b.emit(ew.cmult, element, c), b.ptr(1))
    program = b.finish((b.emit(ew.cmult, total, product(b, slot(b, 1), x)),), layout=(1, 1, 0, 0, 2))
    result = check_gradient(program, recompute)
    assert not any(v.kind == "fwd" and v.domain > ROW for v in result.values)  # elements are computed again


def test_only_what_is_wanted_is_computed() -> None:
    b = Builder()
    found, _, _ = gates(b, 2)
    program = b.finish(
        (b.emit(ew.cmult, b.emit(ew.tanh, found[0]), b.emit(ew.tanh, found[1])),), layout=(2, 0, 0, 0, 6)
    )
    nothing = gradient(program, (False, False), (False,) * 6, ())
    assert nothing.values == () and nothing.results == ()
    one = gradient(program, (False, False), (False, False, True, False, False, False), ())
    assert [r[:2] for r in one.results] == [("slot", 2)]
    assert not {"matmul", "matmul_rows"} & set(ops(one)) and ops(one).count("sum_rows") == 1
    inner = gradient(program, (True, False), (False,) * 6, ())
    assert not any(op.reduces == "rows" for op in (inner.values[v].op for v in inner.instructions) if op)


def test_a_weights_gradient_is_one_product_over_all_rows() -> None:
    b = Builder()
    program = b.finish((b.emit(ew.tanh, product(b, slot(b), arg(b))),), layout=(1, 0, 0, 0, 1))
    result = gradient(program, (True,), (True,), ())
    made = {role: result.values[v].op for role, _, v in result.results}
    assert made == {"arg": matmul, "slot": matmul_rows}
    bias = Builder()
    added = bias.finish((bias.emit(ew.add, arg(bias), slot(bias, 0, V)),), layout=(1, 0, 0, 0, 1))
    result = gradient(added, (False,), (True,), ())
    assert [result.values[v].op for v in result.instructions] == [sum_rows]


def test_slices_that_tile_a_value_are_put_side_by_side() -> None:
    b = Builder()
    z = product(b, slot(b, 0, type_of((6, 3), "float64")), arg(b))
    halves = [b.emit(pick_range, z, start=k, stop=k + 3, dim=0) for k in (0, 3)]
    program = b.finish((b.emit(ew.cmult, *(b.emit(ew.tanh, h) for h in halves)),), layout=(1, 0, 0, 0, 1))
    result = check_gradient(program, False)
    assert "pad_range" not in ops(result) and ops(result).count("concatenate") == 1
    overlapping = Builder()
    x = arg(overlapping)
    parts = [overlapping.emit(pick_range, x, start=k, stop=k + 2, dim=0) for k in (0, 1)]
    check_gradient(overlapping.finish((overlapping.emit(ew.cmult, *parts),), layout=(1, 0, 0, 0, 0)), False)


def test_a_blocked_gradient() -> None:
    b = Builder()
    x = arg(b)
    program = b.finish((b.emit(ew.cmult, b.emit(ew.stop_gradient, x), x),), layout=(1, 0, 0, 0, 0))
    result = gradient(program, (True,), (), ())
    known = inputs(program, result)
    arrays = evaluate(result, known, evaluate(program, known))
    np.testing.assert_allclose(arrays[result.results[0][2]], known["dout", 0] * known["arg", 0])


@given(program=programs())
def test_gradients_of_random_programs(program: Program) -> None:
    for version in (program, fuse_matmul(program)):
        check_gradient(version, False)
    check_gradient(program, True)
