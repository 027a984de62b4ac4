"""Lists of any length in cells, and what a cell cannot do: each error names the line."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
from cell_model import Model, batches, here, vector

import dynbatch as dy
from dynbatch.errors import CellError, ShapeError

pytestmark = pytest.mark.usefixtures("float64")


# ---- lists -----------------------------------------------------------------------------------------------------------


def test_child_sum_over_any_number_of_children_is_one_program() -> None:
    model = Model()
    x = vector()
    found = [model.child_sum(x, [vector(k, n, 1) for k in range(n)]) for n in (1, 2, 5, 3, 1)]
    assert batches(found) == 2
    assert len({s.program for s in x.graph.signatures if s.program.name.endswith("child_sum")}) == 1


@pytest.mark.parametrize("reduce", [dy.esum, dy.average, dy.emax, dy.logsumexp], ids=lambda f: f.__name__)
def test_every_reduction_of_a_list(reduce: Any, tier: None) -> None:
    W = dy.ParameterCollection().add_parameters((3, 3))

    @dy.cell
    def reduced(x: Any, children: list[Any]) -> Any:
        return reduce(children) + reduce([dy.tanh(W * c + x) for c in children]) + dy.sum_elems(reduce(children))

    rng = np.random.default_rng(2)
    arrays = [[rng.normal(size=3) for _ in range(n)] for n in (3, 1, 4)]
    found: list[list[np.ndarray]] = []
    for f in (reduced, reduced.function):
        dy.renew_cg()
        W.scale_gradient(0)
        inputs = [[dy.inputVector(a) for a in instance] for instance in arrays]
        results = [f(xs[0], xs) for xs in inputs]
        dy.esum([dy.squared_norm(r) for r in results]).backward(full=True)
        values = [r.npvalue() for r in results]
        found.append([*values, W.grad_as_array(), *[x.gradient() for xs in inputs for x in xs]])
    for a, b in zip(*found):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def test_lists_of_known_length_within_a_cell() -> None:
    """Reductions of a list that the cell makes itself; equal operands and infinities included."""

    def reduced(x: Any, y: Any) -> Any:
        return dy.emax([x, y, x]) + dy.average([x, y]) + dy.esum([x, y, y]), dy.logsumexp([x, y, x])

    found = []
    for f in (dy.cell(reduced), reduced):
        dy.renew_cg()
        x, y = vector(1, 2, -np.inf), vector(1, 3, -np.inf)
        a, b = f(x, y)
        loss = dy.sum_elems(dy.pick_range(a, 0, 2) + dy.pick_range(b, 0, 2))
        loss.backward(full=True)
        found.append([a.npvalue()[:2], b.npvalue(), x.gradient()[:2], y.gradient()[:2]])
    for actual, expected in zip(*found):
        np.testing.assert_allclose(actual, expected, rtol=1e-12)


@pytest.mark.usefixtures("interpreted", "tier")
def test_lists_in_tuples_and_with_other_operands() -> None:
    model = Model()

    @dy.cell
    def total(x: Any, state: Any) -> Any:
        first, second = state
        return dy.esum([x, *first, x]) + dy.emax(list(second)) + dy.esum([a + model.b for a in first] + list(second))

    x, y = vector(), vector(3, 2, 1)
    for lists in (([x, y], [y]), ([y], [x, y, y])):
        np.testing.assert_allclose(total(x, lists).npvalue(), total.function(x, lists).npvalue(), rtol=1e-12)


@pytest.mark.usefixtures("interpreted", "tier")
def test_parameters_in_a_list() -> None:
    pc = dy.ParameterCollection()
    bias = pc.add_parameters(3, init=1.0)

    @dy.cell
    def total(children: list[Any]) -> Any:
        return dy.esum(children)

    x = vector(1, 2, 3)
    np.testing.assert_array_equal(total([x, bias, bias]).npvalue(), [3, 4, 5])
    dy.sum_elems(total([x, bias, bias])).backward()
    np.testing.assert_array_equal(bias.grad_as_array(), [2, 2, 2])
    lanes = dy.inputTensor(np.ones((3, 4)), batched=True)
    np.testing.assert_array_equal(total([lanes, bias, x]).npvalue(), np.array([[3, 4, 5]] * 4).T)


@pytest.mark.usefixtures("interpreted", "tier")
def test_two_lists_walked_together() -> None:
    W = dy.ParameterCollection().add_parameters((3, 3))

    @dy.cell
    def attend(weights: list[Any], values: list[Any], more: list[Any]) -> Any:
        mixed = dy.esum([dy.cmult(dy.logistic(w), W * v) for w, v in zip(weights, values)])
        return mixed + dy.esum(more)

    def inputs(n: int) -> list[Any]:
        return [vector(k, n, 1) for k in range(n)]

    calls = [(inputs(2), inputs(2), inputs(3)), (inputs(1), inputs(1), inputs(1)), (inputs(4), inputs(4), inputs(2))]
    for args in calls:
        np.testing.assert_allclose(attend(*args).npvalue(), attend.function(*args).npvalue(), rtol=1e-12)
    line = here(+2)
    with pytest.raises(ShapeError, match="differ in length: 2, 3") as error:
        attend(inputs(2), inputs(3), inputs(1))
    assert line in str(error.value)
    assert np.isfinite(attend(*calls[0]).npvalue()).all()


@pytest.mark.usefixtures("interpreted", "tier")
def test_an_empty_list_is_traced_on_its_own() -> None:
    model = Model()
    x = vector()
    leaf, inner = model.child_sum(x, []), model.child_sum(x, [x])
    np.testing.assert_allclose(leaf.npvalue(), np.tanh(model.W.as_array() @ x.npvalue()))
    assert not np.allclose(leaf.npvalue(), inner.npvalue())

    @dy.cell
    def careless(children: list[Any]) -> Any:
        return dy.esum(children)

    with pytest.raises(ShapeError, match="list is empty"):
        careless([])


def test_elements_of_a_list_have_one_shape() -> None:
    model = Model()
    differ = r"children differ in shape: \(3,\) at position 0, \(2,\) at position 1"
    line = here(+2)
    with pytest.raises(ShapeError, match=differ) as error:
        model.child_sum(vector(), [vector(), vector(1, 2)])
    assert line in str(error.value)
    with pytest.raises(TypeError, match="expected an Expression"):
        model.child_sum(vector(), [1, 2])


def _fold(xs: Any) -> Any:
    total = dy.zeros(3)
    for x in xs:
        total = total + x
    return total


def _keep_last(xs: Any) -> Any:
    for x in xs:
        last = x
    return dy.esum([last])


COUNTING = {
    "len": lambda xs: dy.esum(xs) * len(xs),
    "index": lambda xs: xs[0],
    "negative index": lambda xs: xs[-1],
    "slice": lambda xs: dy.esum(xs[1:]),
    "reversed": lambda xs: dy.esum(list(reversed(xs))),
    "concatenated": lambda xs: dy.esum(xs + xs),
    "fold": _fold,
    "sum": lambda xs: sum(xs, dy.zeros(3)),
    "reduce": lambda xs: functools.reduce(lambda a, b: a + b, xs),
    "enumerate": lambda xs: dy.esum([x * k for k, x in enumerate(xs)]),
    "position": lambda xs: dy.esum([dy.pick(x, k) for k, x in enumerate(xs)]),
    "copied length": lambda xs: dy.esum(xs) * len(list(xs)),
    "some": lambda xs: dy.esum(list(xs)[1:] or [dy.zeros(3)]),
    "last": _keep_last,
    "concatenate": lambda xs: dy.concatenate(list(xs)),
    "zip with a plain list": lambda xs: dy.esum([x * k for x, k in zip(xs, [1.0, 2.0])]),
}


@pytest.mark.parametrize("name", COUNTING)
def test_what_depends_on_the_number_of_elements_is_refused(name: str) -> None:
    counted = dy.cell(COUNTING[name])
    for n in (1, 2, 3):
        with pytest.raises(CellError, match=r"number of elements|once for each element"):
            counted([vector() for _ in range(n)])
    assert np.isfinite(vector().npvalue()).all()


def test_the_error_about_counting_names_the_line() -> None:
    @dy.cell
    def counted(xs: list[Any]) -> Any:
        size = len(xs)
        return dy.esum(xs) * size

    line = here(-3)
    with pytest.raises(CellError) as error:
        counted([vector()])
    assert line in str(error.value)


def test_loops_within_loops_are_refused() -> None:
    @dy.cell
    def pairs(xs: list[Any], ys: list[Any]) -> Any:
        return dy.esum([dy.cmult(x, y) for x in xs for y in ys])

    with pytest.raises(CellError, match="within a loop"):
        pairs([vector()], [vector()])


def test_a_value_for_each_element_must_be_reduced() -> None:
    @dy.cell
    def each(xs: list[Any]) -> Any:
        return [dy.tanh(x) for x in xs]

    line = here(+2)
    with pytest.raises(CellError, match="once for each element of a list") as error:
        each([vector()])
    assert line in str(error.value)


def test_debug_checks_the_length_of_lists() -> None:
    @dy.cell
    def odd(xs: list[Any]) -> Any:
        return dy.esum(xs) * (2.0 if len(list(xs)) == 3 else 1.0)

    three = [vector() for _ in range(3)]
    odd(three)
    dy.init(debug=True)
    with pytest.raises(CellError, match="length of a list"):
        odd(three)


# ---- what a cell cannot do -------------------------------------------------------------------------------------------


READING = {
    "value": lambda e: e.value(),
    "npvalue": lambda e: e.npvalue(),
    "scalar_value": lambda e: e.scalar_value(),
    "vec_value": lambda e: e.vec_value(),
    "argmax_value": lambda e: e.argmax_value(),
    "float": float,
    "comparison": lambda e: e > 0,
    "equality": lambda e: e == 0,
    "truth": bool,
    "forward": lambda e: e.forward(),
    "backward": lambda e: e.backward(),
    "gradient": lambda e: e.gradient(),
}


@pytest.mark.parametrize("name", READING)
def test_reading_a_value_inside_is_refused(name: str) -> None:
    read = READING[name]

    @dy.cell
    def reads(x: Any) -> Any:
        read(dy.sum_elems(x))
        return x

    with pytest.raises(CellError, match=r"reads a value|used within the cell") as error:
        reads(vector())
    assert __file__ in str(error.value)
    assert np.isfinite(vector().npvalue()).all()


def test_the_error_about_reading_names_the_line() -> None:
    @dy.cell
    def reads(x: Any) -> Any:
        y = dy.sum_elems(x)
        return x if y.value() > 0 else -x

    line = here(-2)
    with pytest.raises(CellError, match=r"reads a value.*outside of the cell") as error:
        reads(vector())
    assert line in str(error.value)


PAYLOAD = {
    "if": lambda k: 1 if k else 2,
    "comparison": lambda k: 1 if k > 0 else 2,
    "equality": lambda k: 1 if k == 0 else 2,
    "membership": lambda k: 1 if k in (0, 1) else 2,
    "range": lambda k: len(range(k)),
    "int": int,
    "float": float,
    "sqrt": math.sqrt,
    "index": lambda k: [1, 2][k],
    "key": lambda k: {0: 1}[k],
    "text": lambda k: len(f"{k}"),
    "abs": abs,
    "modulo": lambda k: k % 2,
    "max": lambda k: max(k, 1),
}


@pytest.mark.parametrize("name", PAYLOAD)
@pytest.mark.parametrize("k", [1, 0.5], ids=["int", "float"])
def test_branching_on_a_payload_is_refused(name: str, k: float) -> None:
    decide = PAYLOAD[name]

    @dy.cell
    def branches(x: Any, k: Any) -> Any:
        return x * decide(k)

    with pytest.raises(CellError, match=r'argument "k".*static=\("k",\)') as error:
        branches(vector(), k)
    assert __file__ in str(error.value)


def test_slices_by_payload_are_refused() -> None:
    @dy.cell
    def part(x: Any, k: int) -> Any:
        return x[:k]

    with pytest.raises(TypeError, match="bounds of a slice"):
        part(vector(), 2)

    @dy.cell
    def computed(x: Any, k: int) -> Any:
        return dy.pick(x, k + 1)

    with pytest.raises(CellError, match="an index is an integer argument as it was given"):
        computed(vector(), 1)


def test_an_expression_from_outside_is_refused() -> None:
    outside = vector()
    several = dy.inputTensor(np.ones((3, 2)), batched=True)
    uses = [
        lambda x: x + outside,
        lambda x: dy.esum([x, outside]),
        lambda x: dy.cmult(outside, x),
        lambda x: outside,
        lambda x: x + dy.tanh(outside),
        lambda x: x * outside.value()[0],
        lambda x: x + several,
        lambda x: dy.pick_batch_elem(several, 0),
    ]
    for make in uses:
        captured = dy.cell(make)
        with pytest.raises(CellError, match="outside") as error:
            captured(vector())
        assert __file__ in str(error.value)
    assert np.isfinite(outside.npvalue()).all()


def test_a_symbolic_value_that_escapes_is_refused() -> None:
    escaped: list[Any] = []

    def keep(x: Any) -> Any:
        escaped.append(x)
        return x

    @dy.cell
    def leaks(x: Any) -> Any:
        return dy.tanh(keep(x))

    @dy.cell
    def other(x: Any) -> Any:
        return x + escaped[0] if use else x

    x = vector()
    leaks(x)
    for use_it in (lambda: dy.tanh(escaped[0]), lambda: x + escaped[0], lambda: dy.esum([escaped[0], x])):
        with pytest.raises(CellError):
            use_it()
    with pytest.raises(CellError):
        escaped[0].value()
    use = True
    with pytest.raises(CellError):
        other(x)
    assert np.isfinite(x.npvalue()).all()


def test_a_parameters_value_is_not_read_in_a_cell() -> None:
    scale = dy.ParameterCollection().add_parameters(1, init=2.0)
    constant = dy.const_parameter(scale)
    readings = [lambda: scale.value(), lambda: float(scale), lambda: scale > 1, lambda: constant.npvalue()]
    for read in readings:
        scaled = dy.cell(lambda x, read=read: x * float(read()), static=("read",))
        with pytest.raises(CellError, match="reads the value of /_0"):
            scaled(vector())
    assert scale.value() == 2


def test_graphs_are_not_renewed_in_a_cell() -> None:
    @dy.cell
    def renews(x: Any) -> Any:
        dy.renew_cg()
        return x

    x = vector()
    with pytest.raises(CellError, match="renew_cg"):
        renews(x)
    assert np.isfinite(x.npvalue()).all()


def test_inputs_and_batch_elements_are_not_for_cells() -> None:
    calls = [
        lambda x: x + dy.inputVector([1, 2, 3]),
        lambda x: dy.sum_batches(x),
        lambda x: dy.pick_batch(x, [0, 1]),
        lambda x: dy.concatenate_to_batch([x, x]),
        lambda x: dy.pick_batch_elem(x, 0),
    ]
    for make in calls:
        with pytest.raises(dy.DynbatchError) as error:
            dy.cell(make)(vector())
        assert __file__ in str(error.value)


@pytest.mark.parametrize("result", [None, 3, "x", {}, [], ()], ids=str)
def test_a_cell_returns_expressions(result: Any) -> None:
    with pytest.raises(CellError, match=r"must return an Expression|empty tuple"):
        dy.cell(lambda x: result)(vector())


def test_an_error_of_the_users_passes_through() -> None:
    @dy.cell
    def fails(x: Any) -> Any:
        raise KeyError("mine")

    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            fails(vector())
    assert dy.tanh(vector()).npvalue().shape == (3,)


def test_shape_errors_name_the_line_in_the_cell() -> None:
    model = Model()

    @dy.cell
    def wrong(x: Any) -> Any:
        return model.W * x

    line = here(-2)
    with pytest.raises(ShapeError, match=r"\(3, 3\) and \(2,\).*/_0 \(3, 3\)") as error:
        wrong(vector(1, 2))
    assert line in str(error.value)


def test_expressions_of_an_old_graph_are_refused() -> None:
    model = Model()
    old = vector()
    for _ in range(2):
        model.step(old, old)
    dy.renew_cg()
    for call in (lambda: model.step(old, vector()), lambda: model.child_sum(vector(), [vector(), old])):
        with pytest.raises(dy.StaleExpressionError) as error:
            call()
        assert __file__ in str(error.value)
