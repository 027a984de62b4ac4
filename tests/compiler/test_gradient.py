"""The gradient of a Program, by central differences, whatever the forward pass kept."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import pytest
from hypothesis import given
from small_programs import (
    ROWS,
    V,
    arg,
    evaluate,
    gates,
    inputs,
    ops,
    product,
    programs,
    slot,
)

from dynbatch.compiler.fuse_matmul import fuse_matmul
from dynbatch.compiler.gradient import gradient, read_by_gradient
from dynbatch.compiler.ir import ROW, SHARED, Builder, Program
from dynbatch.compiler.keep import choose_kept, is_keepable
from dynbatch.ops import elementwise as ew
from dynbatch.ops.linear import matmul, matmul_rows
from dynbatch.ops.reduction import sum_rows
from dynbatch.ops.segment import segment_sum
from dynbatch.ops.shape import pick_range
from dynbatch.types import type_of

KEEPING: dict[str, Callable[[Program], Collection[int]]] = {
    "everything": lambda p: [v for v in range(len(p.values)) if is_keepable(p, v)],
    "nothing": lambda p: (),
    "the cheapest": lambda p: choose_kept(p, read_by_gradient(p)),
}


def check_gradient(program: Program, keeping: str) -> Program:
    """The gradient Program against central differences of a weighted sum of the outputs."""
    args, lists, _, _, slots = program.layout
    kept = KEEPING[keeping](program)
    found = gradient(program, (True,) * args, (True,) * slots, (True,) * lists, kept)
    known = inputs(program, found)
    forward = evaluate(program, known)
    weights = [known.get(("dout", index)) for index in range(len(program.outputs))]
    for index, v in enumerate(program.outputs):
        if weights[index] is None:
            weights[index] = np.zeros(np.broadcast_shapes(forward[v].shape, (ROWS, *[1] * (forward[v].ndim - 1))))

    def loss() -> float:
        arrays = evaluate(program, known)
        return sum(float((arrays[v] * w).sum()) for v, w in zip(program.outputs, weights))

    readable = [array if x.domain == SHARED or v in kept or v in program.outputs else None
                for v, (x, array) in enumerate(zip(program.values, forward))]  # fmt: skip
    arrays = evaluate(found, known, readable)  # type: ignore[arg-type]
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


@pytest.mark.parametrize("keeping", KEEPING)
def test_gradients_of_gates(keeping: str) -> None:
    b = Builder()
    found, x, h = gates(b, 2)
    c = b.emit(ew.cmult, b.emit(ew.logistic, found[0]), b.emit(ew.tanh, found[1]))
    program = b.finish((b.emit(ew.tanh, c), c, b.emit(ew.add, x, h)), layout=(2, 0, 0, 0, 6))
    for version in (program, fuse_matmul(program)):
        result = check_gradient(version, keeping)
        assert {(role, index) for role, index, _ in result.results} == {
            *[("arg", k) for k in range(2)], *[("slot", k) for k in range(6)]
        }  # fmt: skip
        read = {v.index for v in result.values if v.kind == "fwd" and v.domain == ROW}
        assert (read <= set(version.outputs)) if keeping == "nothing" else read


@pytest.mark.parametrize("keeping", KEEPING)
def test_gradients_of_lists_and_shared_values(keeping: str) -> None:
    b = Builder()
    x, c, w = arg(b), b.input("list", 0, V, 1), b.emit(ew.tanh, slot(b))
    element = b.emit(ew.logistic, b.emit(ew.add, product(b, w, c), x))
    total = b.emit(segment_sum, b.emit(ew.cmult, element, c), b.ptr(1))
    program = b.finish((b.emit(ew.cmult, total, product(b, slot(b, 1), x)),), layout=(1, 1, 0, 0, 2))
    result = check_gradient(program, keeping)
    assert not any(v.kind == "fwd" and v.domain > ROW for v in result.values)  # elements are computed again


def test_only_what_is_wanted_is_computed() -> None:
    b = Builder()
    found, _, _ = gates(b, 2)
    program = b.finish(
        (b.emit(ew.cmult, b.emit(ew.tanh, found[0]), b.emit(ew.tanh, found[1])),), layout=(2, 0, 0, 0, 6)
    )
    nothing = gradient(program, (False, False), (False,) * 6, (), ())
    assert nothing.values == () and nothing.results == ()
    kept = KEEPING["everything"](program)
    one = gradient(program, (False, False), (False, False, True, False, False, False), (), kept)
    assert [r[:2] for r in one.results] == [("slot", 2)]
    assert not {"matmul", "matmul_rows"} & set(ops(one)) and ops(one).count("sum_rows") == 1
    inner = gradient(program, (True, False), (False,) * 6, (), kept)
    assert not any(op.reduces == "rows" for op in (inner.values[v].op for v in inner.instructions) if op)


def test_a_weights_gradient_is_one_product_over_all_rows() -> None:
    b = Builder()
    program = b.finish((b.emit(ew.tanh, product(b, slot(b), arg(b))),), layout=(1, 0, 0, 0, 1))
    result = gradient(program, (True,), (True,), (), ())
    made = {role: result.values[v].op for role, _, v in result.results}
    assert made == {"arg": matmul, "slot": matmul_rows}
    bias = Builder()
    added = bias.finish((bias.emit(ew.add, arg(bias), slot(bias, 0, V)),), layout=(1, 0, 0, 0, 1))
    result = gradient(added, (False,), (True,), (), ())
    assert [result.values[v].op for v in result.instructions] == [sum_rows]


def test_slices_that_tile_a_value_are_put_side_by_side() -> None:
    b = Builder()
    z = product(b, slot(b, 0, type_of((6, 3), "float64")), arg(b))
    halves = [b.emit(pick_range, z, start=k, stop=k + 3, dim=0) for k in (0, 3)]
    program = b.finish((b.emit(ew.cmult, *(b.emit(ew.tanh, h) for h in halves)),), layout=(1, 0, 0, 0, 1))
    result = check_gradient(program, "everything")
    assert "pad_range" not in ops(result) and ops(result).count("concatenate") == 1
    overlapping = Builder()
    x = arg(overlapping)
    parts = [overlapping.emit(pick_range, x, start=k, stop=k + 2, dim=0) for k in (0, 1)]
    check_gradient(overlapping.finish((overlapping.emit(ew.cmult, *parts),), layout=(1, 0, 0, 0, 0)), "everything")


def test_a_blocked_gradient() -> None:
    b = Builder()
    x = arg(b)
    program = b.finish((b.emit(ew.cmult, b.emit(ew.stop_gradient, x), x),), layout=(1, 0, 0, 0, 0))
    result = gradient(program, (True,), (), (), ())
    known = inputs(program, result)
    arrays = evaluate(result, known, evaluate(program, known))
    np.testing.assert_allclose(arrays[result.results[0][2]], known["dout", 0] * known["arg", 0])


@given(program=programs())
def test_gradients_of_random_programs(program: Program) -> None:
    stacked = fuse_matmul(program)
    check_gradient(program, "everything")
    check_gradient(stacked, "everything")
    check_gradient(stacked, "the cheapest")
    check_gradient(program, "nothing")


def test_gates_stay_one_product_in_the_gradient() -> None:
    """Horizontal fusion comes first, so that the gradient's products are stacked too: one for the inputs, one late."""
    b = Builder()
    found, _, _ = gates(b, 4)
    total = b.emit(ew.cmult, b.emit(ew.tanh, found[0]), b.emit(ew.logistic, found[1]))
    total = b.emit(ew.add, total, b.emit(ew.cmult, b.emit(ew.tanh, found[2]), b.emit(ew.logistic, found[3])))
    program = fuse_matmul(b.finish((total,), layout=(2, 0, 0, 0, 12)))
    result = check_gradient(program, "the cheapest")
    assert ops(result).count("matmul") == 1 and ops(result).count("matmul_rows") == 1


def test_the_gradient_repeats_nothing() -> None:
    """What is computed again is computed once, and nothing is there that no result needs."""
    b = Builder()
    x = arg(b)
    twice = b.emit(ew.exp, b.emit(ew.tanh, x))
    program = b.finish((b.emit(ew.cmult, twice, b.emit(ew.logistic, twice)),), layout=(1, 0, 0, 0, 0))
    result = check_gradient(program, "nothing")
    assert ops(result).count("tanh") == 1 and ops(result).count("exp") == 1
    assert len(set(result.values)) == len(result.values)
    read = {a for v in result.values for a in v.args} | {v for _, _, v in result.results}
    assert read == set(range(len(result.values)))
