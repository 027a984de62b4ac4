"""Random graphs, in float64, under every strategy and tier, against the plain evaluation of `reference`.

Hypothesis draws a script: templates of steps, and instances of them that differ in length, inputs and payload. The
script is interpreted twice, by `Plain` on the reference's tape and by `Dynbatch`; what both are asked on the way,
values, gradients of parameters and of inner expressions, must agree.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import reference as ref
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dynbatch as dy
from dynbatch.cpu import tiers

S, W, V, N, M = (1,), (2,), (3,), (2, 3), (3, 3)
SHAPES = [S, W, V, N, M]
LANES = 3
ROWS = 4
PARAMETERS = {"s": S, "w": W, "b": V, "g": V, "N": N, "M": M, "U": M}
"""Names and shapes of the parameters."""


# ---- what can be called ----------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """An op or cell: the operand shapes that it takes, and how it is called on either side.

    ``shapes`` lists the combinations; None stands for one and the same shape, whichever, and an Ellipsis at the end for
    a list of one to four operands. ``payload`` draws integers; floats are made of them.
    """

    shapes: Sequence[tuple[Any, ...]]
    dynbatch: Callable[..., Any]
    plain: Callable[..., Any]
    payload: tuple[int, ...] = ()


SAME = [(None, None)]
BROADCAST = [(None, None), (M, V), (V, S), (N, W), (S, M), (W, N)]
LIST = [(None, ...)]


def rate(k: int) -> float:
    return 0.25 * (k + 1)


CALLS: dict[str, Call] = {
    "tanh": Call([(None,)], dy.tanh, ref.tanh),
    "logistic": Call([(None,)], dy.logistic, ref.logistic),
    "exp": Call([(None,)], dy.exp, ref.exp),
    "square": Call([(None,)], dy.square, ref.square),
    "rectify": Call([(None,)], dy.rectify, ref.rectify),
    "abs": Call([(None,)], dy.abs, ref.absolute),
    "plus": Call(BROADCAST, lambda x, y: x + y, ref.add),
    "minus": Call(BROADCAST, lambda x, y: x - y, ref.subtract),
    "cmult": Call(BROADCAST, dy.cmult, ref.cmult),
    "cdiv": Call(BROADCAST, dy.cdiv, ref.cdiv),
    "bmax": Call(SAME, dy.bmax, ref.bmax),
    "scale": Call([(None,)], lambda x, k: x * rate(k), lambda x, k: ref.scale(x, rate(k)), (4,)),
    "shift": Call([(None,)], lambda x, k: rate(k) - x, lambda x, k: ref.shift(ref.scale(x, -1.0), rate(k)), (4,)),
    "matmul": Call([(M, V), (N, V), (M, M), (N, M), (V, S)], lambda x, y: x * y,
                   lambda x, y: ref.matmul(x, y) if x.value.ndim == 2 else ref.cmult(x, y)),
    "affine": Call([(V, M, V), (W, N, V), (V, M, V, M, V), (V, M, M), (V,)], lambda *xs: dy.affine_transform(list(xs)),
                   ref.affine),
    "transpose": Call([(M,)], dy.transpose, ref.transpose),
    "dot": Call([(V, V), (M, M)], dy.dot_product, ref.dot),
    "esum": Call(LIST, lambda *xs: dy.esum(list(xs)), lambda *xs: ref.esum(xs)),
    "average": Call(LIST, lambda *xs: dy.average(list(xs)), lambda *xs: ref.average(xs)),
    "emax": Call(LIST, lambda *xs: dy.emax(list(xs)), lambda *xs: ref.emax(xs)),
    "logsumexp": Call(LIST, lambda *xs: dy.logsumexp(list(xs)), lambda *xs: ref.logsumexp(xs)),
    "sum_elems": Call([(None,)], dy.sum_elems, ref.sum_elems),
    "squared_norm": Call([(None,)], dy.squared_norm, lambda x: ref.sum_elems(ref.square(x))),
    "sum_dim_0": Call([(M,), (N,)], lambda x: dy.sum_dim(x, [0]), lambda x: ref.sum_dim(x, 0)),
    "sum_dim_1": Call([(M,), (N,)], lambda x: dy.sum_dim(x, [1]), lambda x: ref.sum_dim(x, 1)),
    "max_dim": Call([(M,), (V,)], dy.max_dim, lambda x: ref.max_dim(x, 0)),
    "softmax": Call([(V,), (M,)], dy.softmax, ref.softmax),
    "log_softmax": Call([(V,), (M,)], lambda x: dy.log_softmax(x, d=len(x.dim()[0]) - 1),
                        lambda x: ref.log_softmax(x, x.value.ndim - 1)),
    "pickneglogsoftmax": Call([(V,)], dy.pickneglogsoftmax, ref.pick_neg_log_softmax, (3,)),
    "hinge": Call([(V,)], lambda x, i, k: dy.hinge(x, i, rate(k)), lambda x, i, k: ref.hinge(x, i, rate(k)), (3, 4)),
    "layer_norm": Call([(V, V, V), (M, V, V)], dy.layer_norm, ref.layer_norm),
    "squared_distance": Call([(V, V), (N, N)], dy.squared_distance,
                             lambda x, y: ref.sum_elems(ref.square(ref.subtract(x, y)))),
    "pick_element": Call([(V,), (W,)], dy.pick, lambda x, i: ref.pick(x, i, 0), (2,)),
    "pick_row": Call([(M,), (N,)], dy.pick, lambda x, i: ref.pick(x, i, 0), (2,)),
    "pick_column": Call([(M,), (N,)], lambda x, i: dy.pick(x, i, 1), lambda x, i: ref.pick(x, i, 1), (3,)),
    "item": Call([(V,), (M,)], lambda x, i: x[i - 1], lambda x, i: ref.pick(x, (i - 1) % 3, 0), (3,)),
    "slice": Call([(M,)], lambda x: x[1:], lambda x: ref.select(x, [1, 2], 0)),
    "select": Call([(M,), (V,)], lambda x, i, j: dy.select_rows(x, [i, j, i]),
                   lambda x, i, j: ref.select(x, [i, j, i], 0), (3, 3)),
    "window": Call([(V, W), (W, V)], lambda x, y: dy.pick_range(dy.concatenate([x, y]), 1, 4),
                   lambda x, y: ref.select(ref.concatenate([x, y]), [1, 2, 3], 0)),
    "columns": Call([(V, V, V), (W, W, W)], lambda *xs: dy.concatenate_cols(list(xs)),
                    lambda *xs: ref.concatenate(xs, 1)),
    "flat": Call([(M,)], lambda x: dy.reshape(dy.reshape(x, (9,))[1:7], (2, 3)),
                 lambda x: ref.reshape(ref.select(ref.reshape(x, (9,)), range(1, 7), 0), (2, 3))),
    "nobackprop": Call([(None,)], dy.nobackprop, ref.nobackprop),
    "flip_gradient": Call([(None,)], dy.flip_gradient, lambda x: ref.scale_gradient(x, -1.0)),
    "scale_gradient": Call([(None,)], lambda x, k: dy.scale_gradient(x, rate(k)),
                           lambda x, k: ref.scale_gradient(x, rate(k)), (4,)),
}  # fmt: skip

CELLS = ["step", "gates", "first_of_gates", "child_sum", "two_lists", "labelled", "nested", "embed", "picked",
         "chained", "moved"]  # fmt: skip
MANUAL = ["batched_input", "lookup_batch", "to_batch", "sum_batches", "pick_batch_elem", "pick_batch", "losses_batch"]
OTHER = ["vector", "lookup", "lookup_matrix", "lookup_constant", "parameter", "scalar"]
EVENTS = ["value", "value_no_grad", "backward", "backward_full"]
NAMES = [*CALLS, *CELLS, *MANUAL, *OTHER, *EVENTS]


def cut(operands: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Two lists: of two, three and four operands the first has one, two and two."""
    first = 1 + len(operands) // 3
    return operands[:first], operands[first:]


class Model:
    """Parameters, and cells that use them; on the side of dynbatch."""

    def __init__(self) -> None:
        self.pc = dy.ParameterCollection()
        self.dense = {name: self.pc.add_parameters(shape) for name, shape in PARAMETERS.items()}
        self.b, self.g, self.N, self.M, self.U = (self.dense[name] for name in "bgNMU")
        self.words = self.pc.add_lookup_parameters((ROWS, *V))
        self.matrices = self.pc.add_lookup_parameters((ROWS, *M))

    @dy.cell
    def step(self, x: Any, h: Any) -> Any:
        """A parameter used twice."""
        return dy.tanh(dy.affine_transform([self.b, self.M, x, self.M, h]))

    @dy.cell
    def gates(self, x: Any, y: Any) -> Any:
        """Two outputs, one of which is the other's operand."""
        gate = dy.logistic(self.U * dy.cmult(x, self.g))
        c = dy.cmult(gate, dy.tanh(y)) + dy.cmult(1 - gate, x)
        return c, gate + 0.5 * c

    @dy.cell
    def child_sum(self, x: Any, children: Any) -> Any:
        """A list of any length, looped over twice."""
        total = dy.esum(children)
        wx = self.M * x
        kept = dy.esum([dy.cmult(dy.logistic(self.U * c + wx), c) for c in children])
        return dy.tanh(kept + dy.average(children)), dy.softmax(total)

    @dy.cell
    def two_lists(self, xs: Any, ys: Any) -> Any:
        """Lists of different lengths, reduced side by side."""
        return dy.tanh(dy.esum(xs) + dy.emax([dy.cmult(y, self.g) for y in ys])) + dy.logsumexp(ys)

    @dy.cell
    def labelled(self, h: Any, label: int, weight: float) -> Any:
        """Payload of both kinds."""
        return dy.pickneglogsoftmax(self.U * h, label) * weight

    @dy.cell
    def nested(self, x: Any, y: Any) -> Any:
        """Cells in a cell."""
        c, h = self.gates(x, y)
        return self.step(c, dy.cmult(h, x))

    @dy.cell
    def embed(self, word: int, other: int) -> Any:
        """Rows of tables."""
        return dy.lookup(self.matrices, word) * dy.lookup(self.words, other) + self.b

    @dy.cell
    def picked(self, m: Any, i: int) -> Any:
        """A view of a matrix, and a slice of a vector of parameters' products."""
        both = self.N * dy.transpose(m)
        return dy.reshape(both, (6,))[1:4] + dy.pick(m, i, 1)

    @dy.cell
    def chained(self, x: Any) -> Any:
        """What depends on parameters alone, beside what does not."""
        w = dy.tanh(self.M * self.U)
        return dy.layer_norm(w * x, self.g, self.b) + dy.scale_gradient(self.b, 0.5)

    @dy.cell
    def moved(self, x: Any) -> Any:
        """An output that is an argument, and one that is a parameter."""
        return x, self.g, x[0:2]


# ---- the two sides ---------------------------------------------------------------------------------------------------


class Plain:
    """The reference: values are lists of variables, one for each batch element."""

    def __init__(self) -> None:
        self.skipped: set[int] = set()
        self.count = 0

    def start(self, values: dict[str, np.ndarray]) -> None:
        self.dense = {name: ref.Var(values[name]) for name in PARAMETERS}
        self.tables = {name: [ref.Var(row) for row in values[name]] for name in ("words", "matrices")}
        self.sums = {name: np.zeros(value.shape) for name, value in values.items()}
        self.last: dict[ref.Var, np.ndarray] = {}

    def attempt(self, make: Callable[[], Any]) -> Any:
        """What ``make`` gives, or None where the two sides could not be compared."""
        self.count += 1
        try:
            return make()
        except ref.Skip:
            self.skipped.add(self.count)
            return None

    def input(self, array: np.ndarray, batched: bool = False) -> list[ref.Var]:
        return [ref.Var(array[..., k]) for k in range(LANES)] if batched else [ref.Var(array)]

    def parameter(self, name: str) -> list[ref.Var]:
        return [self.dense[name]]

    def lookup(self, table: str, row: int, update: bool = True) -> list[ref.Var]:
        var = self.tables[table][row]
        return [ref.scale(var if update else ref.Var(var.value), 1.0)]

    def call(self, name: str, operands: Sequence[list[ref.Var]], payload: Sequence[int]) -> list[ref.Var]:
        lanes = max(len(o) for o in operands) if operands else 1
        function = CALLS[name].plain
        return [function(*[o[k % len(o)] for o in operands], *payload) for k in range(lanes)]

    def cell(self, name: str, operands: Sequence[list[ref.Var]], payload: Sequence[int]) -> list[list[ref.Var]]:
        lanes = max(len(o) for o in operands) if operands else 1
        made = [getattr(self, "_" + name)(*[o[k % len(o)] for o in operands], *payload) for k in range(lanes)]
        return [list(outputs) for outputs in zip(*made)]

    def to_batch(self, operands: Sequence[list[ref.Var]]) -> list[ref.Var]:
        return [o[0] for o in operands]

    def sum_batches(self, x: list[ref.Var]) -> list[ref.Var]:
        return [ref.esum(x)]

    def pick_batch_elem(self, x: list[ref.Var], i: int) -> list[ref.Var]:
        return [x[i % len(x)]]

    def lookup_batch(self, rows: Sequence[int]) -> list[ref.Var]:
        return [self.lookup("words", row)[0] for row in rows]

    def pick_batch(self, x: list[ref.Var], indices: Sequence[int]) -> list[ref.Var]:
        return [ref.pick(x[k % len(x)], i, 0) for k, i in enumerate(indices)]

    def losses_batch(self, x: list[ref.Var], indices: Sequence[int]) -> list[ref.Var]:
        return [ref.pick_neg_log_softmax(x[k % len(x)], i) for k, i in enumerate(indices)]

    def value(self, x: list[ref.Var], keep: bool = True) -> np.ndarray:
        return np.stack([v.value for v in x], axis=-1) if len(x) > 1 else x[0].value

    def backward(self, loss: list[ref.Var], full: bool) -> dict[str, np.ndarray]:
        self.last = ref.gradients(loss[0])
        for name, var in self.dense.items():
            self.sums[name] = self.sums[name] + self.last.get(var, 0)
        for name, rows in self.tables.items():
            for k, var in enumerate(rows):
                self.sums[name][k] += self.last.get(var, 0)
        return dict(self.sums)

    def gradient(self, x: list[ref.Var]) -> np.ndarray:
        found = [self.last.get(v, np.zeros(v.shape)) for v in x]
        return np.stack(found, axis=-1) if len(found) > 1 else found[0]

    # the cells, as functions of variables

    def _step(self, x: ref.Var, h: ref.Var) -> tuple[ref.Var, ...]:
        p = self.dense
        return (ref.tanh(ref.affine(p["b"], p["M"], x, p["M"], h)),)

    def _gates(self, x: ref.Var, y: ref.Var) -> tuple[ref.Var, ...]:
        p = self.dense
        gate = ref.logistic(ref.matmul(p["U"], ref.cmult(x, p["g"])))
        rest = ref.shift(ref.scale(gate, -1.0), 1.0)
        c = ref.add(ref.cmult(gate, ref.tanh(y)), ref.cmult(rest, x))
        return c, ref.add(gate, ref.scale(c, 0.5))

    def _first_of_gates(self, x: ref.Var, y: ref.Var) -> tuple[ref.Var, ...]:
        return self._gates(x, y)[:1]

    def _child_sum(self, x: ref.Var, *children: ref.Var) -> tuple[ref.Var, ...]:
        p = self.dense
        wx = ref.matmul(p["M"], x)
        kept = [ref.cmult(ref.logistic(ref.add(ref.matmul(p["U"], c), wx)), c) for c in children]
        return ref.tanh(ref.add(ref.esum(kept), ref.average(children))), ref.softmax(ref.esum(children))

    def _two_lists(self, *operands: ref.Var) -> tuple[ref.Var, ...]:
        xs, ys = cut(operands)
        top = ref.emax([ref.cmult(y, self.dense["g"]) for y in ys])
        return (ref.add(ref.tanh(ref.add(ref.esum(xs), top)), ref.logsumexp(ys)),)

    def _labelled(self, h: ref.Var, label: int, weight: int) -> tuple[ref.Var, ...]:
        return (ref.scale(ref.pick_neg_log_softmax(ref.matmul(self.dense["U"], h), label), rate(weight)),)

    def _nested(self, x: ref.Var, y: ref.Var) -> tuple[ref.Var, ...]:
        c, h = self._gates(x, y)
        return self._step(c, ref.cmult(h, x))

    def _embed(self, word: int, other: int) -> tuple[ref.Var, ...]:
        product = ref.matmul(self.tables["matrices"][word], self.tables["words"][other])
        return (ref.add(product, self.dense["b"]),)

    def _picked(self, m: ref.Var, i: int) -> tuple[ref.Var, ...]:
        both = ref.reshape(ref.matmul(self.dense["N"], ref.transpose(m)), (6,))
        return (ref.add(ref.select(both, [1, 2, 3], 0), ref.pick(m, i, 1)),)

    def _chained(self, x: ref.Var) -> tuple[ref.Var, ...]:
        p = self.dense
        w = ref.tanh(ref.matmul(p["M"], p["U"]))
        return (ref.add(ref.layer_norm(ref.matmul(w, x), p["g"], p["b"]), ref.scale_gradient(p["b"], 0.5)),)

    def _moved(self, x: ref.Var) -> tuple[ref.Var, ...]:
        inside = ref.scale(x, 1.0)  # an output is a handle of its own, also where it is an argument
        return inside, ref.scale(self.dense["g"], 1.0), ref.select(inside, [0, 1], 0)


class Dynbatch:
    """The same calls on dynbatch; what the reference skipped is skipped here.

    Arguments:
        skipped: of the reference.
        strategies: used in turn, one for each time something is computed.
    """

    def __init__(self, model: Model, skipped: set[int], strategies: Sequence[str]) -> None:
        self.model = model
        self.skipped = skipped
        self.strategies = strategies
        self.count = self.runs = 0

    def start(self, values: dict[str, np.ndarray]) -> None:
        dy.renew_cg()
        for name, parameter in self.model.dense.items():
            parameter.set_value(values[name])
        self.model.words.init_from_array(values["words"])
        self.model.matrices.init_from_array(values["matrices"])
        self.model.pc.reset_gradient()

    def attempt(self, make: Callable[[], Any]) -> Any:
        self.count += 1
        return None if self.count in self.skipped else make()

    def strategy(self) -> Any:
        self.runs += 1
        return dy.autobatch(self.strategies[self.runs % len(self.strategies)])

    def input(self, array: np.ndarray, batched: bool = False) -> Any:
        return dy.inputTensor(array, batched=batched)

    def parameter(self, name: str) -> Any:
        return self.model.dense[name]

    def lookup(self, table: str, row: int, update: bool = True) -> Any:
        return dy.lookup(getattr(self.model, table), row, update)

    def call(self, name: str, operands: Sequence[Any], payload: Sequence[int]) -> Any:
        return CALLS[name].dynbatch(*operands, *payload)

    def cell(self, name: str, operands: Sequence[Any], payload: Sequence[int]) -> Sequence[Any]:
        model = self.model
        if name == "child_sum":
            return model.child_sum(operands[0], list(operands[1:]))
        if name == "two_lists":
            return (model.two_lists(*map(list, cut(operands))),)
        if name == "labelled":
            return (model.labelled(operands[0], payload[0], rate(payload[1])),)
        if name == "first_of_gates":
            return model.gates(*operands)[:1]
        result = getattr(model, name)(*operands, *payload)
        return result if isinstance(result, tuple) else (result,)

    def to_batch(self, operands: Sequence[Any]) -> Any:
        return dy.concatenate_to_batch(operands)

    def sum_batches(self, x: Any) -> Any:
        return dy.sum_batches(x)

    def pick_batch_elem(self, x: Any, i: int) -> Any:
        return dy.pick_batch_elem(x, i % x.dim()[1])

    def lookup_batch(self, rows: Sequence[int]) -> Any:
        return dy.lookup_batch(self.model.words, rows)

    def pick_batch(self, x: Any, indices: Sequence[int]) -> Any:
        return dy.pick_batch(x, indices)

    def losses_batch(self, x: Any, indices: Sequence[int]) -> Any:
        return dy.pickneglogsoftmax_batch(x, indices)

    def value(self, x: Any, keep: bool = True) -> np.ndarray:
        with self.strategy(), contextlib.nullcontext() if keep else dy.no_grad():
            return x.npvalue()

    def backward(self, loss: Any, full: bool) -> dict[str, np.ndarray]:
        with self.strategy():
            loss.backward(full=full)
        found = {name: parameter.grad_as_array() for name, parameter in self.model.dense.items()}
        tables = {name: getattr(self.model, name).grad_as_array() for name in ("words", "matrices")}
        return found | tables

    def gradient(self, x: Any) -> np.ndarray:
        return x.gradient()


# ---- scripts ---------------------------------------------------------------------------------------------------------


STEP = st.tuples(st.sampled_from(NAMES), *[st.integers(0, 255)] * 5)


@st.composite
def scripts(draw: Any) -> dict[str, Any]:
    """Templates of steps, instances as (template, number of steps, seed), and one list of instances for each graph."""
    templates = draw(st.lists(st.lists(STEP, min_size=1, max_size=14), min_size=1, max_size=3))
    instance = st.tuples(st.integers(0, len(templates) - 1), st.integers(1, 14), st.integers(0, 99))
    return {
        "templates": templates,
        "graphs": draw(st.lists(st.lists(instance, min_size=1, max_size=5), min_size=1, max_size=2)),
        "seed": draw(st.integers(0, 99)),
    }


class Value(NamedTuple):
    """Something recorded: its handle, its shape, whether it has batch elements, and what made it."""

    handle: Any
    shape: tuple[int, ...]
    lanes: int
    name: str


def shape_of(handle: Any) -> tuple[tuple[int, ...], int]:
    """Shape and number of batch elements of what either side made."""
    return (handle[0].shape, len(handle)) if isinstance(handle, list) else handle.dim()


class Interpreter:
    """Runs a script on one side; `log` holds everything that was asked for."""

    def __init__(self, side: Any, script: dict[str, Any]) -> None:
        self.side = side
        self.script = script
        self.log: list[tuple[str, np.ndarray]] = []

    def run(self) -> list[tuple[str, np.ndarray]]:
        rng = np.random.default_rng(self.script["seed"])
        values = {name: rng.normal(size=shape) * 0.7 for name, shape in PARAMETERS.items()}
        values |= {"words": rng.normal(size=(ROWS, *V)), "matrices": rng.normal(size=(ROWS, *M)) * 0.6}
        for g, instances in enumerate(self.script["graphs"]):
            self.side.start({name: value * (1 - 0.3 * g) for name, value in values.items()})
            self.everything: list[Value] = []
            for template, length, seed in instances:
                self._instance(self.script["templates"][template][:length], np.random.default_rng(seed))
            self._backward(self._loss(self.everything[-8:]), True, "end")
            self._backward(self._loss(self.everything[::3]), False, "again")
            for k, value in enumerate(self.everything):
                self._ask(f"graph {g}: value {k}, by {value.name}", self.side.value(value.handle))
        return self.log

    def _ask(self, what: str, found: np.ndarray) -> None:
        self.log.append((what, np.array(found)))

    def _instance(self, steps: Sequence[tuple[Any, ...]], rng: np.random.Generator) -> None:
        self.local: list[Value] = []
        self.rng = rng
        for shape in (V, V, M):
            self._input(shape)
        for name, *numbers in steps:
            self.numbers = list(numbers)
            self._do(name)

    def _add(self, handle: Any, name: str) -> None:
        value = Value(handle, *shape_of(handle), name)
        self.local.append(value)
        self.everything.append(value)

    def _input(self, shape: tuple[int, ...], batched: bool = False) -> Value:
        array = self.rng.normal(size=(*shape, LANES) if batched else shape)
        self._add(self.side.input(array, batched), "input")
        return self.local[-1]

    def _number(self) -> int:
        """The next of the step's numbers; they come round again."""
        self.numbers.append(self.numbers.pop(0))
        return self.numbers[-1]

    def _choose(self, shape: tuple[int, ...] | None, plain: bool = False) -> Value:
        """An operand: of this instance, or a parameter, or of any earlier instance.

        Where ``plain``, no parameter and nothing with batch elements.
        """
        k = self._number()
        pool = self.everything if k % 5 == 4 else self.local
        fitting = [v for v in pool if shape in (None, v.shape) and not (plain and v.lanes > 1)]
        if k % 5 == 3 and not plain:
            named = [n for n, s in PARAMETERS.items() if shape in (None, s)]
            if named:
                n = named[k // 5 % len(named)]
                return Value(self.side.parameter(n), PARAMETERS[n], 1, "parameter")
        return fitting[-1 - k // 5 % len(fitting)] if fitting else self._input(shape or V)

    def _operands(self, shapes: tuple[Any, ...]) -> list[Value]:
        if shapes[-1] is ...:
            first = self._choose(shapes[0])
            return [first] + [self._choose(first.shape) for _ in range(self._number() % 4)]
        chosen: list[Value] = []
        for shape in shapes:
            if shape is None and chosen:
                shape = chosen[0].shape
            chosen.append(self._choose(shape))
        return chosen

    def _do(self, name: str) -> None:
        if name in CALLS:
            call = CALLS[name]
            operands = self._operands(call.shapes[self._number() % len(call.shapes)])
            payload = [int(self.rng.integers(n)) for n in call.payload]
            made = self.side.attempt(lambda: self.side.call(name, [v.handle for v in operands], payload))
            if made is not None:
                self._add(made, "constant" if all(v.name == "parameter" for v in operands) else name)
        elif name in CELLS:
            self._cell(name)
        elif name in EVENTS:
            self._event(name)
        else:
            getattr(self, "_" + name)()

    def _cell(self, name: str) -> None:
        shapes = {"embed": [], "picked": [M], "chained": [V], "labelled": [V], "moved": [V]}.get(name, [V, V])
        operands = [self._choose(shape) for shape in shapes]
        if name in ("child_sum", "two_lists"):
            operands += [self._choose(V) for _ in range(self._number() % 3)]
        ends = {"embed": (ROWS, ROWS), "picked": (3,), "labelled": (3, 4)}.get(name, ())
        payload = [int(self.rng.integers(n)) for n in ends]
        made = self.side.attempt(lambda: self.side.cell(name, [v.handle for v in operands], payload))
        shared = operands and all(v.name == "parameter" for v in operands)
        for output in made or ():
            self._add(output, "constant" if shared else name)

    def _event(self, name: str) -> None:
        if name.startswith("value"):
            chosen = self._choose(None)
            self._ask(f"{name} of {chosen.name}", self.side.value(chosen.handle, name == "value"))
        else:
            self._backward(self._loss([self._choose(None), self._choose(V)]), name == "backward_full", name)

    def _loss(self, values: Sequence[Value]) -> Any:
        """A scalar that depends on all of these."""
        parts = []
        for value in values:
            part = self.side.call("sum_elems", [self.side.call("tanh", [value.handle], ())], ())
            parts.append(self.side.sum_batches(part) if value.lanes > 1 else part)
        return self.side.call("esum", parts, ())

    def _backward(self, loss: Any, full: bool, what: str) -> None:
        for name, gradient in self.side.backward(loss, full).items():
            self._ask(f"{what}: gradient of parameter {name}", gradient)
        if full:
            for k, value in enumerate(self.everything):
                if value.name != "constant":  # what depends on parameters alone can be one value for several handles
                    self._ask(f"{what}: gradient of {k}, by {value.name}", self.side.gradient(value.handle))

    # what has no operands, or is about batch elements

    def _vector(self) -> None:
        self._input(V)

    def _scalar(self) -> None:
        self._input(S)

    def _parameter(self) -> None:
        names = list(PARAMETERS)
        n = names[self._number() % len(names)]
        self._add(self.side.call("scale", [self.side.parameter(n)], (3,)), "scaled parameter")

    def _lookup(self) -> None:
        self._add(self.side.lookup("words", int(self.rng.integers(ROWS))), "lookup")

    def _lookup_matrix(self) -> None:
        self._add(self.side.lookup("matrices", int(self.rng.integers(ROWS))), "lookup of a matrix")

    def _lookup_constant(self) -> None:
        self._add(self.side.lookup("words", int(self.rng.integers(ROWS)), False), "lookup without gradient")

    def _batched_input(self) -> None:
        self._input(SHAPES[self._number() % len(SHAPES)], True)

    def _lookup_batch(self) -> None:
        self._add(self.side.lookup_batch([int(i) for i in self.rng.integers(ROWS, size=LANES)]), "lookup_batch")

    def _to_batch(self) -> None:
        operands = [self._choose(V, plain=True) for _ in range(LANES)]
        constant = any(v.name == "constant" for v in operands)
        self._add(self.side.to_batch([v.handle for v in operands]), "constant" if constant else "concatenate_to_batch")

    def _sum_batches(self) -> None:
        x = self._choose(None)
        made = self.side.attempt(lambda: self.side.sum_batches(x.handle))
        if made is not None:
            self._add(made, "sum_batches")

    def _pick_batch_elem(self) -> None:
        x = self._choose(None)
        if x.name != "parameter":
            made = self.side.pick_batch_elem(x.handle, self._number())
            self._add(made, "constant" if x.name == "constant" else "pick_batch_elem")

    def _pick_batch(self) -> None:
        x = self._choose(M)
        self._add(self.side.pick_batch(x.handle, [int(i) for i in self.rng.integers(3, size=LANES)]), "pick_batch")

    def _losses_batch(self) -> None:
        x = self._choose(V)
        indices = [int(i) for i in self.rng.integers(3, size=LANES)]
        made = self.side.attempt(lambda: self.side.losses_batch(x.handle, indices))
        if made is not None:
            self._add(made, "pickneglogsoftmax_batch")


# ---- the tests -------------------------------------------------------------------------------------------------------


def check(script: dict[str, Any], model: Model, strategies: Sequence[Sequence[str]]) -> None:
    plain = Plain()
    wanted = Interpreter(plain, script).run()
    for chosen in strategies:
        found = Interpreter(Dynbatch(model, plain.skipped, chosen), script).run()
        assert [what for what, _ in found] == [what for what, _ in wanted]
        for (what, actual), (_, expected) in zip(found, wanted):
            assert actual.shape == expected.shape, f"{what} under {chosen}"
            np.testing.assert_allclose(actual, expected, rtol=1e-7, atol=1e-8, err_msg=f"{what} under {chosen}")


@pytest.fixture(scope="module")
def model() -> Model:
    """One model for all graphs: its cells are traced, and its derived values cached, across them."""
    dy.init(dtype="float64", seed=1)
    return Model()


ALONE = [["off"], ["depth"], ["agenda"]]
IN_TURN = [["agenda", "off", "depth"]]


@settings(max_examples=250, report_multiple_bugs=False, suppress_health_check=list(HealthCheck))
@given(script=scripts())
def test_random_graphs(model: Model, script: dict[str, Any]) -> None:
    dy.init(dtype="float64")
    check(script, model, ALONE + IN_TURN)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(script=scripts())
def test_random_graphs_in_interpreted_kernels(model: Model, interpreted: None, script: dict[str, Any]) -> None:
    """The compiled tier without its compiler."""
    dy.init(dtype="float64")
    tiers.set_mode("always")
    check(script, model, ALONE[2:])
