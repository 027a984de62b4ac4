"""Cells: what they take and return, what they notice, what they refuse, and that they equal the undecorated function."""

from __future__ import annotations

import copy
import enum
import functools
import gc
import math
import pickle
import types
import warnings
import weakref
from typing import Any, NamedTuple

import numpy as np
import pytest

import dynbatch as dy
from dynbatch.errors import CellError, IndexRangeError, ShapeError

STRATEGIES = ["off", "depth", "agenda"]

pytestmark = pytest.mark.usefixtures("float64")


def vector(*numbers: float) -> Any:
    return dy.inputVector(numbers or (0.5, -1.0, 2.0))


def here(offset: int = 0) -> str:
    """``file:line`` of the caller, as errors name it."""
    import sys

    frame = sys._getframe(1)
    return f"{__file__}:{frame.f_lineno + offset}"


def batches(expressions: list[Any], strategy: str = "agenda") -> int:
    """How many batches compute these, all of the graph being new."""
    with dy.autobatch(strategy):
        dy.forward(expressions)
    return dy.plan().batches


class Model:
    """A bit of everything: parameters, a table, a flag, a list of layers."""

    def __init__(self, size: int = 3) -> None:
        self.pc = dy.ParameterCollection()
        self.W = self.pc.add_parameters((size, size))
        self.U = self.pc.add_parameters((size, size))
        self.b = self.pc.add_parameters(size)
        self.words = self.pc.add_lookup_parameters((7, size))
        self.layers = [self.pc.add_parameters((size, size)) for _ in range(2)]
        self.gated = True
        self.factor = 2.0

    @dy.cell
    def step(self, x: Any, h: Any) -> Any:
        return dy.tanh(dy.affine_transform([self.b, self.W, x, self.U, h]))

    @dy.cell
    def pair(self, x: Any, h: Any) -> Any:
        gate = dy.logistic(self.W * x + self.b)
        c = dy.cmult(gate, h)
        return dy.tanh(c), c

    @dy.cell
    def child_sum(self, x: Any, children: list[Any]) -> Any:
        if not children:
            return dy.tanh(self.W * x)
        total = dy.esum(children)
        kept = dy.esum([dy.cmult(dy.logistic(self.U * c + self.b), c) for c in children])
        return dy.tanh(self.W * x + self.U * total) + kept

    @dy.cell
    def loss(self, h: Any, label: int, weight: float) -> Any:
        return dy.pickneglogsoftmax(self.U * h + self.b, label) * weight

    @dy.cell
    def embed(self, word: int) -> Any:
        return dy.tanh(self.words[word])

    @dy.cell
    def switched(self, x: Any) -> Any:
        h = self.W * x
        for layer in self.layers:
            h = dy.tanh(layer * h)
        return dy.logistic(h) * self.factor if self.gated else h * self.factor


def gradients(model: Model) -> list[np.ndarray]:
    parameters = [*model.pc.parameters_list(), *model.pc.lookup_parameters_list()]
    return [p.grad_as_array() for p in parameters]


# ---- results equal those of the function -----------------------------------------------------------------------------


def tree_loss(model: Model, cells: bool, rng: np.random.Generator) -> Any:
    """A few random trees through every cell of the model, or through the functions that the cells were made of."""

    def call(name: str, *args: Any) -> Any:
        return getattr(model, name)(*args) if cells else getattr(Model, name).function(model, *args)

    def node(depth: int) -> Any:
        if depth == 0:
            return call("embed", int(rng.integers(7)))
        children = [node(depth - 1) for _ in range(rng.integers(0, 4))]
        h = call("child_sum", call("embed", int(rng.integers(7))), children)
        a, c = call("pair", h, call("step", h, h))
        losses.append(call("loss", a if rng.integers(2) else c, int(rng.integers(3)), float(rng.normal())))
        return call("switched", a)

    losses: list[Any] = []
    for _ in range(4):
        node(2)
    return dy.esum(losses)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_results_and_gradients_are_those_of_the_undecorated_functions(strategy: str, tier: None) -> None:
    model = Model()
    found = []
    for cells in (True, False):
        dy.renew_cg()
        model.pc.reset_gradient()
        with dy.autobatch(strategy):
            loss = tree_loss(model, cells, np.random.default_rng(5))
            loss.backward()
            found.append([loss.npvalue(), *gradients(model)])
            nodes = dy.plan().nodes
    assert nodes > 200  # of the functions; the cells are far fewer
    for actual, expected in zip(*found):
        np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-12)


def test_one_node_a_call_and_one_batch_a_level() -> None:
    model = Model()
    h = [model.embed(i) for i in range(5)]
    for _ in range(3):
        h = [model.step(x, x) for x in h]
    dy.forward(h)
    assert dy.plan().nodes == 20
    assert dy.plan().rows_per_batch == [5, 5, 5, 5]


def test_a_program_is_shared_by_models_but_batches_are_not() -> None:
    a, b = Model(), Model()
    x = vector()
    assert batches([a.step(x, x), b.step(x, x), a.step(x, x)]) == 3  # the input, and one for each model
    assert [v[0].signature.program for v in vars(a)["step"].bound_cell.variants.values()] == [
        v[0].signature.program for v in vars(b)["step"].bound_cell.variants.values()
    ]


def test_a_function_cell_finds_the_parameters_it_uses() -> None:
    pc = dy.ParameterCollection()
    W = pc.add_parameters((2, 3), init=1.0)

    @dy.cell
    def project(x: Any) -> Any:
        return W * x

    loss = dy.sum_elems(project(vector(1, 2, 3)))
    assert loss.value() == 12
    loss.backward()
    np.testing.assert_array_equal(W.grad_as_array(), [[1, 2, 3], [1, 2, 3]])


def test_a_parameter_may_be_an_argument() -> None:
    pc = dy.ParameterCollection()
    A, B = (pc.add_parameters((3, 3), init=k) for k in (1.0, 2.0))

    @dy.cell
    def project(W: Any, x: Any) -> Any:
        return W * x

    x = vector(1, 1, 1)
    found = [project(W, x) for W in (A, B, A)]
    assert [e.value()[0] for e in found] == [3, 6, 3]
    assert dy.plan().nodes == 4
    dy.sum_elems(dy.esum(found)).backward()
    assert A.grad_as_array().sum() == 2 * B.grad_as_array().sum()


def test_a_parameter_used_twice() -> None:
    W = dy.ParameterCollection().add_parameters((3, 3))

    @dy.cell
    def twice(x: Any) -> Any:
        return dy.sum_elems(dy.tanh(W * (W * x)) + W * x)

    grads = []
    for f in (twice, twice.function):
        W.zero_gradient() if hasattr(W, "zero_gradient") else W.scale_gradient(0)
        dy.esum([f(vector(1, k, 2)) for k in range(4)]).backward()
        grads.append(W.grad_as_array())
    np.testing.assert_allclose(*grads, rtol=1e-12)


def test_an_unused_output_gets_no_gradient() -> None:
    model = Model()
    x = vector()
    first, second = model.pair(x, x)
    lone, _ = model.pair(x, x)
    loss = dy.sum_elems(first) + dy.sum_elems(lone)
    loss.backward(full=True)
    np.testing.assert_array_equal(lone.gradient(), np.ones(3))
    assert np.isfinite(x.gradient()).all()
    assert second.npvalue().shape == (3,)


def test_outputs_that_are_arguments_parameters_or_equal() -> None:
    W = dy.ParameterCollection().add_parameters(3, init=2.0)

    @dy.cell
    def same(x: Any) -> Any:
        y = dy.tanh(x)
        return y, y, x, W

    x = vector()
    outputs = same(x)
    np.testing.assert_array_equal(outputs[0].npvalue(), outputs[1].npvalue())
    np.testing.assert_array_equal(outputs[2].npvalue(), x.npvalue())
    np.testing.assert_array_equal(outputs[3].npvalue(), [2, 2, 2])
    dy.sum_elems(dy.esum(list(outputs))).backward(full=True)
    np.testing.assert_allclose(x.gradient(), 2 * (1 - np.tanh(x.npvalue()) ** 2) + 1)
    np.testing.assert_array_equal(W.grad_as_array(), [1, 1, 1])


def test_nested_cells_are_one_node() -> None:
    model = Model()

    @dy.cell
    def both(x: Any, h: Any) -> Any:
        c, _ = model.pair(x, h)
        return model.step(c, x) + model.embed(2)

    x = vector()
    found, expected = both(x, x), both.function(x, x)
    np.testing.assert_allclose(found.npvalue(), expected.npvalue(), rtol=1e-12)
    dy.renew_cg()
    x = vector()
    assert batches([both(x, x)]) == 2


def test_no_grad_and_backward_afterwards() -> None:
    model = Model()
    found = []
    for quiet in (False, True):
        dy.renew_cg()
        model.pc.reset_gradient()
        loss = tree_loss(model, True, np.random.default_rng(5))
        if quiet:
            with dy.no_grad():
                loss.value()
        loss.backward()
        found.append(gradients(model))
    for kept, recomputed in zip(*found):
        np.testing.assert_allclose(recomputed, kept, rtol=1e-12, atol=1e-14)


def test_manually_batched_expressions_are_one_call_a_batch_element(tier: None) -> None:
    model = Model()
    array = np.random.default_rng(0).normal(size=(3, 5))
    x, h = dy.inputTensor(array, batched=True), vector()
    out, c = model.pair(x, h)
    assert out.dim() == ((3,), 5)
    total = model.child_sum(c, [x, out])
    assert total.dim() == ((3,), 5)
    for k in range(5):
        one = dy.inputTensor(array[:, k])
        a, b = model.pair(one, h)
        np.testing.assert_allclose(out.npvalue()[:, k], a.npvalue(), rtol=1e-12)
        np.testing.assert_allclose(total.npvalue()[:, k], model.child_sum(b, [one, a]).npvalue(), rtol=1e-12)


def test_manual_batches_of_different_sizes_are_refused() -> None:
    model = Model()
    x, y = (dy.inputTensor(np.ones((3, n)), batched=True) for n in (2, 4))
    with pytest.raises(ShapeError, match="batch sizes"):
        model.step(x, y)


# ---- arguments -------------------------------------------------------------------------------------------------------


class State(NamedTuple):
    h: Any
    c: Any


def test_tuples_in_and_out() -> None:
    @dy.cell
    def advance(x: Any, state: Any, rest: Any) -> Any:
        h, c = state
        (a, k), scale = rest
        return dy.tanh(x + h), dy.cmult(c, a) * k * scale

    x = vector()
    found = advance(x, (x, x), ((x, 2), 0.5))
    assert isinstance(found, tuple)
    np.testing.assert_allclose(found[1].npvalue(), x.npvalue() ** 2)
    np.testing.assert_allclose(advance(x, found, ((x, 3), 0.5))[1].npvalue(), x.npvalue() ** 3 * 1.5)


def test_named_tuples_keep_their_names() -> None:
    @dy.cell
    def total(state: State) -> Any:
        return state.h + state.c * 2

    x = vector()
    np.testing.assert_allclose(total(State(x, x)).npvalue(), 3 * x.npvalue())


def test_defaults_and_keywords() -> None:
    @dy.cell
    def scaled(x: Any, by: float = 2.0, *, plus: float = 1.0, minus: Any = None) -> Any:
        y = x * by + plus
        return y if minus is None else y - minus

    x = vector()
    plain = x.npvalue()
    for _ in range(3):  # the first call traces, the others may take a faster way
        np.testing.assert_allclose(scaled(x).npvalue(), plain * 2 + 1)
        np.testing.assert_allclose(scaled(x, 3.0).npvalue(), plain * 3 + 1)
        np.testing.assert_allclose(scaled(by=4.0, x=x).npvalue(), plain * 4 + 1)
        np.testing.assert_allclose(scaled(x, plus=5.0).npvalue(), plain * 2 + 5)
        np.testing.assert_allclose(scaled(x, minus=x, plus=0.0).npvalue(), plain)
    for wrong in (lambda: scaled(), lambda: scaled(x, 1.0, 2.0), lambda: scaled(x, other=1)):
        with pytest.raises(TypeError):
            wrong()


def test_none_and_strings_are_structure() -> None:
    @dy.cell
    def choose(x: Any, kind: str, other: Any = None) -> Any:
        y = dy.tanh(x) if kind == "tanh" else dy.logistic(x)
        return y if other is None else y + other

    x = vector()
    np.testing.assert_allclose(choose(x, "tanh").npvalue(), np.tanh(x.npvalue()))
    np.testing.assert_allclose(choose(x, "logistic").npvalue(), 1 / (1 + np.exp(-x.npvalue())))
    np.testing.assert_allclose(choose(x, "tanh", x).npvalue(), np.tanh(x.npvalue()) + x.npvalue())


def test_static_arguments_have_a_trace_each() -> None:
    @dy.cell(static=("times", "flag"))
    def repeat(x: Any, times: int, flag: bool = False) -> Any:
        for _ in range(times):
            x = dy.tanh(x)
        return -x if flag else x

    x = vector()
    once = np.tanh(x.npvalue())
    for _ in range(2):
        np.testing.assert_allclose(repeat(x, 0).npvalue(), x.npvalue())
        np.testing.assert_allclose(repeat(x, 1).npvalue(), once)
        np.testing.assert_allclose(repeat(x, 2, True).npvalue(), -np.tanh(once))
        np.testing.assert_allclose(repeat(x, flag=False, times=2).npvalue(), np.tanh(once))


def test_static_arguments_are_named_and_hashable() -> None:
    with pytest.raises(TypeError, match="has no argument nothing"):
        dy.cell(static=("nothing",))(lambda x: x)

    @dy.cell(static="sizes")
    def total(x: Any, sizes: Any) -> Any:
        return x * sum(sizes)

    np.testing.assert_allclose(total(vector(1, 2), (1, 2)).npvalue(), [3, 6])
    with pytest.raises(CellError, match="hashable"):
        total(vector(1, 2), [1, 2])


def test_what_else_is_given_is_refused() -> None:
    @dy.cell
    def scaled(x: Any, by: Any) -> Any:
        return x * by

    for wrong in (object(), {"a": 1}, np.ones(3)):
        line = here(+2)
        with pytest.raises(CellError, match="argument by is") as error:
            scaled(vector(), wrong)
        assert line in str(error.value)


def test_a_cell_names_its_arguments() -> None:
    with pytest.raises(TypeError, match="must name its arguments"):
        dy.cell(lambda *xs: xs[0])
    with pytest.raises(TypeError, match="must name its arguments"):
        dy.cell(lambda x, **options: x)
    with pytest.raises(TypeError, match="function or a method"):
        dy.cell(3)


# ---- payload ---------------------------------------------------------------------------------------------------------


def test_numbers_are_payload_and_batch() -> None:
    model = Model()
    x = vector()
    losses = [model.loss(x, k % 3, 0.1 * k) for k in range(12)]
    assert batches(losses) == 2
    for k, loss in enumerate(losses):
        expected = Model.loss.function(model, x, k % 3, 0.1 * k)
        np.testing.assert_allclose(loss.npvalue(), expected.npvalue(), rtol=1e-12)


def test_numbers_of_every_kind() -> None:
    @dy.cell
    def scaled(x: Any, by: Any) -> Any:
        return x * by

    x = vector(1, 2)
    for by in (2, 2.5, True, np.int64(3), np.float32(0.5), np.float64(0.25), np.bool_(True), np.array(4)):
        np.testing.assert_allclose(scaled(x, by).npvalue(), np.array([1, 2]) * float(by))


def test_arithmetic_on_payload() -> None:
    @dy.cell
    def combined(x: Any, k: int, rate: float) -> Any:
        return x * (2 * rate - k / 4 + 1) + (-rate) ** 2 + (1 - rate) / 2 + 2**rate + dy.scalarInput(k)

    x = vector()
    for k, rate in ((0, 0.5), (3, -1.5), (-2, 2.0)):
        expected = x.npvalue() * (2 * rate - k / 4 + 1) + rate**2 + (1 - rate) / 2 + 2**rate + k
        np.testing.assert_allclose(combined(x, k, rate).npvalue(), expected)


def test_an_index_is_checked_at_the_call_on_the_users_line() -> None:
    model = Model()
    x = vector()
    for _ in range(3):
        for call in (lambda: model.loss(x, 3, 1.0), lambda: model.loss(x, -4, 1.0), lambda: model.embed(7)):
            with pytest.raises(IndexRangeError, match="out of range") as error:
                call()
            assert __file__ in str(error.value)
        kept = model.loss(x, 2, 1.0)  # the graph is as it was
        model.embed(6)
    assert np.isfinite(kept.value())
    line = here(+2)
    with pytest.raises(IndexRangeError, match=r"index 9 .*/_4 of size 7") as error:
        model.embed(9)
    assert line in str(error.value)


def test_a_negative_index_counts_from_the_end() -> None:
    model = Model()
    x = vector()
    for _ in range(2):
        np.testing.assert_array_equal(model.embed(-1).npvalue(), model.embed(6).npvalue())
        np.testing.assert_array_equal(model.loss(x, -3, 1.0).npvalue(), model.loss(x, 0, 1.0).npvalue())


def test_an_index_into_two_tables_is_checked_for_both() -> None:
    pc = dy.ParameterCollection()
    small, large = (pc.add_lookup_parameters((n, 2)) for n in (3, 5))
    for first, second in ((small, large), (large, small)):

        @dy.cell
        def both(i: int, first: Any = first, second: Any = second) -> Any:
            return dy.lookup(a, i) + dy.lookup(b, i)

        a, b = first, second
        for i in (0, 1, 2):
            np.testing.assert_allclose(both(i).npvalue(), small.row_as_array(i) + large.row_as_array(i))
        for i in (3, 4, 5):
            with pytest.raises(IndexRangeError, match=f"index {i}"):
                both(i)
        with pytest.raises(CellError, match="several ways"):
            both(-1)


def test_an_index_that_is_also_a_number() -> None:
    @dy.cell
    def weighted(x: Any, i: int) -> Any:
        return dy.pick(x, i) * i

    assert weighted(vector(1, 2, 3), 2).value() == 6
    with pytest.raises(CellError, match="several ways"):  # the function would give x[-1] * -1
        weighted(vector(1, 2, 3), -1)


def test_an_integer_beyond_64_bits_leaves_the_graph_as_it_was() -> None:
    @dy.cell
    def scaled(x: Any, by: int) -> Any:
        return x * by

    before = scaled(vector(1, 2), 2)
    for by in (2**63, -(2**63) - 1, 2**70):
        with pytest.raises(CellError, match="64 bits"):
            scaled(vector(1, 2), by)
    after = scaled(vector(3, 4), 5)
    np.testing.assert_array_equal(before.npvalue(), [2, 4])
    np.testing.assert_array_equal(after.npvalue(), [15, 20])


def test_payload_with_list_elements() -> None:
    @dy.cell
    def picked(children: list[Any], i: int, scale: float) -> Any:
        return dy.esum([dy.pick(c, i) * scale + dy.pick(c, 0) + c[1] for c in children])

    lists = [[vector(k, 2, n) for k in range(n)] for n in (1, 2, 4)]
    found = [picked(children, n % 3, 0.5) for n, children in enumerate(lists)]
    expected = [picked.function(children, n % 3, 0.5) for n, children in enumerate(lists)]
    for a, b in zip(found, expected):
        assert a.value() == pytest.approx(b.value())


def test_a_dropout_rate_is_payload() -> None:
    @dy.cell
    def dropped(x: Any, rate: float) -> Any:
        return dy.dropout(x, rate)

    x = dy.inputVector(np.ones(2000))
    rates = (0.0, 0.25, 0.9)
    found = [dropped(x, rate) for rate in rates]
    assert batches(found) == 2
    for rate, e in zip(rates, found):
        value = e.npvalue()
        assert set(np.round(value[value != 0], 9)) == {np.round(1 / (1 - rate), 9)}
        assert abs((value == 0).mean() - rate) < 0.05


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


def test_lists_in_tuples_and_with_other_operands() -> None:
    model = Model()

    @dy.cell
    def total(x: Any, state: Any) -> Any:
        first, second = state
        return dy.esum([x, *first, x]) + dy.emax(list(second)) + dy.esum([a + model.b for a in first] + list(second))

    x, y = vector(), vector(3, 2, 1)
    for lists in (([x, y], [y]), ([y], [x, y, y])):
        np.testing.assert_allclose(total(x, lists).npvalue(), total.function(x, lists).npvalue(), rtol=1e-12)


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
    line = here(+2)
    with pytest.raises(ShapeError, match=r"children differ in shape: \(3,\) at position 0, \(2,\) at position 1") as error:
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


# ---- what a trace reads, and notices when it changes ------------------------------------------------------------------


def test_a_flag_or_number_of_self() -> None:
    model = Model()
    x = vector()
    on = model.switched(x).npvalue()
    model.gated = False
    off = model.switched(x).npvalue()
    assert not np.allclose(on, off)
    model.factor = 4.0
    np.testing.assert_allclose(model.switched(x).npvalue(), off * 2)
    model.gated, model.factor = True, 2.0
    np.testing.assert_array_equal(model.switched(x).npvalue(), on)
    assert [len(v) for v in vars(model)["switched"].bound_cell.variants.values()] == [3]


def test_a_replaced_parameter_and_a_changed_list() -> None:
    model = Model()
    x = vector()
    before = model.switched(x).npvalue()
    model.W = model.pc.add_parameters((3, 3))
    replaced = model.switched(x).npvalue()
    assert not np.allclose(before, replaced)
    model.layers[1] = model.pc.add_parameters((3, 3))
    changed = model.switched(x).npvalue()
    assert not np.allclose(replaced, changed)
    model.layers.append(model.layers[0])
    longer = model.switched(x).npvalue()
    assert not np.allclose(changed, longer)
    model.layers = []
    np.testing.assert_allclose(model.switched(x).npvalue(), 2 / (1 + np.exp(-model.W.as_array() @ x.npvalue())))
    model.layers = [None]
    with pytest.raises(TypeError):
        model.switched(x)


class Kind(enum.Enum):
    DOUBLE = 1
    TRIPLE = 2


class Holder:
    """Reads whatever the test puts here: `read` gives a number."""

    def __init__(self, read: Any, **attributes: Any) -> None:
        self.read = read
        vars(self).update(attributes)

    @property
    def doubled(self) -> float:
        return self.thing * 2

    def method(self) -> float:
        return self.thing + 1

    @staticmethod
    def static_method() -> float:
        return 5.0

    @classmethod
    def class_method(cls) -> float:
        return 6.0

    @dy.cell
    def f(self, x: Any) -> Any:
        return x * self.read(self)


class Numbers(list):
    """A list by another name."""


class Wrapped:
    """An object that acts as a container and as a function."""

    def __init__(self, *items: float) -> None:
        self.items = list(items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> float:
        return self.items[index]

    def __iter__(self) -> Any:
        return iter(self.items)

    def __contains__(self, item: float) -> bool:
        return item in self.items

    def __call__(self, k: float) -> float:
        return self.items[0] * k


def _set(holder: Holder, value: Any) -> None:
    holder.thing = value


SEEN: dict[str, tuple[Any, Any, Any]] = {
    # what is read, what is there at first, and how it is changed
    "attribute": (lambda s: s.thing, 2.0, lambda s: _set(s, 3.0)),
    "type of a number": (lambda s: 1.0 if isinstance(s.thing, int) else 2.0, 1, lambda s: _set(s, 1.0)),
    "flag": (lambda s: 2.0 if s.thing else 3.0, True, lambda s: _set(s, False)),
    "none": (lambda s: 2.0 if s.thing is None else 3.0, None, lambda s: _set(s, 0)),
    "string": (lambda s: float(len(s.thing)), "ab", lambda s: _set(s, "abc")),
    "enum": (lambda s: 2.0 if s.thing is Kind.DOUBLE else 3.0, Kind.DOUBLE, lambda s: _set(s, Kind.TRIPLE)),
    "property": (lambda s: s.doubled, 2.0, lambda s: _set(s, 3.0)),
    "method": (lambda s: s.method(), 2.0, lambda s: _set(s, 3.0)),
    "list": (lambda s: sum(s.thing), [1.0, 2.0], lambda s: s.thing.append(3.0)),
    "item": (lambda s: s.thing[0], [1.0, 2.0], lambda s: s.thing.__setitem__(0, 4.0)),
    "nested list": (lambda s: s.thing[0][1], [[1.0, 2.0]], lambda s: s.thing[0].__setitem__(1, 4.0)),
    "tuple": (lambda s: sum(s.thing), (1.0, 2.0), lambda s: _set(s, (1.0, 3.0))),
    "dict": (lambda s: s.thing["a"], {"a": 1.0, "b": 2.0}, lambda s: s.thing.update(a=5.0)),
    "keys": (lambda s: float(len(s.thing)), {(1, 2): 1.0}, lambda s: s.thing.update({"b": 5.0})),
    "tuple keys": (lambda s: s.thing[1, 2], {(1, 2): 1.0}, lambda s: s.thing.update({(1, 2): 5.0})),
    "set": (lambda s: 2.0 if "a" in s.thing else 3.0, {"a"}, lambda s: s.thing.discard("a")),
    "list subclass": (lambda s: s.thing[0] + len(s.thing), Numbers([1.0]), lambda s: s.thing.append(2.0)),
    "object": (lambda s: s.thing.a, types.SimpleNamespace(a=1.0), lambda s: setattr(s.thing, "a", 2.0)),
    "other object": (lambda s: s.thing.a, types.SimpleNamespace(a=1.0), lambda s: _set(s, types.SimpleNamespace(a=2.0))),
    "container": (lambda s: s.thing[1] + len(s.thing), Wrapped(1.0, 2.0), lambda s: s.thing.items.append(3.0)),
    "contained": (lambda s: 2.0 if 2.0 in s.thing else 3.0, Wrapped(1.0, 2.0), lambda s: s.thing.items.pop()),
    "iterated": (lambda s: sum(s.thing), Wrapped(1.0, 2.0), lambda s: s.thing.items.append(3.0)),
    "called": (lambda s: s.thing(3.0), Wrapped(1.0), lambda s: s.thing.items.__setitem__(0, 2.0)),
    "bound method": (lambda s: s.thing(3.0), Wrapped(1.0).__call__, lambda s: _set(s, Wrapped(2.0).__call__)),
    "partial": (lambda s: s.thing(), functools.partial(float, 2), lambda s: _set(s, functools.partial(float, 3))),
    "function": (lambda s: s.thing(4.0), math.sqrt, lambda s: _set(s, math.floor)),
    "equality": (lambda s: 2.0 if s.thing == s.other else 3.0, "x", lambda s: _set(s, "y")),
    "identity": (lambda s: 2.0 if s.thing is s.self_again.thing else 3.0, Wrapped(1.0), lambda s: _set(s, Wrapped(1.0))),
}


@pytest.mark.parametrize("name", SEEN)
def test_whatever_is_read_from_self_is_a_guard(name: str) -> None:
    read, first, change = SEEN[name]
    value = copy.deepcopy(first)
    holder = Holder(read, thing=value, other="x")
    holder.self_again = types.SimpleNamespace(thing=holder.thing)
    x = vector(1.0)
    before = read(holder)
    assert [holder.f(x).value() for _ in range(3)] == [before] * 3
    if name == "bound method":  # a copy of the object is bound to it
        assert holder.thing(1.0) == 1.0
    change(holder)
    after = read(holder)
    assert before != after
    assert [holder.f(x).value() for _ in range(3)] == [after] * 3
    assert [len(v) for v in vars(holder)["f"].bound_cell.variants.values()] == [2]


def test_methods_without_self() -> None:
    x = vector(1.0)
    assert Holder(lambda s: s.static_method()).f(x).value() == 5
    assert Holder(lambda s: s.class_method()).f(x).value() == 6


FACTOR = 2.0
ACTIVATION = dy.tanh
SETTINGS = types.SimpleNamespace(factor=2.0)


@dy.cell
def of_globals(x: Any) -> Any:
    return dy.esum([ACTIVATION(x) * FACTOR for _ in range(1)]) * SETTINGS.factor


def test_globals(monkeypatch: pytest.MonkeyPatch) -> None:
    @dy.cell
    def outer(x: Any) -> Any:
        return of_globals(x)

    x = vector()
    for cell in (of_globals, outer):
        with monkeypatch.context() as patch:
            tanh = np.tanh(x.npvalue())
            np.testing.assert_allclose(cell(x).npvalue(), 4 * tanh)
            patch.setitem(globals(), "FACTOR", 3.0)
            np.testing.assert_allclose(cell(x).npvalue(), 6 * tanh)
            patch.setattr(SETTINGS, "factor", 5.0)
            np.testing.assert_allclose(cell(x).npvalue(), 15 * tanh)
            patch.setitem(globals(), "ACTIVATION", dy.logistic)
            np.testing.assert_allclose(cell(x).npvalue(), 15 / (1 + np.exp(-x.npvalue())))


def test_closures() -> None:
    factor, items = 2.0, [1.0]

    @dy.cell
    def scaled(x: Any) -> Any:
        return x * factor + sum(items)

    x = vector(1, 2)
    np.testing.assert_allclose(scaled(x).npvalue(), [3, 5])
    factor = 3.0
    np.testing.assert_allclose(scaled(x).npvalue(), [4, 7])
    items.append(1.0)
    np.testing.assert_allclose(scaled(x).npvalue(), [5, 8])


def test_a_flag_of_an_inner_cell() -> None:
    model = Model()

    class Outer:
        def __init__(self) -> None:
            self.inner = model
            self.step = model.switched

        @dy.cell
        def f(self, x: Any) -> Any:
            return self.inner.switched(x) + self.step(x)

    outer, x = Outer(), vector()
    for gated in (True, False, True):
        model.gated = gated
        expected = 2 * Model.switched.function(model, x).npvalue()
        np.testing.assert_allclose(outer.f(x).npvalue(), expected, rtol=1e-12)


def test_what_is_another_object_each_time_is_refused() -> None:
    class Lazy:
        def __getattr__(self, name: str) -> Any:
            if name != "thing":
                raise AttributeError(name)
            return np.ones(1)

        @dy.cell
        def f(self, x: Any) -> Any:
            return x * float(self.thing[0])

    with pytest.raises(CellError, match=r"reads Lazy\.thing, which gives another object each time"):
        Lazy().f(vector())


def test_a_cell_cannot_set_attributes() -> None:
    class Counting:
        @dy.cell
        def f(self, x: Any) -> Any:
            self.calls = 1
            return x

    line = here(-3)
    with pytest.raises(CellError, match="cannot set calls") as error:
        Counting().f(vector())
    assert line in str(error.value)


def test_debug_finds_hidden_state() -> None:
    state = iter([1.0, 1.0, 2.0])

    @dy.cell
    def f(x: Any) -> Any:
        return x * next(state)

    dy.init(debug=True)
    f(vector())
    f(vector())
    with pytest.raises(CellError, match="does not do now what it did when it was traced"):
        f(vector())
    dy.init(debug=False)
    f(vector())


def test_traces_of_the_same_program_batch() -> None:
    """A guard that failed gives a new trace; where that is the same Program, nothing is lost."""

    class Verbose:
        def __init__(self) -> None:
            self.calls = 0

        @dy.cell
        def f(self, x: Any) -> Any:
            if self.calls > 10:
                pass
            return dy.tanh(x)

    thing, x = Verbose(), vector()
    found = []
    for thing.calls in range(5):
        found.append(thing.f(x))
    assert batches(found) == 2


# ---- objects -----------------------------------------------------------------------------------------------------------


def test_copies_of_a_model_trace_their_own() -> None:
    model, x = Model(), vector()
    before = [model.step(x, x).npvalue() for _ in range(3)][-1]
    shallow, deep = copy.copy(model), copy.deepcopy(model)
    pickled = pickle.loads(pickle.dumps(model))
    for other in (deep, pickled):
        np.testing.assert_array_equal(other.step(x, x).npvalue(), before)
        other.W.set_value(np.zeros((3, 3)))
        other.U.set_value(np.zeros((3, 3)))
        np.testing.assert_allclose(other.step(x, x).npvalue(), np.tanh(other.b.as_array()))
    shallow.W = shallow.U = model.pc.add_parameters((3, 3), init=0.0)
    np.testing.assert_allclose(shallow.step(x, x).npvalue(), np.tanh(model.b.as_array()))
    np.testing.assert_array_equal(model.step(x, x).npvalue(), before)


def test_a_copied_model_trains_alone() -> None:
    model, x = Model(), vector()
    dy.sum_elems(model.step(x, x)).backward()
    dy.AdagradTrainer(model.pc).update()
    before = model.W.as_array()
    other = copy.deepcopy(model)
    trainer = dy.SimpleSGDTrainer(other.pc, learning_rate=1.0)
    dy.renew_cg()
    x = vector()
    dy.sum_elems(other.step(x, x)).backward()
    assert np.abs(other.W.grad_as_array()).max() > 0
    assert np.abs(model.W.grad_as_array()).max() == 0
    trainer.update()
    assert not np.allclose(other.W.as_array(), before)
    np.testing.assert_array_equal(model.W.as_array(), before)
    extra = other.pc.add_parameters((40, 40))
    assert np.shares_memory(other.W.data, other.pc.dense_values)
    assert np.shares_memory(extra.data, other.pc.dense_values)


def test_models_with_their_own_way_of_copying() -> None:
    class Own(Model):
        def __getstate__(self) -> Any:
            return dict(vars(self))

    class Cloned(Model):
        def __copy__(self) -> Cloned:
            other = Cloned.__new__(Cloned)
            vars(other).update(vars(self))
            return other

    x = vector()
    for cls in (Own, Cloned):
        model = cls()
        assert batches([model.step(x, x) for _ in range(4)]) <= 2
        other = copy.copy(model)
        other.W = other.U = other.pc.add_parameters((3, 3), init=0.0)
        np.testing.assert_allclose(other.step(x, x).npvalue(), np.tanh(other.b.as_array()))
        assert not np.allclose(model.step(x, x).npvalue(), other.step(x, x).npvalue())


def test_overridden_cells() -> None:
    class Base:
        @dy.cell
        def f(self, x: Any) -> Any:
            return x * 2

    class Plain(Base):
        def f(self, x: Any) -> Any:
            return super().f(x) + 1

    class Celled(Base):
        @dy.cell
        def f(self, x: Any) -> Any:
            return super().f(x) + 1

    class Explicit(Base):
        @dy.cell
        def f(self, x: Any) -> Any:
            return Base.f(self, x) + 1

    x = vector(1, 2)
    for cls in (Plain, Celled, Explicit):
        thing = cls()
        for _ in range(3):
            np.testing.assert_array_equal(thing.f(x).npvalue(), [3, 5])
            np.testing.assert_array_equal(Base.f(thing, x).npvalue(), [2, 4])
            np.testing.assert_array_equal(cls.f(thing, x).npvalue(), [3, 5])
        assert batches([thing.f(x) for _ in range(5)]) <= 2


def test_a_call_operator_is_traced_once() -> None:
    class Layer:
        def __init__(self) -> None:
            self.W = dy.ParameterCollection().add_parameters((3, 3))

        @dy.cell
        def __call__(self, x: Any) -> Any:
            return dy.tanh(self.W * x)

    class Stack:
        def __init__(self) -> None:
            self.layers = [Layer(), Layer()]

        @dy.cell
        def __call__(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x

    stack, x = Stack(), vector()
    assert batches([stack.layers[0](x) for _ in range(6)]) == 2
    expected = stack.layers[1](stack.layers[0](x)).npvalue()
    found = [stack(x) for _ in range(4)]
    assert batches(found) == 1
    np.testing.assert_allclose(found[3].npvalue(), expected, rtol=1e-12)


def test_instances_with_slots() -> None:
    class Bare:
        __slots__ = ("factor",)

        @dy.cell
        def f(self, x: Any) -> Any:
            return x * self.factor

    class Open:
        __slots__ = ("__dict__", "factor")

        @dy.cell
        def f(self, x: Any) -> Any:
            return x * self.factor

    with pytest.raises(TypeError, match='add "__dict__" to the __slots__'):
        Bare().f(vector())
    thing = Open()
    thing.factor = 3.0
    x = vector(1, 2)
    assert batches([thing.f(x) for _ in range(4)]) == 2
    other = copy.copy(thing)
    other.factor = 4.0
    np.testing.assert_array_equal(other.f(x).npvalue(), [4, 8])
    np.testing.assert_array_equal(thing.f(x).npvalue(), [3, 6])


def test_names_that_mean_something_elsewhere() -> None:
    for name in ("state", "signature", "graph", "config", "record", "slow", "missing", "r0", "out0", "a0"):
        namespace: dict[str, Any] = {"dy": dy}
        exec(f"@dy.cell\ndef {name}(x, k):\n    return dy.tanh(x) * k\n", namespace)
        cell, x = namespace[name], vector()
        for k in (1, 2, 3):
            np.testing.assert_allclose(cell(x, k).npvalue(), np.tanh(x.npvalue()) * k)
    double = dy.cell(lambda x: x * 2)
    for _ in range(3):
        np.testing.assert_array_equal(double(vector(1, 2)).npvalue(), [2, 4])


def test_static_and_class_level_cells() -> None:
    class Tools:
        @staticmethod
        @dy.cell
        def double(x: Any) -> Any:
            return x * 2

    x = vector(1, 2)
    assert batches([Tools.double(x), Tools().double(x), Tools.double(x)]) == 2
    np.testing.assert_array_equal(Tools.double(x).npvalue(), [2, 4])


def test_models_are_freed() -> None:
    @dy.cell
    def project(W: Any, x: Any) -> Any:
        return dy.tanh(W * x)

    def use() -> list[Any]:
        model, x = Model(), vector()
        h = project(model.W, model.step(x, model.embed(1)))
        for _ in range(3):
            h = model.child_sum(model.switched(h), [h, x])
        loss = model.loss(h, 1, 1.0)
        loss.backward()
        dy.AdamTrainer(model.pc).update()
        return [weakref.ref(p) for p in (model.W, model.words, model.pc)]

    references = use()
    dy.renew_cg()
    gc.collect()
    assert [r() for r in references] == [None] * 3


# ---- what a cell cannot do -------------------------------------------------------------------------------------------


READING = {
    "value": lambda e: e.value(),
    "npvalue": lambda e: e.npvalue(),
    "scalar_value": lambda e: e.scalar_value(),
    "vec_value": lambda e: e.vec_value(),
    "argmax_value": lambda e: e.argmax_value(),
    "float": lambda e: float(e),
    "comparison": lambda e: e > 0,
    "equality": lambda e: e == 0,
    "truth": lambda e: bool(e),
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
    "int": lambda k: int(k),
    "float": lambda k: float(k),
    "sqrt": lambda k: math.sqrt(k),
    "index": lambda k: [1, 2][k],
    "key": lambda k: {0: 1}[k],
    "text": lambda k: len(f"{k}"),
    "abs": lambda k: abs(k),
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
    for make in (lambda x: x + outside, lambda x: dy.esum([x, outside]), lambda x: dy.cmult(outside, x),
                 lambda x: outside, lambda x: x + dy.tanh(outside), lambda x: x * outside.value()[0],
                 lambda x: x + several, lambda x: dy.pick_batch_elem(several, 0)):  # fmt: skip
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
    for read in (lambda: scale.value(), lambda: float(scale), lambda: scale > 1, lambda: constant.npvalue()):

        @dy.cell
        def scaled(x: Any, read: Any = None) -> Any:
            return x * float(reading())

        reading = read
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
    for make in (lambda x: x + dy.inputVector([1, 2, 3]), lambda x: dy.sum_batches(x), lambda x: dy.pick_batch(x, [0, 1]),
                 lambda x: dy.concatenate_to_batch([x, x]), lambda x: dy.pick_batch_elem(x, 0)):  # fmt: skip
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


# ---- random numbers --------------------------------------------------------------------------------------------------


@dy.cell
def noisy(x: Any) -> Any:
    return dy.dropout(x, 0.5), dy.noise(x, 1.0) + dy.random_uniform(8) + dy.dropout(x, 0.5)


def draws(strategy: str) -> list[np.ndarray]:
    dy.renew_cg()
    x = dy.inputVector(np.ones(8))
    found = [e for _ in range(4) for e in noisy(x)]
    with dy.autobatch(strategy):
        dy.forward(found[::-1])
        return [e.npvalue() for e in found]


def test_every_call_draws_anew_and_a_seed_repeats_it() -> None:
    first = draws("agenda")
    assert len({tuple(a) for a in first}) == len(first)
    assert not np.array_equal(first[0], draws("agenda")[0])
    for strategy in STRATEGIES:
        dy.init(dtype="float64", seed=1)
        for a, b in zip(first, draws(strategy)):
            np.testing.assert_allclose(a, b, rtol=1e-14)


def test_gradients_see_the_numbers_that_were_drawn() -> None:
    for quiet in (False, True):
        dy.renew_cg()
        x = dy.inputVector(np.full(50, 2.0))
        dropped, _ = noisy.function(x)[0], None
        inside = dy.cell(lambda x: dy.square(dy.dropout(x, 0.5)))(x)
        if quiet:
            with dy.no_grad():
                inside.npvalue()
        dy.sum_elems(inside).backward(full=True)
        kept = inside.npvalue() != 0
        assert 5 < kept.sum() < 45
        np.testing.assert_allclose(x.gradient(), np.where(kept, 2 * 2.0 * 4, 0.0))
        assert dropped.npvalue().shape == (50,)


def test_dropout_of_list_elements_draws_for_each(tier: None) -> None:
    @dy.cell
    def summed(children: list[Any], rate: float) -> Any:
        return dy.esum([dy.dropout(c, rate) * 10.0 + dy.dropout(c, rate) for c in children])

    x = dy.inputVector(np.ones(400))
    results = [summed([x] * n, 0.5) for n in (1, 3, 3, 2)]
    digits = [r.npvalue() for r in results]
    assert batches(results) <= 2
    for n, value in zip((1, 3, 3, 2), digits):
        tens, ones = np.divmod(np.round(value), 10)
        assert set(tens) <= set(range(0, 2 * n + 1, 2)) and set(ones) <= set(range(0, 2 * n + 1, 2))
        assert abs(tens.mean() - n) < 0.4 and abs(ones.mean() - n) < 0.4
        if n == 3:  # a mask shared by the elements would give zero or six
            assert 0.5 < np.isin(tens, [2, 4]).mean() < 0.95
        assert abs(np.corrcoef(tens, ones)[0, 1]) < 0.25
    assert not np.array_equal(digits[1], digits[2])
    dy.sum_elems(dy.esum(results)).backward(full=True)
    np.testing.assert_allclose(x.gradient(), sum(digits), rtol=1e-12)


def test_draws_in_a_loop_belong_to_elements() -> None:
    for make in (lambda xs: dy.esum([x + dy.random_normal(3) for x in xs]),
                 lambda xs: dy.esum([x + dy.dropout(dy.ones(3), 0.5) for x in xs])):  # fmt: skip
        with pytest.raises(CellError, match="draw them outside of the loop"):
            dy.cell(make)([vector()])


def test_nothing_warns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, x = Model(), vector()
        loss = model.loss(model.child_sum(model.step(x, x), [x, x]), 1, 1.0)
        loss.backward()
