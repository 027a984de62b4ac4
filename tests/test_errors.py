"""Bad input gets a clear error on the user's line, and leaves the graph and the parameters as they were."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dynbatch as dy
import dynbatch.batching.execution
import dynbatch.cpu.memory

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture
def W() -> Any:
    return dy.ParameterCollection("model").add_parameters((2, 3), name="W")


@pytest.fixture
def table() -> Any:
    return dy.ParameterCollection("model").add_lookup_parameters((5, 3), name="words")


def vector(n: int = 3) -> Any:
    return dy.inputVector([float(i + 1) for i in range(n)])


def names_this_line(error: pytest.ExceptionInfo[BaseException]) -> bool:
    """Whether the message starts with a line of this file."""
    return f"{__file__}:" in str(error.value)


# ---- shapes ----------------------------------------------------------------------------------------------------------


MISMATCHES: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "add": (lambda: vector(3) + vector(2), ["(3,)", "(2,)"]),
    "subtract": (lambda: dy.zeros((2, 3)) - dy.zeros((3, 2)), ["(2, 3)", "(3, 2)"]),
    "cmult": (lambda: dy.cmult(vector(3), vector(2)), ["(3,)", "(2,)"]),
    "cdiv": (lambda: vector(3) / vector(2), ["(3,)", "(2,)"]),
    "pow": (lambda: dy.pow(vector(3), vector(2)), ["(3,)", "(2,)"]),
    "bmax": (lambda: dy.bmax(vector(3), vector(2)), ["(3,)", "(2,)"]),
    "matrix product": (lambda: dy.zeros((2, 3)) * vector(2), ["(2, 3)", "(2,)"]),
    "affine_transform": (lambda: dy.affine_transform([vector(2), dy.zeros((2, 3)), vector(2)]), ["(2, 3)", "(2,)"]),
    "dot_product": (lambda: dy.dot_product(vector(3), vector(2)), ["(3,)", "(2,)"]),
    "squared_distance": (lambda: dy.squared_distance(vector(3), vector(2)), ["(3,)", "(2,)"]),
    "l1_distance": (lambda: dy.l1_distance(vector(3), vector(2)), ["(3,)", "(2,)"]),
    "huber_distance": (lambda: dy.huber_distance(vector(3), vector(2)), ["(3,)", "(2,)"]),
    "binary_log_loss": (lambda: dy.binary_log_loss(vector(3), vector(2)), ["(3,)", "(2,)"]),
    "average": (lambda: dy.average([vector(3), vector(2)]), ["(3,)", "(2,)", "position 1"]),
    "emax": (lambda: dy.emax([vector(3), vector(3), vector(2)]), ["(3,)", "(2,)", "position 2"]),
    "logsumexp": (lambda: dy.logsumexp([vector(3), vector(2)]), ["(3,)", "(2,)"]),
    "concatenate": (lambda: dy.concatenate([dy.zeros((2, 3)), dy.zeros((2, 2))]), ["(2, 3)", "(2, 2)"]),
    "concatenate_to_batch": (lambda: dy.concatenate_to_batch([vector(3), vector(2)]), ["(3,)", "(2,)"]),
    "reshape": (lambda: dy.reshape(vector(3), (2, 2)), ["(3,)", "(2, 2)"]),
    "transpose": (lambda: dy.transpose(dy.zeros((2, 3, 2))), ["(2, 3, 2)"]),
    "softmax": (lambda: dy.softmax(vector(3), 1), ["(3,)", "1"]),
    "sum_dim": (lambda: dy.sum_dim(vector(3), [1]), ["(3,)", "1"]),
    "mean_dim": (lambda: dy.mean_dim(vector(3), [1]), ["(3,)", "1"]),
    "max_dim": (lambda: dy.max_dim(vector(3), 1), ["(3,)", "1"]),
    "argmax": (lambda: dy.argmax(vector(3), d=1), ["(3,)", "1"]),
    "pick": (lambda: dy.pick(vector(3), 0, 1), ["(3,)", "1"]),
    "select_cols": (lambda: dy.select_cols(vector(3), [0]), ["(3,)", "1"]),
    "pickneglogsoftmax": (lambda: dy.pickneglogsoftmax(dy.zeros((2, 2)), 0), ["(2, 2)"]),
    "hinge": (lambda: dy.hinge(dy.zeros((2, 2)), 0), ["(2, 2)"]),
    "layer_norm": (lambda: dy.layer_norm(vector(3), vector(2), vector(3)), ["(3,)", "(2,)"]),
    "zeros": (lambda: dy.zeros((2, 0)), ["(2, 0)"]),
    "ones": (lambda: dy.ones(-1), ["-1"]),
    "constant": (lambda: dy.constant((0,), 1.0), ["(0,)"]),
    "random_normal": (lambda: dy.random_normal((0,)), ["(0,)"]),
    "inputTensor": (lambda: dy.inputTensor([]), ["(0,)"]),
}


@pytest.mark.parametrize("op", MISMATCHES)
def test_a_shape_error_names_the_op_the_shapes_and_the_line(op: str) -> None:
    build, parts = MISMATCHES[op]
    with pytest.raises(dy.ShapeError) as error:
        build()
    assert names_this_line(error)
    for part in [op, *parts]:
        assert part in str(error.value)


def test_the_line_is_the_one_that_called_the_op(W: Any) -> None:
    x = vector(2)
    line = inspect.currentframe().f_lineno + 2  # type: ignore[union-attr]
    with pytest.raises(dy.ShapeError) as error:
        W * x
    assert f"{__file__}:{line}:" in str(error.value)


def test_a_shape_error_names_the_parameter(W: Any) -> None:
    for build in (lambda: W * vector(2), lambda: dy.affine_transform([vector(2), W, vector(2)]), lambda: W + vector(3)):
        with pytest.raises(dy.ShapeError, match=r"/model/W \(2, 3\)"):
            build()


def test_a_shape_error_in_a_cell_names_the_op_and_the_line(W: Any) -> None:
    @dy.cell
    def product(x):
        return W * x

    with pytest.raises(dy.ShapeError, match=r"matrix product.*\(2, 3\).*\(2,\).*/model/W") as error:
        product(vector(2))
    assert names_this_line(error)
    assert product(vector(3)).dim() == ((2,), 1)


def test_two_vectors_have_no_matrix_product() -> None:
    with pytest.raises(dy.ShapeError, match=r"cmult.*dot_product"):
        vector() * vector()


def test_batch_sizes_must_agree() -> None:
    two, three = (dy.inputTensor(np.zeros((4, n)), batched=True) for n in (2, 3))
    with pytest.raises(dy.ShapeError, match=r"batch sizes \[2, 3\]"):
        two + three
    with pytest.raises(dy.ShapeError, match=r"batch sizes \[2, 3\]"):
        dy.pick_batch(two, [0, 1, 2])


def test_an_error_records_nothing() -> None:
    """Whatever was refused, the rest of the graph is as it was."""
    x = vector()
    wanted = np.tanh([1.0, 2.0, 3.0])
    refused: list[Callable[[], Any]] = [build for build, _ in MISMATCHES.values()]
    refused += WRONG_TYPES.values()
    for build in refused:
        with pytest.raises((dy.DynbatchError, TypeError, ValueError)):
            build()
        np.testing.assert_allclose(dy.tanh(x).npvalue(), wanted)
        np.testing.assert_allclose((2.0 * dy.tanh(x)).npvalue(), 2 * wanted)


@pytest.mark.parametrize("op", [dy.esum, dy.average, dy.emax, dy.logsumexp, dy.concatenate, dy.concatenate_cols,
                                dy.concatenate_to_batch])  # fmt: skip
def test_an_empty_list_is_refused(op: Callable[[list[Any]], Any]) -> None:
    with pytest.raises(dy.ShapeError, match=f"{op.__name__}: the list is empty") as error:
        op([])
    assert names_this_line(error)


def test_an_empty_list_of_indices_is_refused(table: Any) -> None:
    for build in (lambda: dy.select_rows(vector(), []), lambda: dy.pick_batch(vector(), []),
                  lambda: dy.lookup_batch(table, []), lambda: vector()[[]],
                  lambda: dy.pick_batch_elems(dy.concatenate_to_batch([vector()]), [])):  # fmt: skip
        with pytest.raises(dy.ShapeError, match="empty"):
            build()
    with pytest.raises(dy.IndexRangeError, match="empty"):
        vector()[2:2]


# ---- types -----------------------------------------------------------------------------------------------------------


WRONG_TYPES: dict[str, Callable[[], Any]] = {
    "op on a string": lambda: dy.tanh("x"),
    "op on None": lambda: dy.tanh(None),
    "op on a number": lambda: dy.tanh(1.0),
    "op on an array": lambda: dy.tanh(np.ones(3)),
    "binary op on a number": lambda: dy.cmult(vector(), 2.0),
    "binary op on None": lambda: dy.dot_product(None, vector()),
    "sum with None": lambda: vector() + None,
    "product with a list": lambda: vector() * [1.0, 2.0, 3.0],
    "difference with a string": lambda: "x" - vector(),
    "list with a string": lambda: dy.esum([vector(), "x"]),
    "list that is an expression's number": lambda: dy.concatenate([vector(), 1.0]),
    "affine with a number": lambda: dy.affine_transform([1.0, vector(), vector()]),
    "scalarInput of a string": lambda: dy.scalarInput("1"),
    "scalarInput of None": lambda: dy.scalarInput(None),
    "constant of a string": lambda: dy.constant((2,), "x"),
    "rate that is a string": lambda: dy.elu(vector(), "x"),
    "rate that is an expression": lambda: dy.elu(vector(), dy.scalarInput(1.0)),
    "margin that is None": lambda: dy.hinge(vector(), 0, None),
    "mean that is a string": lambda: dy.random_normal((2,), "x"),
    "exponent that is a string": lambda: dy.pow(vector(), "x"),
    "index that is a float": lambda: dy.pick(vector(), 1.0),
    "index that is None": lambda: vector()[None],
    "index that is a tuple": lambda: dy.zeros((2, 2))[0, 0],
    "input that is text": lambda: dy.inputTensor(["x"]),
    "input that is ragged": lambda: dy.inputTensor([[1.0], [1.0, 2.0]]),
    "input that is complex": lambda: dy.inputTensor([1j]),
    "lookup in a vector": lambda: dy.lookup(vector(), 0),
    "parameter of a vector": lambda: dy.parameter(vector()),
}


@pytest.mark.parametrize("what", WRONG_TYPES)
def test_a_wrong_type_is_refused_with_the_line(what: str) -> None:
    with pytest.raises((TypeError, dy.ShapeError)) as error:
        WRONG_TYPES[what]()
    assert names_this_line(error)


def test_a_table_is_not_an_operand(table: Any) -> None:
    for build in (lambda: dy.tanh(table), lambda: vector() + table, lambda: dy.concatenate([vector(), table])):
        with pytest.raises(TypeError, match="LookupParameter"):
            build()


# ---- indices ---------------------------------------------------------------------------------------------------------


def test_lookup_out_of_range(table: Any) -> None:
    for build in (lambda: dy.lookup(table, 5), lambda: table[-6], lambda: dy.lookup_batch(table, [0, 5])):
        with pytest.raises(dy.IndexRangeError, match=r"index (5|-6) .*/model/words of size 5") as error:
            build()
        assert names_this_line(error)
    with pytest.raises(TypeError, match="integer"):
        dy.lookup(table, 1.5)


@pytest.mark.parametrize(("build", "message"), [
    (lambda: dy.pick(vector(), 3), "pick: index 3 .*size 3"),
    (lambda: dy.pick(vector(), -4), "pick: index -4 .*size 3"),
    (lambda: vector()[3], "index 3 .*size 3"),
    (lambda: dy.pick_batch(vector(), [0, 3]), "pick_batch: index 3 .*size 3"),
    (lambda: dy.pick(dy.zeros((2, 3)), 3, 1), "pick: index 3 .*size 3"),
    (lambda: dy.pick_range(vector(), 1, 4), "pick_range: range 1 to 4"),
    (lambda: dy.pick_range(vector(), 2, 2), "pick_range: range 2 to 2"),
    (lambda: dy.select_rows(vector(), [0, 3]), "select_rows: index 3 .*size 3"),
    (lambda: dy.select_cols(dy.zeros((2, 3)), [3]), "select_cols: index 3 .*size 3"),
    (lambda: dy.pickneglogsoftmax(vector(), 3), "pickneglogsoftmax: index 3 .*size 3"),
    (lambda: dy.pickneglogsoftmax_batch(vector(), [0, 3]), "pickneglogsoftmax.*: index 3 .*size 3"),
    (lambda: dy.hinge(vector(), 3), "hinge: index 3 .*size 3"),
    (lambda: dy.hinge_batch(vector(), [0, 3]), "hinge.*: index 3 .*size 3"),
    (lambda: dy.log_softmax(vector(), restrict=[3]), "log_softmax: index 3 .*size 3"),
    (lambda: dy.pick_batch_elem(dy.concatenate_to_batch([vector()] * 2), 2), "pick_batch_elem: index 2 .*size 2"),
    (lambda: dy.pick_batch_elems(dy.concatenate_to_batch([vector()] * 2), [2]), "pick_batch_elems: index 2 .*size 2"),
])  # fmt: skip
def test_an_index_out_of_range(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(dy.IndexRangeError, match=message) as error:
        build()
    assert names_this_line(error)
    assert isinstance(error.value, IndexError)


@pytest.mark.parametrize("index", [3, -4, 10**6, 2**70])
def test_an_index_out_of_range_given_to_a_cell(table: Any, index: int) -> None:
    """Payload is checked too, and nothing is recorded that could not be run."""

    @dy.cell
    def loss(x, label):
        return dy.pickneglogsoftmax(x, label)

    @dy.cell
    def row(word):
        return dy.lookup(table, word)

    x = vector()
    good = loss(x, 1).value()
    for call in (lambda: loss(x, index), lambda: row(2 * index)):
        with pytest.raises(dy.IndexRangeError, match=f"({index}|{2 * index}) ") as error:
            call().value()
        assert names_this_line(error)
        assert loss(x, 1).value() == good
        np.testing.assert_array_equal(row(2).npvalue(), table.row_as_array(2))


# ---- graphs ----------------------------------------------------------------------------------------------------------


STALE: dict[str, Callable[[Any], Any]] = {
    "value": lambda e: e.value(),
    "npvalue": lambda e: e.npvalue(),
    "forward": lambda e: e.forward(),
    "backward": lambda e: e.backward(),
    "gradient": lambda e: e.gradient(),
    "unary op": lambda e: dy.tanh(e),
    "binary op": lambda e: e + vector(1),
    "binary op at the right": lambda e: vector(1) + e,
    "number": lambda e: e * 2.0,
    "list": lambda e: dy.esum([vector(1), e]),
    "average": lambda e: dy.average([e]),
    "concatenate": lambda e: dy.concatenate([e, vector(1)]),
    "affine_transform": lambda e: dy.affine_transform([vector(1), dy.zeros((1, 1)), e]),
    "pick": lambda e: dy.pick(e, 0),
    "item": lambda e: e[0],
    "pickneglogsoftmax": lambda e: dy.pickneglogsoftmax(e, 0),
    "softmax": lambda e: dy.softmax(e),
    "dropout": lambda e: dy.dropout(e, 0.5),
    "sum_batches": lambda e: dy.sum_batches(e),
    "pick_batch_elem": lambda e: dy.pick_batch_elem(e, 0),
    "pick_batch_elems": lambda e: dy.pick_batch_elems(e, [0]),
    "concatenate_to_batch": lambda e: dy.concatenate_to_batch([e, vector(1)]),
    "pick_batch": lambda e: dy.pick_batch(e, [0, 0]),
    "sum_dim": lambda e: dy.sum_dim(e, []),
    "comparison": lambda e: dy.sum_batches(e) > 0,
}


@pytest.mark.parametrize("batched", [False, True], ids=["plain", "batched"])
@pytest.mark.parametrize("use", STALE)
def test_a_stale_expression_is_refused(use: str, batched: bool) -> None:
    stale = dy.inputTensor([1.0, 2.0], batched=True) if batched else vector(1)
    dy.renew_cg()
    for _ in range(3):
        dy.tanh(vector(1))  # the new graph has values of the same numbers
    with pytest.raises(dy.StaleExpressionError, match="renew_cg"):
        STALE[use](stale).value()


def test_a_stale_expression_is_refused_by_a_cell() -> None:
    @dy.cell
    def twice(x, others):
        return x + dy.esum(others)

    stale = vector()
    fresh = [vector() for _ in range(2)]
    twice(stale, fresh).value()
    dy.renew_cg()
    fresh = [vector() for _ in range(2)]
    for call in (lambda: twice(stale, fresh), lambda: twice(fresh[0], [fresh[1], stale])):
        with pytest.raises(dy.StaleExpressionError, match="renew_cg"):
            call()
    assert twice(fresh[0], fresh).value() == [3, 6, 9]


def in_a_thread(task: Callable[[], Any]) -> Any:
    """What the task returns or raises in a thread of its own."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(task())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


@pytest.mark.parametrize("use", [name for name in STALE if name != "gradient"])
def test_graphs_of_two_threads_do_not_mix(use: str) -> None:
    foreign = in_a_thread(lambda: dy.tanh(vector(1)))
    vector(1)
    with pytest.raises(dy.StaleExpressionError, match="two"):
        STALE[use](foreign).value()


def test_two_threads_record_and_train_at_once() -> None:
    """Each thread has its own graph; parameters are shared."""
    pc = dy.ParameterCollection()
    W = pc.add_parameters((20, 20))
    values = W.as_array()
    failures: list[str] = []
    barrier = threading.Barrier(4)

    def work(k: int) -> None:
        barrier.wait()
        for n in range(30):
            dy.renew_cg()
            xs = [dy.inputVector(np.full(20, float(k + i))) for i in range(n % 5 + 1)]
            total = dy.esum([dy.tanh(W * x) for x in xs]).npvalue()
            wanted = sum(np.tanh(values @ np.full(20, float(k + i))) for i in range(n % 5 + 1))
            if not np.allclose(total, wanted):
                failures.append(f"thread {k}, graph {n}")

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# ---- backward --------------------------------------------------------------------------------------------------------


def test_backward_needs_a_scalar(W: Any) -> None:
    y = W * vector()
    with pytest.raises(dy.BackwardError, match=r"scalar.*\(2,\)") as error:
        y.backward()
    assert names_this_line(error)
    batch = dy.sum_elems(W * dy.inputTensor(np.ones((3, 4)), batched=True))
    with pytest.raises(dy.BackwardError, match=r"4 batch elements.*sum_batches"):
        batch.backward()
    assert not W.grad_as_array().any()
    dy.sum_batches(batch).backward()
    np.testing.assert_allclose(W.grad_as_array(), 4)


@pytest.mark.parametrize("change", ["update", "set_value", "scale", "zero", "init_row"])
def test_backward_after_the_parameters_changed(change: str) -> None:
    pc = dy.ParameterCollection()
    W, table = pc.add_parameters((2, 3), name="W"), pc.add_lookup_parameters((3, 3))
    trainer = dy.SimpleSGDTrainer(pc, 0.1)
    loss = dy.squared_norm(W * table[1])
    loss.backward()
    {
        "update": trainer.update,
        "set_value": lambda: W.set_value(np.ones((2, 3))),
        "scale": lambda: W.scale(2.0),
        "zero": W.zero,
        "init_row": lambda: table.init_row(1, np.ones(3)),
    }[change]()
    pc.reset_gradient()
    with pytest.raises(dy.BackwardError, match=r"changed since.*renew"):
        loss.backward()
    assert not W.grad_as_array().any() and not table.grad_as_array().any()
    dy.renew_cg()
    dy.squared_norm(W * table[1]).backward()


def test_a_parameter_can_be_added_between_forward_and_backward() -> None:
    """Buffers move then, values do not."""
    pc = dy.ParameterCollection()
    W = pc.add_parameters((2, 3))
    loss = dy.sum_elems(W * vector())
    loss.value()
    for _ in range(5):
        pc.add_parameters((50, 50))
    loss.backward()
    np.testing.assert_allclose(W.grad_as_array(), np.ones((2, 1)) * [1, 2, 3])


def test_a_new_value_of_a_parameter_is_used(W: Any) -> None:
    """In the same graph too, what is recorded after the change sees it."""
    x = vector()
    before = [dy.tanh(W).npvalue(), (W * x).npvalue()]
    W.set_value(np.ones((2, 3)))
    after = [dy.tanh(W).npvalue(), (W * x).npvalue()]
    np.testing.assert_allclose(after[0], np.tanh(np.ones((2, 3))))
    np.testing.assert_allclose(after[1], [6, 6])
    assert not np.allclose(before[0], after[0])


def test_gradient_needs_a_full_backward(W: Any) -> None:
    x = vector()
    loss = dy.sum_elems(W * x)
    with pytest.raises(dy.BackwardError, match="full=True"):
        x.gradient()
    loss.backward()
    with pytest.raises(dy.BackwardError, match="full=True"):
        x.gradient()
    loss.backward(full=True)
    np.testing.assert_allclose(x.gradient(), W.as_array().sum(0))
    np.testing.assert_array_equal(vector().gradient(), [0, 0, 0])


def test_backward_without_parameters_is_allowed() -> None:
    dy.squared_norm(vector()).backward()


# ---- values ----------------------------------------------------------------------------------------------------------


def test_an_expression_has_no_truth_value() -> None:
    for e in (vector(), dy.scalarInput(1.0), dy.ParameterCollection().add_parameters(1)):
        with pytest.raises(TypeError, match=r"value\(\)"):
            bool(e)
        with pytest.raises(TypeError, match=r"value\(\)"):
            if e:
                pass


def test_comparisons_with_numbers_read_the_value() -> None:
    e = dy.scalarInput(2.0)
    assert e > 1 and e >= 2 and e < 3.5 and e <= 2 and not e > 2 and not e < 2
    assert 1 < e <= 2 and 3 > e
    assert e == 2 and e == 2.0 and e != 3 and (e == 3) is False
    for number in (np.float32(2), np.float64(2), np.int64(2)):
        assert e == number and (e != number) is False and e <= number and not e > number
        assert number == e and number >= e and not number < e
    assert e > dy.scalarInput(1.0)
    assert (e == e) is True and (e == dy.scalarInput(2.0)) is False, "expressions are compared by identity"
    assert (e == None) is False and e in [e] and len({e, e}) == 1  # noqa: E711
    with pytest.raises(ValueError, match=r"\(3,\)"):
        assert vector() > 1
    with pytest.raises(TypeError, match="compared"):
        assert e > "1"


def test_numbers_of_numpy_are_numbers() -> None:
    x = vector()
    for number in (np.float32(2), np.float64(2), np.int64(2), np.float16(2)):
        for e, wanted in (
            (number * x, [2, 4, 6]),
            (x * number, [2, 4, 6]),
            (number + x, [3, 4, 5]),
            (number - x, [1, 0, -1]),
            (number / x, [2, 1, 2 / 3]),
            (x / number, [0.5, 1, 1.5]),
        ):
            assert isinstance(e, dy.Expression)
            np.testing.assert_allclose(e.npvalue(), wanted)
    assert dy.pick(x, np.int32(1)).value() == 2
    with pytest.raises(TypeError):
        np.ones(3) * x


def test_ways_to_read_a_value(W: Any) -> None:
    scalar, matrix = dy.sum_elems(vector()), W + 0.0
    assert scalar.value() == 6.0 and float(scalar) == 6.0 and scalar.scalar_value() == 6.0
    assert vector().value() == [1, 2, 3] and vector().vec_value() == [1, 2, 3]
    np.testing.assert_array_equal(matrix.value(), W.as_array())
    assert matrix.vec_value() == W.as_array().reshape(-1, order="F").tolist()
    assert vector().argmax_value() == 2
    assert matrix.forward().shape == (2, 3)
    assert len(vector()) == 3 and [e.value() for e in vector()] == [1, 2, 3]
    for read in (vector().scalar_value, lambda: float(vector())):
        with pytest.raises(ValueError, match=r"\(3,\)"):
            read()


# ---- settings --------------------------------------------------------------------------------------------------------


def test_an_unknown_strategy_lists_the_valid_ones() -> None:
    for choose in (lambda: dy.init(autobatch="fast"), lambda: dy.autobatch("fast").__enter__()):
        with pytest.raises(dy.ConfigurationError, match=r"'fast'.*off, depth, agenda"):
            choose()
    assert dy.tanh(vector()).value()


@pytest.mark.parametrize(("setting", "message"), [
    ({"device": "tpu"}, "'tpu'.*cpu"),
    ({"dtype": "float16"}, "'float16'.*float32, float64"),
    ({"threads": 0}, "threads"),
    ({"seed": -1}, "seed"),
])  # fmt: skip
def test_an_unknown_setting_lists_the_valid_ones(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(dy.ConfigurationError, match=message):
        dy.init(**setting)


def test_what_is_fixed_once_parameters_exist(W: Any) -> None:
    for setting in ({"dtype": "float32"}, {"seed": 3}):
        with pytest.raises(dy.ConfigurationError, match=rf"{next(iter(setting))}.*after parameters.*autobatch"):
            dy.init(**setting)
    dy.init(autobatch="depth", check_validity=True, debug=False)
    dy.init(dtype="float64", seed=1)  # what they are already


@pytest.mark.usefixtures("tier")
def test_what_has_no_operands_follows_the_precision_of_its_graph() -> None:
    """In one process, first in one precision and then in the other."""
    for dtype in ("float32", "float64", "float32"):
        dy.init(dtype=dtype)
        made = [dy.scalarInput(2.0), dy.zeros(2), dy.ones(2), dy.constant(2, 2.0), dy.random_uniform(2)]
        made += [dy.random_normal(2), dy.random_bernoulli(2, 0.5), dy.random_gumbel(2), dy.inputVector([2.0, 2.0])]
        for e in made:
            assert e.type.dtype.name == dtype
            assert dy.log(e * 1.0 + 1.0 - e + 1.0).npvalue() == pytest.approx(np.log(2), rel=1e-6)


# ---- faults while running --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["off", "depth", "agenda"])
@pytest.mark.usefixtures("tier")
def test_a_nan_is_found_under_check_validity(strategy: str) -> None:
    dy.init(check_validity=True, autobatch=strategy)
    xs = [dy.scalarInput(x) for x in (1.0, -1.0, 2.0)]
    logs = [dy.log(x * 1.0) for x in xs]
    with pytest.raises(dy.ValidityError, match=r"NaN.*\blog\b.*batch \d") as error:
        dy.esum(logs).value()
    assert isinstance(error.value, ArithmeticError)
    with pytest.raises(dy.ValidityError, match=r"infinity.*\bexp\b.*batch \d"):
        dy.exp(dy.scalarInput(1000.0)).value()
    assert (xs[0] * 3.0).value() == 3.0, "the graph can still be used"
    dy.init(check_validity=False)
    first, second = logs[1].value(), logs[2].value()
    assert np.isnan(first) and second == pytest.approx(np.log(2))


@pytest.mark.usefixtures("tier")
def test_a_nan_within_a_cell_is_found() -> None:
    dy.init(check_validity=True)

    @dy.cell
    def inner(x):
        return dy.tanh(dy.log(x)) + 1.0

    with pytest.raises(dy.ValidityError, match=r"NaN.*inner"):
        inner(dy.scalarInput(-1.0)).value()


def test_a_nan_elsewhere_does_not_matter() -> None:
    """A value does not depend on what else is in the batch; nor does the error that asking for it gives."""
    dy.init(check_validity=True)
    bad, good = dy.log(dy.scalarInput(-1.0)), dy.log(dy.scalarInput(1.0))
    assert good.value() == 0.0
    with pytest.raises(dy.ValidityError):
        bad.value()


def test_a_nan_in_a_gradient_is_found() -> None:
    dy.init(check_validity=True)
    W = dy.ParameterCollection().add_parameters(2, init=np.array([0.0, 1.0]))
    loss = dy.sum_elems(dy.sqrt(W))
    with pytest.raises(dy.ValidityError, match=r"infinity|NaN"):
        loss.backward()
    assert np.isfinite(W.grad_as_array()).all(), "the parameters' gradients are as they were"


def start_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that cannot use what earlier graphs have touched, for which nothing would be asked again."""
    dy.renew_cg()
    monkeypatch.setattr(dynbatch.batching.execution, "_idle", [])


@pytest.mark.cpu
@pytest.mark.parametrize("strategy", ["off", "depth", "agenda"])
def test_out_of_memory(monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    """It says how much was wanted; the graph is as before, and runs once there is memory."""
    start_without_memory(monkeypatch)
    dy.init(autobatch=strategy)
    W = dy.ParameterCollection().add_parameters((3000, 3))
    small = W * vector()
    first = small.npvalue()
    large = [dy.tanh(W * (vector() * float(k))) for k in range(2000)]
    loss = dy.esum([dy.sum_elems(e) for e in large]) * 1e-9
    with monkeypatch.context() as patch:
        patch.setattr(dynbatch.cpu.memory, "available_bytes", lambda: 1 << 20)
        with pytest.raises(dy.OutOfMemoryError, match=r"\d+ MiB more were wanted.*1 MiB are available") as error:
            loss.value()
        assert isinstance(error.value, MemoryError)
        np.testing.assert_array_equal(small.npvalue(), first)
        assert (dy.sum_elems(small) * 1.0).value() == pytest.approx(first.sum())
    wanted = sum(np.tanh(k * first).sum() for k in range(2000)) * 1e-9
    assert loss.value() == pytest.approx(wanted)
    loss.backward()
    assert np.isfinite(W.grad_as_array()).all() and W.grad_as_array().any()


@pytest.mark.cpu
def test_out_of_memory_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    start_without_memory(monkeypatch)
    W = dy.ParameterCollection().add_parameters((3000, 3))
    loss = dy.esum([dy.sum_elems(dy.tanh(W * (vector() * float(k)))) for k in range(3000)])
    loss.value()
    with monkeypatch.context() as patch:
        patch.setattr(dynbatch.cpu.memory, "available_bytes", lambda: 1 << 20)
        with pytest.raises(dy.OutOfMemoryError, match="wanted"):
            loss.backward()
    assert not W.grad_as_array().any()
    loss.backward()
    assert W.grad_as_array().any()


@pytest.mark.cpu
def test_an_interrupted_plan_leaves_the_graph_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any failure in the middle of a plan, here in an op's own code."""
    from dynbatch.ops.elementwise import log

    xs = [dy.scalarInput(float(k + 1)) for k in range(4)]
    total = dy.esum([dy.log(dy.square(x)) for x in xs])

    def fail(*arrays: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(log, "_function", fail)
        with pytest.raises(KeyboardInterrupt):
            total.value()
    assert total.value() == pytest.approx(2 * np.log(24))
    total.backward(full=True)
    assert xs[3].gradient().tolist() == [0.5]


# ---- cells -----------------------------------------------------------------------------------------------------------


def test_a_cell_that_reads_a_value() -> None:
    @dy.cell
    def reads(x):
        return x * 2.0 if x.value()[0] > 0 else x

    @dy.cell
    def compares(x):
        return x * 2.0 if dy.sum_elems(x) > 0 else x

    @dy.cell
    def tests(x):
        return x * 2.0 if x else x

    for cell in (reads, compares, tests):
        with pytest.raises(dy.CellError, match=f"{cell.__name__}.*reads a value"):
            cell(vector())
        assert dy.tanh(vector()).value(), "recording goes on after the error"


def test_a_cell_that_branches_on_payload() -> None:
    @dy.cell
    def branches(x, n):
        return x * 2.0 if n > 0 else x

    with pytest.raises(dy.CellError, match=r'branches on.*"n".*static'):
        branches(vector(), 1)

    @dy.cell(static=("n",))
    def static(x, n):
        return x * 2.0 if n > 0 else x

    assert static(vector(), 1).value() == [2, 4, 6]
    assert static(vector(), 0).value() == [1, 2, 3]


def test_a_cell_that_captures_an_expression() -> None:
    outside = vector()

    @dy.cell
    def captures(x):
        return x + outside

    with pytest.raises(dy.CellError, match=r"captures.*argument"):
        captures(vector())


def test_a_cell_that_returns_one_value_for_each_child() -> None:
    @dy.cell
    def leaks(children):
        return next(dy.tanh(c) for c in children)

    with pytest.raises(dy.CellError, match="leaks"):
        leaks([vector(), vector()])


def test_a_failed_trace_leaves_nothing_behind(W: Any) -> None:
    flag = {"fail": True}

    @dy.cell
    def sometimes(x):
        y = W * x
        if flag["fail"]:
            raise RuntimeError("the user's own")
        return y

    with pytest.raises(RuntimeError, match="the user's own"):
        sometimes(vector())
    flag["fail"] = False
    np.testing.assert_allclose(sometimes(vector()).npvalue(), W.as_array() @ [1, 2, 3])
