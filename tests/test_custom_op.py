"""Ops of kernels that users bring. `tests/ops` holds them against NumPy and finite differences; here is the rest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dynbatch as dy
from dynbatch.cpu import tiers
from tests import custom_kernels

STRATEGIES = ["off", "depth", "agenda"]


def make(which: str, **changes: Any) -> Any:
    return dy.custom_op(which, **custom_kernels.on_cpu(which) | changes)


def gate_of_ops(x: Any, y: Any) -> Any:
    return dy.cmult(x, dy.tanh(y))


def weigh_of_ops(w: Any, x: Any) -> Any:
    return w * dy.square(x)


def vector(*numbers: float) -> Any:
    return dy.inputVector(numbers)


# ---- values and gradients in models ----------------------------------------------------------------------------------


class Model:
    """A recurrent model in which the two ops are everywhere: on parameters, slices, lists, batch elements, alone."""

    def __init__(self, gate: Any, weigh: Any) -> None:
        self.gate, self.weigh = gate, weigh
        rng = np.random.default_rng(5)
        self.collection = dy.ParameterCollection()
        self.W = self.collection.add_parameters((4, 3), init=rng.normal(size=(4, 3)))
        self.p = self.collection.add_parameters(3, init=rng.normal(size=3))
        self.q = self.collection.add_parameters(3, init=rng.normal(size=3))
        self.table = self.collection.add_lookup_parameters((5, 3), init=rng.normal(size=(5, 3)))

    @dy.cell
    def step(self, h, x):
        scores = self.weigh(self.W, h)  # a vector of four, of which slices are operands
        both = dy.concatenate([self.gate(scores[0:3], x), self.gate(x, self.p)])
        return self.gate(both[1:4], self.gate(self.p, self.q)) + self.gate(h, h)

    @dy.cell
    def ends(self, hs):
        return dy.esum([self.gate(h, self.q) for h in hs])

    def encode(self, words):
        h = self.table[words[0]]
        hs = []
        for word in words:
            h = self.step(h, self.table[word])
            hs.append(h)
        return self.ends(hs) + self.gate(hs[0], hs[-1])

    static_encode = dy.static(encode)

    def loss(self, sentences, static=False):
        encode = self.static_encode if static else self.encode
        sums = [dy.sum_elems(encode(words)) for words in sentences]
        batch = self.gate(dy.inputTensor(np.arange(12.0).reshape(3, 4) / 10, batched=True), self.p)
        matrices = dy.inputTensor(np.arange(24.0).reshape(2, 3, 4) / 10, batched=True)
        sums += [dy.sum_batches(dy.sum_elems(batch)), dy.sum_batches(dy.sum_elems(self.weigh(matrices, self.q)))]
        return dy.esum(sums)


SENTENCES = [(1, 2, 0), (3,), (4, 4, 1, 2), (1, 2, 0)]


def numbers(model: Model, static: bool = False) -> list[np.ndarray]:
    """The loss, and the gradients of all parameters."""
    dy.renew_cg()
    loss = model.loss(SENTENCES, static)
    value = np.array(loss.value())
    loss.backward()
    found = [value, *(p.grad_as_array().copy() for p in (model.W, model.p, model.q, model.table))]
    model.collection.reset_gradient()
    return found


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.usefixtures("tier")
def test_in_a_model(strategy: str, dtype: str) -> None:
    dy.init(dtype=dtype, autobatch=strategy, seed=1)
    mode = tiers.mode
    tiers.set_mode("never")  # there is no need to compile these
    wanted = numbers(Model(gate_of_ops, weigh_of_ops))
    tiers.set_mode(mode)
    model = Model(make("gate"), make("weigh"))
    tolerance = 1e-4 if dtype == "float32" else 1e-9
    for static in (False, True, True):
        for found, right in zip(numbers(model, static), wanted):
            assert found.dtype == dtype or found.ndim == 0
            np.testing.assert_allclose(found, right, tolerance, tolerance)


def test_it_batches() -> None:
    gate = make("gate")
    p = dy.ParameterCollection().add_parameters(3)
    losses = [dy.sum_elems(gate(vector(1, 2, n), p)) for n in range(5)]
    dy.esum(losses).backward()
    for direction, name in (("forward", "gate"), ("backward", "gate gradient")):
        assert [r.rows for r in dy.plan(direction).batch_reports if r.name == name] == [5]


def test_an_op_that_is_replaced_is_traced_again() -> None:
    made = {"op": make("gate")}

    @dy.cell
    def cell(x):
        return made["op"](x, x)

    x = vector(1, 2)
    first = cell(x).npvalue()
    made["op"] = dy.custom_op("gate", types=lambda x, y: x, forward=Recording(copy_first))
    np.testing.assert_allclose(first, np.tanh([1, 2]) * [1, 2], 1e-6)
    np.testing.assert_array_equal(cell(x).npvalue(), [1, 2])


def copy_first(x, y, out):
    out[:] = x


def test_one_signature_for_what_is_declared_once() -> None:
    """Two calls of `custom_op` are two ops, which do not run together."""
    one, two = make("gate"), make("gate")
    dy.forward([one(vector(1), vector(2)), one(vector(3), vector(4)), two(vector(1), vector(2))])
    assert sorted(r.rows for r in dy.plan().batch_reports if r.name == "gate") == [1, 2]


# ---- what kernels get ------------------------------------------------------------------------------------------------


class Recording:
    """A kernel that is no numba function, and notes the layout of its arguments."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.calls: list[tuple[np.ndarray, ...]] = []

    def __call__(self, *arrays: np.ndarray) -> None:
        self.calls.append(arrays)
        self.kernel(*arrays)


@pytest.mark.usefixtures("tier", "float64")
def test_the_layout_of_arrays() -> None:
    """C-contiguous, a matrix column by column; only what all rows share is one row seen several times."""
    forward = Recording(custom_kernels.weigh_forward)
    backward = Recording(custom_kernels.weigh_backward)
    weigh = make("weigh", forward=forward, backward=backward)
    W = dy.ParameterCollection().add_parameters((2, 3), init=np.arange(6.0).reshape(2, 3))

    @dy.cell
    def cell(x):  # a slice of a vector, whose rows are not close together
        return weigh(W, dy.tanh(x)[1:4])

    outs = [cell(vector(n, 1, 2, n, 5)) for n in range(4)]
    dy.esum([dy.sum_elems(out) for out in outs]).backward(full=True)
    ((w, x, out),) = forward.calls
    np.testing.assert_array_equal(w[2], np.arange(6.0).reshape(2, 3).T)
    assert (w.shape, x.shape, out.shape) == ((4, 3, 2), (4, 3), (4, 2))
    assert w.strides[0] == 0 and w[0].flags.c_contiguous
    np.testing.assert_array_equal(x[:, 0], np.tanh([1] * 4))
    ((*read, dw, dx),) = backward.calls
    assert all(a.flags.c_contiguous and a.flags.writeable for a in (x, out, read[0], read[1], read[3], dw, dx))
    assert (dw.shape, dx.shape) == (w.shape, x.shape)
    assert {a.dtype.name for a in (w, x, out, *read, dw, dx)} == {"float64"}


def inverse(x, out):
    """One over x."""
    for r in range(out.shape[0]):
        for i in range(out.shape[1]):
            out[r, i] = 1 / x[r, i]


def test_a_python_function_is_compiled() -> None:
    """By NumPy's rules of division, and the op has its documentation."""
    op = dy.custom_op("inverse", types=lambda x: x, forward=inverse)
    assert op(vector(2, 0, -4)).value() == [0.5, np.inf, -0.25]
    assert (op.__name__, op.__doc__) == ("inverse", "One over x.")


def test_faults_name_the_op() -> None:
    dy.init(check_validity=True)
    nothing = dy.custom_op("nothing", types=lambda x: x, forward=Recording(lambda x, out: out.fill(np.nan)))
    with pytest.raises(dy.ValidityError, match="NaN computed by nothing"):
        nothing(vector(1)).value()


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_shapes_that_do_not_fit() -> None:
    gate, weigh = make("gate"), make("weigh")
    W = dy.ParameterCollection("model").add_parameters((2, 3), name="W")
    with pytest.raises(dy.ShapeError, match=rf"^{__file__}:\d+: gate: shapes \(3,\), \(2,\) do not fit: two vectors"):
        gate(vector(1, 2, 3), vector(1, 2))
    with pytest.raises(dy.ShapeError, match=r"weigh: shapes \(2, 3\), \(2,\) .* another size .*\(parameters: .*W"):
        weigh(W, vector(1, 2))
    with pytest.raises(dy.ShapeError, match=r"weigh: shapes \(2,\), \(2,\) do not fit: not enough values"):
        weigh(vector(1, 2), vector(1, 2))
    third = dy.custom_op("third", types=lambda x: x[2], forward=Recording(None))
    with pytest.raises(dy.ShapeError, match=r"third: shapes \(2,\) do not fit: tuple index out of range"):
        third(vector(1, 2))

    @dy.cell
    def cell(x, y):
        return gate(x, y)

    with pytest.raises(dy.ShapeError, match=r"gate: shapes \(1,\), \(2,\) do not fit"):
        cell(vector(1), vector(1, 2))
    np.testing.assert_allclose(gate(vector(1), vector(2)).npvalue(), np.tanh([2]), 1e-6)


def test_operands_that_are_none() -> None:
    gate = make("gate")
    table = dy.ParameterCollection().add_lookup_parameters((2, 3))
    for wrong in (1.0, np.ones(3), None, table):
        with pytest.raises(TypeError, match=rf"^{__file__}:\d+: gate: expected an Expression or a parameter"):
            gate(vector(1, 2, 3), wrong)
    with pytest.raises(TypeError, match="gate: its type rule does not take 1 operands"):
        gate(vector(1))
    with pytest.raises(TypeError, match="gate: expected at least one operand"):
        gate()


@pytest.mark.parametrize("result", [None, "x", (2, 0), ("a",)])
def test_a_type_rule_that_gives_no_shape(result: Any) -> None:
    op = dy.custom_op("odd", types=lambda x: result, forward=Recording(None))
    with pytest.raises(TypeError, match=rf"^{__file__}:\d+: odd: its type rule must return a shape, not"):
        op(vector(1))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"forward": 3}, TypeError, "mine: forward must be a function, not int"),
        ({"forward": None}, TypeError, "mine: forward must be a function, not NoneType"),
        ({"backward": "x"}, TypeError, "mine: backward must be a function, not str"),
        ({"types": (3,)}, TypeError, "mine: types must be a function of shapes, not tuple"),
        ({"cuda_forward": lambda x, out: None}, TypeError, "mine: cuda_forward must be made by numba.cuda.jit"),
        ({"cuda_backward": 1}, TypeError, "mine: cuda_backward must be made by numba.cuda.jit"),
        ({"threads": 0}, ValueError, "mine: threads must be between 1 and 1024, not 0"),
        ({"threads": 2000}, ValueError, "mine: threads must be between 1 and 1024, not 2000"),
        ({"check": True}, TypeError, "mine: check must be a list of shapes or arrays, or False, not True"),
        ({"name": "tanh"}, ValueError, "tanh is a function of dynbatch's own"),
        ({"name": ""}, TypeError, "the name must be a string"),
    ],
)
def test_declarations_that_are_wrong(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"name": "mine", "types": lambda x: x, "forward": Recording(None)} | changes
    with pytest.raises(error, match=rf"^{__file__}:\d+: .*{message}"):
        dy.custom_op(given.pop("name"), **given)


def test_no_backward() -> None:
    """An error only where a gradient is needed, and nothing is lost by it."""
    gate = make("gate", backward=None)
    pc = dy.ParameterCollection()
    p, q = pc.add_parameters(2, init=1), pc.add_parameters(2, init=2)
    x = vector(1, 2)
    loss = dy.sum_elems(dy.cmult(gate(x, x), p))
    loss.backward()
    np.testing.assert_allclose(p.grad_as_array(), [1, 2] * np.tanh([1, 2]), 1e-6)
    dy.sum_elems(dy.nobackprop(gate(x, q)) + q).backward()
    np.testing.assert_array_equal(q.grad_as_array(), [1, 1])
    loss = dy.sum_elems(gate(x, q) + q)
    with pytest.raises(dy.CustomOpError, match=rf"^{__file__}:\d+: gate has no gradient, and one is needed here"):
        loss.backward()
    np.testing.assert_array_equal(q.grad_as_array(), [1, 1])
    assert loss.value() == pytest.approx(([1, 2] * np.tanh([2, 2]) + 2).sum(), rel=1e-6)


# ---- what debug checks -----------------------------------------------------------------------------------------------


def negative(dout, out, x, y, dx, dy):
    for r in range(dout.shape[0]):
        for i in range(dout.shape[1]):
            t = np.tanh(y[r, i])
            dx[r, i] = dout[r, i] * t
            dy[r, i] = -dout[r, i] * x[r, i] * (1 - t * t)


def swapped(dout, out, x, y, dx, dy):
    custom_kernels.gate_backward.py_func(dout, out, x, y, dy, dx)


def shifted(x, y, out):
    out[:] = np.roll(x, 1, axis=0) * np.tanh(y)


def normalized_over_rows(x, y, out):
    out[:] = x * np.tanh(y) / len(x)


def mean_gradient(dout, out, x, y, dx, dy):
    custom_kernels.gate_backward.py_func(dout, out, x, y, dx, dy)
    dx[:] = dx.mean(axis=0)


def partial(x, y, out):
    out[:, 1:] = (x * np.tanh(y))[:, 1:]


def adding(x, y, out):
    out += x * np.tanh(y)


def adding_gradient(dout, out, x, y, dx, dy):
    dx += dout * np.tanh(y)
    dy[:] = dout * x / np.cosh(y) ** 2


def spoiling(x, y, out):
    np.tanh(y, out=y)
    out[:] = x * y


def logarithm(x, y, out):
    with np.errstate(invalid="ignore"):
        out[:] = np.log(x) * y


FAULTS = {
    "gradient": (
        {"backward": negative},
        r"gate: backward gives .* element \(0,\) of the gradient of operand 1, finite",
    ),
    "swapped": ({"backward": Recording(swapped)}, "of the gradient of operand 0, finite differences give"),
    "shifted rows": ({"forward": Recording(shifted)}, "gate: in forward rows influence each other: row 0 of 3"),
    "number of rows": ({"forward": Recording(normalized_over_rows)}, "gate: in forward rows influence each other"),
    "mean over rows": ({"backward": Recording(mean_gradient)}, "gate: in backward rows influence each other"),
    "not all": ({"forward": Recording(partial)}, "gate: forward does not write all of out, or adds"),
    "adding": ({"forward": Recording(adding)}, "gate: forward does not write all of out, or adds"),
    "adding gradient": (
        {"backward": Recording(adding_gradient)},
        "backward does not write all of the gradient of oper",
    ),
    "operand": ({"forward": Recording(spoiling)}, "gate: forward changes its argument 1, which it only reads"),
    "domain": ({"forward": Recording(logarithm)}, "gate: forward gives NaN or infinity for the operands of its check"),
}


@pytest.mark.parametrize("which", list(FAULTS))
def test_faults_of_kernels(which: str) -> None:
    """With operands at once, else at the first call."""
    changes, message = FAULTS[which]
    make("gate", **changes, check=[(3,), (3,)])  # without debug nothing is checked
    dy.init(debug=True)
    with pytest.raises(dy.CustomOpError, match=rf"^{__file__}:\d+: .*{message}"):
        make("gate", **changes, check=[(3,), (3,)])
    gate = make("gate", **changes)
    with pytest.raises(dy.CustomOpError, match=rf"^{__file__}:\d+: .*{message}"):
        gate(vector(1, 2), vector(3, 4))
    make("gate", **changes, check=False)(vector(1, 2), vector(3, 4))


def test_right_kernels_pass_the_check() -> None:
    dy.init(debug=True)
    make("gate", check=[3, (3,)])
    weigh = make("weigh", check=[(2, 3), np.array([1.0, 2.0, 3.0])])
    forward = Recording(custom_kernels.weigh_forward)
    assert weigh(dy.inputTensor(np.ones((2, 3))), vector(1, 2, 3)).value() == [14, 14]
    op = make("weigh", forward=forward)
    for shape in [(30, 20), (4, 20)]:  # many elements, of which some are looked at; and one check for all shapes
        op(dy.inputTensor(np.ones(shape)), dy.inputTensor(np.ones(20)))
        assert len(forward.calls) == 5 + 2 * 64 + 2 * 20


def test_values_near_those_that_are_given() -> None:
    dy.init(debug=True)
    logarithm = {
        "types": lambda x: x,
        "forward": Recording(lambda x, out: np.log(x, out=out)),
        "backward": Recording(lambda dout, out, x, dx: np.divide(dout, x, out=dx)),
    }
    dy.custom_op("ln", **logarithm, check=[np.array([[0.5, 2.0], [10.0, 0.1]])])
    with pytest.raises(dy.CustomOpError, match="give custom_op"), np.errstate(invalid="ignore"):
        dy.custom_op("ln", **logarithm, check=[(2, 2)])


def test_operands_of_the_check_must_fit() -> None:
    dy.init(debug=True)
    with pytest.raises(dy.ShapeError, match=rf"^{__file__}:\d+: gate: shapes \(3,\), \(2,\) do not fit"):
        make("gate", check=[(3,), (2,)])
