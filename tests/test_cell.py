"""Cells: what they take and return, and that they equal the undecorated function under every strategy."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest
from cell_model import STRATEGIES, Model, batches, gradients, here, vector

import dynbatch as dy
from dynbatch.errors import CellError, IndexRangeError, ShapeError

pytestmark = pytest.mark.usefixtures("float64")


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
def test_results_and_gradients_are_those_of_the_undecorated_functions(
    strategy: str, interpreted: None, tier: None
) -> None:
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
    assert batches(found) == 3
    assert [e.value()[0] for e in found] == [3, 6, 3]
    dy.sum_elems(dy.esum(found)).backward()
    assert A.grad_as_array().sum() == 2 * B.grad_as_array().sum()


def test_a_parameter_used_twice() -> None:
    W = dy.ParameterCollection().add_parameters((3, 3))

    @dy.cell
    def twice(x: Any) -> Any:
        return dy.sum_elems(dy.tanh(W * (W * x)) + W * x)

    grads = []
    for f in (twice, twice.function):
        W.scale_gradient(0)
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
    with pytest.raises(IndexRangeError, match=r"index 9 .*/_3 of size 7") as error:
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
    for tables in ([small, large], [large, small]):

        @dy.cell
        def both(i: int) -> Any:
            return dy.esum([dy.lookup(table, i) for table in tables])  # noqa: B023

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
        inside = dy.cell(lambda x: dy.square(dy.dropout(x, 0.5)))(x)
        if quiet:
            with dy.no_grad():
                inside.npvalue()
        dy.sum_elems(inside).backward(full=True)
        kept = inside.npvalue() != 0
        assert 5 < kept.sum() < 45
        np.testing.assert_allclose(x.gradient(), np.where(kept, 2 * 2.0 * 4, 0.0))


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
    loops = [
        lambda xs: dy.esum([x + dy.random_normal(3) for x in xs]),
        lambda xs: dy.esum([x + dy.dropout(dy.ones(3), 0.5) for x in xs]),
    ]
    for make in loops:
        with pytest.raises(CellError, match="draw them outside of the loop"):
            dy.cell(make)([vector()])


def test_nothing_warns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, x = Model(), vector()
        loss = model.loss(model.child_sum(model.step(x, x), [x, x]), 1, 1.0)
        loss.backward()


def test_a_cell_of_payload_alone_follows_the_precision_of_its_graph() -> None:
    @dy.cell
    def filled(number):
        return dy.ones(3) * number

    for dtype in ("float32", "float64", "float32"):
        dy.init(dtype=dtype)
        for number in (2, 3):  # traced, and recorded by the recorder
            e = filled(number)
            assert e.type.dtype.name == dtype
            assert (e + 1.0).value() == [number + 1.0] * 3
