"""The compiled tier against the NumPy tier: a fixed set of Programs compiled, random ones with interpreted kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import random_cells
from hypothesis import HealthCheck, assume, given, settings

import dynbatch as dy
from dynbatch.cpu import tiers

WIDTHS = [2, 3, 17, 64]
ROWS = [1, 3, 70]
TOLERANCE = {"float64": 1e-12, "float32": 1e-5}
CONDITION = {
    "normalized": 30.0,  # differences of nearly equal numbers, divided by their deviation
    "mv_rnn": 10.0,  # sums of products of products, many times larger than the result
}


class Programs:
    """The fixed set: cells over vectors of one width. Each is called as ``cell(x, y, z, m, k, rate, xs, ys)``.

    That is three vectors, a matrix of the width's size, an index below 2, a number, and two lists of vectors of one
    length. Every cell takes all of them, so that one function can drive them all.
    """

    def __init__(self, width: int) -> None:
        self.pc = dy.ParameterCollection()
        n = self.n = width
        self.gates = [[self.pc.add_parameters((n, n)) for _ in range(2)] for _ in range(5)]
        self.biases = [self.pc.add_parameters(n) for _ in range(5)]
        self.wide = self.pc.add_parameters((n, 2 * n))
        self.g, self.s = self.pc.add_parameters(n), self.pc.add_parameters(1)
        self.words = self.pc.add_lookup_parameters((4, n))

    def _gate(self, i: int, x: Any, y: Any) -> Any:
        return dy.affine_transform([self.biases[i], self.gates[i][0], x, self.gates[i][1], y])

    @dy.cell
    def tree_leaf(self, x: Any, y: Any, z: Any, m: Any, k: int, rate: float, xs: Any, ys: Any) -> Any:
        e = dy.lookup(self.words, k)
        i, o, u = (self.gates[j][0] * e + self.biases[j] for j in range(3))
        c = dy.cmult(dy.logistic(i), dy.tanh(u))
        return dy.cmult(dy.logistic(o), dy.tanh(c)), c

    @dy.cell
    def tree_node(self, x: Any, y: Any, z: Any, m: Any, k: int, rate: float, xs: Any, ys: Any) -> Any:
        i, left, right, o = (dy.logistic(self._gate(j, x, y)) for j in range(4))
        c = dy.cmult(i, dy.tanh(self._gate(4, x, y))) + dy.cmult(left, z) + dy.cmult(right, x)
        return dy.cmult(o, dy.tanh(c)), c

    @dy.cell
    def gru(self, x: Any, y: Any, z: Any, m: Any, k: int, rate: float, xs: Any, ys: Any) -> Any:
        r, u = dy.logistic(self._gate(0, x, y)), dy.logistic(self._gate(1, x, y))
        return dy.cmult(u, y) + dy.cmult(1 - u, dy.tanh(self._gate(2, x, dy.cmult(r, y))))

    @dy.cell
    def child_sum(self, x: Any, y: Any, z: Any, m: Any, k: int, rate: float, xs: Any, ys: Any) -> Any:
        total = dy.esum(xs)
        i, o = dy.logistic(self._gate(0, x, total)), dy.logistic(self._gate(1, x, total))
        wx = self.gates[3][0] * x + self.biases[3]
        c = dy.cmult(i, dy.tanh(self._gate(2, x, total)))
        c = c + dy.esum([dy.cmult(dy.logistic(wx + self.gates[3][1] * a), b) for a, b in zip(xs, ys)])
        return dy.cmult(o, dy.tanh(c)), c

    @dy.cell
    def list_attention(self, x: Any, y: Any, z: Any, m: Any, k: int, rate: float, xs: Any, ys: Any) -> Any:
        scores = [dy.dot_product(x, a) * rate for a in xs]
        top = dy.logsumexp(scores)
        mixed = dy.esum([dy.cmult(b, dy.exp(s - top)) for s, b in zip(scores, ys)])
        return mixed, dy.emax(xs) + dy.average([dy.tanh(a + y) for a in ys])

    @dy.cell
    def broadcasting(self, x: Any, y: Any, z: Any, m: Any, k: int, rate: float, xs: Any, ys: Any) -> Any:
        s = dy.sum_elems(x) * 0.1 + self.s
        a = dy.cmult(m + x, s) - dy.tanh(m) * rate + 2.0 / (3.0 + dy.square(s))
        column = dy.reshape(y, (1, self.n))
        b = dy.tanh(dy.cmult(y, s) + (rate - z) * 0.5 + self.s)
        return a, b + dy.reshape(dy.transpose(column), (self.n,)), s - b

    @dy.cell
    def unary(self, x: Any, y: Any, z: Any, m: Any, k: int, rate: float, xs: Any, ys: Any) -> Any:
        positive = dy.abs(x) + 0.5
        return (
            -x, dy.exp(x), dy.square(x), dy.abs(x), dy.tanh(x), dy.logistic(x), dy.rectify(x), dy.gelu(x),
            dy.elu(x, rate), dy.elu(x), dy.silu(x, rate), dy.silu(x), dy.softsign(x), dy.log_sigmoid(x),
            dy.nobackprop(x), dy.log(positive), dy.sqrt(positive), dy.pow(positive, rate), dy.pow(x, 2), dy.pow(x, 3.0),
            x + rate, rate - x, x * rate, x / 2.0, rate / positive, dy.flip_gradient(x),
        )  # fmt: skip

    @dy.cell
    def binary(self, x: Any, y: Any, z: Any, m: Any, k: int, rate: float, xs: Any, ys: Any) -> Any:
        unit = dy.logistic(x)
        return (
            x + y, x - y, dy.cmult(x, y), dy.cdiv(x, y), dy.bmax(x, y), dy.bmin(x, y), dy.emax([x, y]),
            dy.logsumexp([x, y]), dy.binary_log_loss(unit, dy.nobackprop(dy.logistic(y))), dy.huber_distance(x, y, 0.5),
            dy.l1_distance(x, y), dy.squared_distance(x, y), dy.pow(dy.abs(x) + 0.5, dy.sum_elems(y) * 0.1),
        )  # fmt: skip

    @dy.cell
    def sliced(self, x: Any, y: Any, z: Any, m: Any, k: int, rate: float, xs: Any, ys: Any) -> Any:
        n = self.n
        both = dy.concatenate([self.gates[0][0] * x, dy.tanh(y), x, dy.tanh(y)])
        first, last = both[0:n], both[3 * n :]
        nested = dy.concatenate([dy.logistic(first), dy.concatenate([last, z])])
        shifted = nested[n // 2 : n // 2 + n]
        return dy.tanh(self.wide * nested[n:]), dy.cmult(shifted, first) + dy.reshape(shifted, (n,)), both

    @dy.cell
    def gradients_changed(self, x: Any, y: Any, z: Any, m: Any, k: int, rate: float, xs: Any, ys: Any) -> Any:
        a = dy.scale_gradient(dy.tanh(self.gates[0][0] * x), rate) + dy.nobackprop(self.gates[1][0] * y)
        return dy.cmult(dy.flip_gradient(a), dy.scale_gradient(y, 3.0)) + dy.cmult(dy.nobackprop(a), dy.logistic(z))

    @dy.cell
    def normalized(self, x: Any, y: Any, z: Any, m: Any, k: int, rate: float, xs: Any, ys: Any) -> Any:
        h = dy.layer_norm(self._gate(0, x, y), self.g, self.biases[1])
        wide = dy.layer_norm(m, self.g, self.biases[2])
        return x + self.gates[1][0] * dy.gelu(h), dy.tanh(wide)

    @dy.cell
    def attention(self, x: Any, y: Any, z: Any, m: Any, k: int, rate: float, xs: Any, ys: Any) -> Any:
        query = self.gates[0][0] * x
        weights = dy.softmax(dy.transpose(m) * query * (1 / self.n**0.5))
        rows = dy.log_softmax(m, d=1)
        return self.gates[1][0] * (m * weights) + y, dy.pick(dy.softmax(m), 0, 1), dy.sum_dim(rows, [1])

    @dy.cell
    def mv_rnn(self, x: Any, y: Any, z: Any, m: Any, k: int, rate: float, xs: Any, ys: Any) -> Any:
        other = m * dy.concatenate_cols([x] * self.n) if self.n > 1 else m * m
        p = dy.tanh(self.wide * dy.concatenate([other * x, m * y]) + self.biases[0])
        return p, self.gates[0][0] * m + self.gates[1][0] * other, m * other

    @dy.cell
    def loss(self, x: Any, y: Any, z: Any, m: Any, k: int, rate: float, xs: Any, ys: Any) -> Any:
        scores = dy.concatenate([self.gates[0][0] * x + self.biases[0], y])
        chosen = dy.pick(m, 0, 1) + dy.select_rows(scores, [k] * self.n)
        return dy.pickneglogsoftmax(scores, k) * rate, dy.hinge(scores, k, 0.5), chosen, dy.pick(scores, k)


NAMES = [name for name, cell in vars(Programs).items() if not name.startswith("_")]


def measure(model: Programs, name: str, rows: int) -> list[np.ndarray]:
    """Values and gradients of a batch: operands in another order than they were made, and some of them shared."""
    dy.renew_cg()
    model.pc.reset_gradient()
    rng = np.random.default_rng(rows)
    n = model.n

    def inputs(shape: tuple[int, ...], count: int) -> list[Any]:
        arrays = rng.normal(size=(count, *shape))
        made = [dy.inputTensor(a) for a in arrays]
        return [made[i] for i in rng.permutation(count)]

    xs, zs, ms = inputs((n,), rows), inputs((n,), rows), inputs((n, n), rows)
    ys = [dy.tanh(x) for x in xs[::-1]]
    results, operands = [], [*xs, *zs, *ms]
    for r in range(rows):
        count = 1 + r % 3
        lists = inputs((n,), count), [zs[(r + i) % rows] for i in range(count)]
        operands += lists[0]
        vectors = xs[r], ys[-1 - r // 2], zs[r]
        made = getattr(model, name)(*vectors, ms[r], r % 2, float(rng.uniform(0.5, 1.5)), *lists)
        results += made if isinstance(made, tuple) else [made]
    weights = [dy.inputTensor(rng.uniform(0.5, 1.0, size=e.dim()[0])) for e in results]
    loss = dy.esum([dy.sum_elems(dy.cmult(e, w)) for e, w in zip(results, weights)])
    loss.backward(full=True)
    parameters = [*model.pc.parameters_list(), *model.pc.lookup_parameters_list()]
    found = [e.npvalue() for e in results] + [e.gradient() for e in operands]
    return found + [p.grad_as_array() for p in parameters]


def compare(name: str, dtype: str, widths: list[int], rows: list[int]) -> None:
    dy.init(dtype=dtype, seed=3)
    for width in widths:
        model = Programs(width)
        for count in rows:
            tiers.set_mode("never")
            expected = measure(model, name, count)
            tiers.set_mode("always")
            found = measure(model, name, count)
            reports = [r.tier for r in dy.plan().batch_reports if r.name.endswith(name)]
            assert reports == ["compiled"]
            for actual, wanted in zip(found, expected):
                close = TOLERANCE[dtype] * CONDITION.get(name, 1.0)
                scale = max(1.0, float(np.abs(wanted).max()))
                np.testing.assert_allclose(
                    actual, wanted, rtol=close, atol=close * scale, err_msg=f"width {width}, {count} rows"
                )


@pytest.mark.parametrize("name", NAMES)
def test_fixed_programs_in_float32(name: str) -> None:
    compare(name, "float32", WIDTHS, ROWS)


@pytest.mark.parametrize("name", ["tree_node", "child_sum"])
def test_fixed_programs_in_float64(name: str) -> None:
    """Two of them: the others are interpreted below, and the test of infinities compiles the formulas of all ops."""
    compare(name, "float64", WIDTHS, ROWS)


@pytest.mark.parametrize("columns", [1, 3])
def test_matrices_below_one_another(columns: int) -> None:
    """They are gathered into place, and read there; a part may come twice, be alone, or belong to list elements."""
    dy.init(dtype="float64", seed=3)
    collection = dy.ParameterCollection()
    W = collection.add_parameters((2, 7))

    @dy.cell
    def stacked(A: Any, B: Any, a: Any, Cs: list[Any]) -> Any:
        both, twice = dy.concatenate([A, B]), dy.concatenate([B, B, A])
        inner = dy.esum([dy.concatenate([C, C]) * a for C in Cs])
        return W * both, both, twice * a, A * a, W * dy.concatenate([B, A]), dy.concatenate([A + 1, B]), inner

    found = []
    for mode in ("never", "always"):
        tiers.set_mode(mode)
        dy.renew_cg()
        rng = np.random.default_rng(1)

        def matrices(rows: int, rng: np.random.Generator = rng) -> list[Any]:
            made = [dy.inputTensor(rng.normal(size=(rows, columns))) for _ in range(5)]
            return [made[i] for i in (3, 3, 0, 4, 1)]

        As, Bs, Cs = matrices(3), matrices(4), matrices(2)
        vectors = [dy.inputTensor(rng.normal(size=columns)) for _ in range(5)]
        results = [stacked(A, B, a, Cs[: 1 + k]) for k, (A, B, a) in enumerate(zip(As, Bs, vectors))]
        loss = dy.esum([dy.sum_elems(dy.square(e)) for made in results for e in made])
        loss.backward(full=True)
        values = [e.npvalue() for made in results for e in made]
        found.append([*values, *(e.gradient() for e in (*As, *Bs, *Cs, *vectors)), W.grad_as_array().copy()])
        collection.reset_gradient()
    for actual, wanted in zip(*found):
        np.testing.assert_allclose(actual, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", NAMES)
def test_fixed_programs_of_width_one(name: str, dtype: str, interpreted: None) -> None:
    """Scalars and vectors are one there, which makes kernels of its own."""
    compare(name, dtype, [1], ROWS[:2])


@pytest.mark.parametrize("name", NAMES)
def test_fixed_programs_interpreted(name: str, interpreted: None) -> None:
    compare(name, "float64", [2, 3], ROWS[:2])


# ---- NaN and infinities ----------------------------------------------------------------------------------------------

POINTWISE: dict[str, Callable[..., Any]] = {
    "exp": dy.exp, "tanh": dy.tanh, "logistic": dy.logistic, "rectify": dy.rectify, "square": dy.square, "abs": dy.abs,
    "gelu": dy.gelu, "softsign": dy.softsign, "log_sigmoid": dy.log_sigmoid, "elu": dy.elu, "silu": dy.silu,
    "log": dy.log, "sqrt": dy.sqrt, "negate": lambda x: -x, "nobackprop": dy.nobackprop,
    "pow": lambda x: dy.pow(dy.abs(x), 2.5), "shift": lambda x: 1 - x, "inverse": lambda x: 1 / x,
}  # fmt: skip
PAIRS: dict[str, Callable[..., Any]] = {
    "plus": lambda x, y: x + y, "minus": lambda x, y: x - y, "cmult": dy.cmult, "cdiv": dy.cdiv, "bmax": dy.bmax,
    "bmin": dy.bmin, "emax": lambda x, y: dy.emax([x, y]), "logsumexp": lambda x, y: dy.logsumexp([x, y]),
}  # fmt: skip
SPECIAL = [np.nan, np.inf, -np.inf, 0.0, 1.0, -1.0, 80.0, -80.0, 88.5, -88.5, -103.0, 1e-30, 1e30, -1e30]


@dy.cell
def every_pointwise_op(x: Any) -> Any:
    return tuple(f(x) for f in POINTWISE.values())


@dy.cell
def every_pair(x: Any, y: Any) -> Any:
    return tuple(f(x, y) for f in PAIRS.values())


def _special(cell: Any, arrays: list[np.ndarray], names: list[str]) -> dict[str, np.ndarray]:
    """Values of each op, and gradients by way of it alone."""
    dy.renew_cg()
    xs = [dy.inputTensor(a) for a in arrays]
    outputs = cell(*xs)
    found = {name: e.npvalue() for name, e in zip(names, outputs)}
    for name, e in zip(names, outputs):
        dy.sum_elems(e).backward(full=True)
        for k, x in enumerate(xs):
            found[f"gradient of {name} for operand {k}"] = x.gradient()
    return found


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("cell", [every_pointwise_op, every_pair], ids=["one", "two"])
def test_nan_and_infinity_are_kept(cell: Any, dtype: str) -> None:
    """Elementwise ops give the same in both tiers, whatever their operands are; a NaN never becomes a number."""
    dy.init(dtype=dtype)
    pairs = np.array([(x, y) for x in SPECIAL for y in SPECIAL], dtype)
    arrays = [np.array(SPECIAL, dtype)] if cell is every_pointwise_op else [pairs[:, 0], pairs[:, 1]]
    names = list(POINTWISE if cell is every_pointwise_op else PAIRS)
    tiers.set_mode("never")
    expected = _special(cell, arrays, names)
    tiers.set_mode("always")
    found = _special(cell, arrays, names)
    for what, wanted in expected.items():
        with np.errstate(invalid="ignore", over="ignore"):
            np.testing.assert_allclose(found[what], wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], err_msg=what)
        if what in POINTWISE:
            assert np.isnan(wanted[0]), what
        elif what in PAIRS and what not in ("bmax", "bmin"):  # DyNet's choose by one comparison
            assert np.isnan(wanted[np.isnan(pairs).any(axis=1)]).all(), what


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_shared_matrices_multiply_all_columns_of_a_batch_at_once(dtype: str) -> None:
    """In compiled code, unless the columns are not at equal distances."""
    dy.init(dtype=dtype, seed=1)
    pc = dy.ParameterCollection()
    W, V = pc.add_parameters((5, 3)), pc.add_parameters((2, 5))

    @dy.cell
    def columns(x: Any, v: Any) -> Any:
        both = dy.concatenate([dy.tanh(v[:6]), v])  # the first part lies in it
        return V * dy.tanh(W * x), W * dy.reshape(both[:6], (3, 2)), dy.transpose(W) * (W * x)

    rng = np.random.default_rng(1)
    arrays = [(rng.standard_normal((3, 4)), rng.standard_normal(8)) for _ in range(7)]
    found = {}
    for mode in ("never", "always"):
        tiers.set_mode(mode)
        dy.renew_cg()
        outputs = [columns(dy.inputTensor(x), dy.inputVector(v)) for x, v in arrays]
        dy.esum([dy.squared_norm(e) for es in outputs for e in es]).backward()
        found[mode] = [e.npvalue() for es in outputs for e in es] + [W.grad_as_array(), V.grad_as_array()]
        pc.reset_gradient()
    for a, b in zip(found["always"], found["never"]):
        np.testing.assert_allclose(a, b, rtol=TOLERANCE[dtype], atol=10 * TOLERANCE[dtype])
    assert "float" in " ".join(dy.plan().products)  # by a weight that was prepared


def test_infinite_constants() -> None:
    @dy.cell
    def masked(x: Any) -> Any:
        return dy.tanh(x) + np.inf, dy.tanh(x) * float("-inf"), dy.tanh(x) + float("nan")

    tiers.set_mode("always")
    x = dy.inputVector([1, -1])
    for e, wanted in zip(masked(x), ([np.inf, np.inf], [-np.inf, np.inf], [np.nan, np.nan])):
        np.testing.assert_array_equal(e.npvalue(), wanted)


# ---- random Programs -------------------------------------------------------------------------------------------------


class Dense:
    """The parameters of random cells, and how one is measured."""

    def __init__(self) -> None:
        dy.init(dtype="float64", seed=1)
        self.pc = dy.ParameterCollection()
        self.parameters = {name: self.pc.add_parameters(s) for name, s in random_cells.PARAMETERS.items()}

    def measure(self, call: Any, seed: int, mode: str, strategy: str, keep: bool) -> list[np.ndarray]:
        tiers.set_mode(mode)
        dy.renew_cg()
        self.pc.reset_gradient()
        rng = np.random.default_rng(seed)
        inputs, outputs = [], []
        for n in (2, 1, 4):
            operands = [dy.inputTensor(rng.normal(size=s)) for s in (random_cells.V, random_cells.V, random_cells.M)]
            children = [dy.inputTensor(rng.normal(size=random_cells.V)) for _ in range(n)]
            inputs += operands + children
            outputs += call(*operands, children, int(rng.integers(3)), float(rng.normal()))
        with dy.autobatch(strategy):
            if not keep:
                with dy.no_grad():
                    dy.forward(outputs)
            dy.esum([dy.sum_elems(dy.tanh(e * 0.3)) for e in outputs]).backward(full=True)
            found = [e.npvalue() for e in outputs] + [p.grad_as_array() for p in self.parameters.values()]
        return found + [x.gradient() for x in inputs]


@pytest.fixture(scope="module")
def dense() -> Dense:
    return Dense()


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(script=random_cells.scripts)
def test_random_cells(dense: Dense, interpreted: None, script: dict[str, Any]) -> None:
    """A cell equals its function in both tiers, with what backward reads kept and computed again."""
    dy.init(dtype="float64")
    rng = np.random.default_rng(script["seed"])
    for parameter in dense.parameters.values():
        parameter.set_value(rng.normal(size=parameter.shape) * 0.7)
    function = random_cells.function(script, dense.parameters)
    expected = dense.measure(function, script["seed"], "never", "agenda", True)
    assume(all(np.abs(wanted).max() < 1e4 for wanted in expected))
    cell = dy.cell(function)
    ways = [("never", "agenda", True), ("always", "agenda", True), ("always", "off", True), ("always", "depth", False)]
    for way in ways:
        for actual, wanted in zip(dense.measure(cell, script["seed"], *way), expected):
            np.testing.assert_allclose(actual, wanted, rtol=1e-7, atol=1e-8, err_msg=str(way))
