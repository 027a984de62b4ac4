"""One row for every public op: how to call it, and what it computes, written in NumPy without dynbatch.

Adding an op means adding a row here; `test_ops` then checks its value and gradients alone, in batches, on parameters,
on manual batch elements and in a cell. The references work on arrays in the user's shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import dynbatch as dy
from tests import custom_kernels

Arrays = list[np.ndarray]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Variant:
    """One combination of operand shapes.

    Arguments:
        shapes: of the operands; of the one kind of element for list ops.
        static: what is part of the structure: an axis, a shape.
    """

    shapes: tuple[Shape, ...]
    static: tuple[Any, ...] = ()

    def __str__(self) -> str:
        text = "-".join("x".join(map(str, s)) for s in self.shapes) or "none"
        return text + "".join(f"-{s}" for s in self.static).replace(" ", "")


@dataclass(frozen=True)
class Instance:
    """Operands and payload of one call."""

    arrays: Arrays
    payload: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Row:
    """One way to call an op.

    Arguments:
        name: of the op, as in `dynbatch.ops`; an operator's is that of the function behind it.
        build: ``build(operands, payload, static)`` makes the expression.
        reference: the same of NumPy arrays.
        variants: shapes to try.
        payload: ``payload(rng, variant)`` draws what differs between calls.
        domain: where operands are drawn from: "real", "positive" or "unit"; one for all, or one each.
        gradient_of: the function whose gradient the op has, where that is not the reference.
        ragged: the operands are a list of any length.
        lanes: whether operands can be batched expressions.
        cell: whether the op can be called in a cell.
        note: tells rows of one op apart.
    """

    name: str
    build: Callable[[list[Any], tuple[Any, ...], tuple[Any, ...]], Any]
    reference: Callable[[Arrays, tuple[Any, ...], tuple[Any, ...]], np.ndarray]
    variants: Sequence[Variant]
    payload: Callable[[np.random.Generator, Variant], tuple[Any, ...]] = lambda rng, v: ()
    domain: str | tuple[str, ...] = "real"
    gradient_of: Callable[[Arrays, tuple[Any, ...], tuple[Any, ...]], np.ndarray] | None = None
    ragged: bool = False
    lanes: bool = True
    cell: bool = True
    note: str = ""

    def __str__(self) -> str:
        return f"{self.name}_{self.note}" if self.note else self.name

    def draw(self, rng: np.random.Generator, variant: Variant, length: int | None = None) -> Instance:
        """Operands and payload of one call; ``length`` is that of a ragged list."""
        shapes = variant.shapes
        if self.ragged:
            shapes = shapes * (length or int(rng.integers(1, 5)))
        domains = (self.domain,) * len(shapes) if isinstance(self.domain, str) else self.domain
        arrays = [_DOMAINS[d](rng, s) for d, s in zip(domains, shapes)]
        return Instance(arrays, self.payload(rng, Variant(shapes, variant.static)))

    def value(self, instance: Instance, variant: Variant) -> np.ndarray:
        """What the op should give."""
        return self.reference(instance.arrays, instance.payload, variant.static)

    def gradients(self, instance: Instance, variant: Variant, weights: np.ndarray, h: float = 1e-5) -> Arrays:
        """Central finite differences of ``sum(op * weights)`` for each operand."""
        function = self.gradient_of or self.reference
        found = []
        for position, array in enumerate(instance.arrays):
            gradient = np.zeros(array.shape)
            for at in np.ndindex(array.shape):
                ends = []
                for step in (h, -h):
                    moved = [a.copy() if i == position else a for i, a in enumerate(instance.arrays)]
                    moved[position][at] += step
                    ends.append(float((function(moved, instance.payload, variant.static) * weights).sum()))
                gradient[at] = (ends[0] - ends[1]) / (2 * h)
            found.append(gradient)
        return found


_DOMAINS: dict[str, Callable[[np.random.Generator, Shape], np.ndarray]] = {
    "real": lambda rng, s: rng.normal(size=s),
    "positive": lambda rng, s: rng.uniform(0.3, 2.0, size=s),
    "unit": lambda rng, s: rng.uniform(0.1, 0.9, size=s),
}


# ---- reference functions ---------------------------------------------------------------------------------------------


def aligned(f: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """``f`` with DyNet's broadcasting: shapes aligned at the left."""

    def call(*arrays: np.ndarray) -> np.ndarray:
        rank = max(a.ndim for a in arrays)
        return f(*[a.reshape(a.shape + (1,) * (rank - a.ndim)) for a in arrays])

    return call


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Matrix product; a vector is one column, and the result of a product with one is a vector."""
    left = a if a.ndim == 2 else a[:, None]
    return left @ b


def affine(bias: np.ndarray, *factors: np.ndarray) -> np.ndarray:
    total = bias
    for w, x in zip(factors[::2], factors[1::2]):
        total = aligned(np.add)(total, product(w, x))
    return total


def scalar(x: Any) -> np.ndarray:
    return np.asarray([x], dtype=float)


def log_sum_exp(x: np.ndarray, axis: int, keepdims: bool = False) -> np.ndarray:
    return np.log(np.exp(x).sum(axis=axis, keepdims=keepdims))


def softmax(x: np.ndarray, axis: int = 0) -> np.ndarray:
    e = np.exp(x)
    return e / e.sum(axis=axis, keepdims=True)


def without(shape: Shape, dims: Sequence[int]) -> Shape:
    return tuple(n for d, n in enumerate(shape) if d not in dims) or (1,)


def vector_of(x: np.ndarray) -> np.ndarray:
    """NumPy's 0-d result as a scalar of shape (1,)."""
    return x.reshape(1) if x.ndim == 0 else x


def layer_norm(x: np.ndarray, g: np.ndarray, b: np.ndarray) -> np.ndarray:
    centered = x - x.mean(axis=0, keepdims=True)
    normal = centered / np.sqrt((centered**2).mean(axis=0, keepdims=True) + 1e-12)
    return aligned(lambda n, g, b: n * g + b)(normal, g, b)


def huber(d: np.ndarray, c: float) -> np.ndarray:
    return np.where(np.abs(d) < c, d * d / 2, c * (np.abs(d) - c / 2))


def hinge(x: np.ndarray, index: int, margin: float) -> np.ndarray:
    total = 0.0
    for k in range(len(x)):
        if k != index:
            total += max(0.0, margin - x[index] + x[k])
    return scalar(total)


erf = np.vectorize(math.erf)


def one_hot_of_max(x: np.ndarray, axis: int) -> np.ndarray:
    result = np.zeros(x.shape)
    np.put_along_axis(result, np.expand_dims(x.argmax(axis=axis), axis), 1.0, axis)
    return result


# ---- making rows -----------------------------------------------------------------------------------------------------


def variants(*shapes: Any) -> list[Variant]:
    """Variants given as shapes of the operands, without static parts."""
    return [Variant(tuple(s)) for s in shapes]


ELEMENTWISE = variants([(3,)], [(2, 3)], [(1,)], [(2, 3, 2)])
BROADCAST = variants(
    [(3,), (3,)],
    [(2, 3), (2, 3)],
    [(2, 3), (2,)],
    [(2,), (2, 3)],
    [(1,), (3,)],
    [(2, 3), (1,)],
    [(2, 3), (2, 1)],
    [(1, 3), (2, 3)],
    [(3, 1), (1, 2)],
    [(2, 3, 2), (2, 3)],
    [(1,), (1,)],
)
PRODUCTS = variants(
    [(2, 3), (3,)],
    [(2, 3), (3, 4)],
    [(1, 3), (3,)],
    [(1, 3), (3, 1)],
    [(2, 1), (1, 4)],
    [(3,), (1, 3)],
    [(3,), (1,)],
    [(1,), (1, 3)],
    [(1,), (1,)],
)


def unary(name: str, f: Callable[[np.ndarray], np.ndarray], domain: str = "real", **extra: Any) -> Row:
    op = getattr(dy, name)
    return Row(name, lambda xs, p, s: op(xs[0]), lambda xs, p, s: f(xs[0]), ELEMENTWISE, domain=domain, **extra)


def binary(name: str, f: Callable[..., np.ndarray], shapes: Sequence[Variant] = BROADCAST, **extra: Any) -> Row:
    op = getattr(dy, name)
    return Row(name, lambda xs, p, s: op(xs[0], xs[1]), lambda xs, p, s: aligned(f)(*xs), shapes, **extra)


def number(rng: np.random.Generator, v: Variant) -> tuple[float]:
    return (float(rng.uniform(0.5, 2.0)),)


def index_into(dim: int) -> Callable[[np.random.Generator, Variant], tuple[int]]:
    """An index along a dimension of the first operand."""
    return lambda rng, v: (int(rng.integers(v.shapes[0][dim])),)


def indices_for_each(rng: np.random.Generator, v: Variant) -> tuple[list[int]]:
    """An index into each operand."""
    return ([int(rng.integers(s[0])) for s in v.shapes],)


def elements(batch: Any) -> Any:
    """The elements of a batched expression one after the other."""
    return dy.concatenate([dy.pick_batch_elem(batch, i) for i in range(batch.dim()[1])])


def _inputs() -> list[Row]:
    """Inputs take no operands; what they are given is payload."""

    def array(rng: np.random.Generator, v: Variant) -> tuple[np.ndarray]:
        return (rng.normal(size=v.static[0]),)

    shapes = [Variant((), (s,)) for s in [(3,), (2, 3), (1,), (2, 3, 2)]]
    return [
        Row(
            "inputVector",
            lambda xs, p, s: dy.inputVector(list(p[0])),
            lambda xs, p, s: p[0],
            shapes[:1],
            array,
            cell=False,
        ),
        Row("inputTensor", lambda xs, p, s: dy.inputTensor(p[0]), lambda xs, p, s: p[0], shapes, array, cell=False),
        Row("scalarInput", lambda xs, p, s: dy.scalarInput(p[0]), lambda xs, p, s: scalar(p[0]), [Variant(())], number),
        Row("zeros", lambda xs, p, s: dy.zeros(s[0]), lambda xs, p, s: np.zeros(s[0]), shapes),
        Row("ones", lambda xs, p, s: dy.ones(s[0]), lambda xs, p, s: np.ones(s[0]), shapes),
        Row("constant", lambda xs, p, s: dy.constant(s[0], p[0]), lambda xs, p, s: np.full(s[0], p[0]), shapes, number),
    ]


def _arithmetic() -> list[Row]:
    def with_number(name: str, note: str, f: Callable[[Any, Any], Any], domain: str = "real") -> Row:
        """``f`` is plain Python arithmetic, so it makes both the expression and the reference."""
        return Row(
            name, lambda xs, p, s: f(xs[0], p[0]), lambda xs, p, s: f(xs[0], p[0]), ELEMENTWISE[:2], number,
            domain=domain, note=note,
        )  # fmt: skip

    def operator(name: str, f: Callable[[Any, Any], Any], shapes: Sequence[Variant] = BROADCAST, **extra: Any) -> Row:
        return Row(name, lambda xs, p, s: f(*xs), lambda xs, p, s: aligned(f)(*xs), shapes, **extra)

    second_positive = {"domain": ("real", "positive")}
    return [
        operator("plus", lambda x, y: x + y),
        with_number("plus", "number", lambda x, a: x + a),
        with_number("plus", "number_left", lambda x, a: a + x),
        operator("minus", lambda x, y: x - y),
        with_number("minus", "number", lambda x, a: x - a),
        with_number("minus", "number_left", lambda x, a: a - x),
        with_number("times", "number", lambda x, a: x * a),
        with_number("times", "number_left", lambda x, a: a * x),
        Row("times", lambda xs, p, s: xs[0] * xs[1], lambda xs, p, s: product(*xs), PRODUCTS),
        Row("matrix_product", lambda xs, p, s: xs[0] @ xs[1], lambda xs, p, s: product(*xs), PRODUCTS[:3]),
        operator("divide", lambda x, y: x / y, **second_positive),
        with_number("divide", "number", lambda x, a: x / a),
        with_number("divide", "number_left", lambda x, a: a / x, domain="positive"),
        binary("cmult", lambda x, y: x * y),
        binary("cdiv", lambda x, y: x / y, **second_positive),
        binary("pow", lambda x, y: x**y, BROADCAST[:6], domain=("positive", "real")),
        with_number("pow", "number", lambda x, a: x**a, domain="positive"),
        Row(
            "pow", lambda xs, p, s: dy.pow(xs[0], p[0]), lambda xs, p, s: xs[0] ** p[0], ELEMENTWISE[:2],
            lambda rng, v: (int(rng.integers(1, 5)),), note="of_negative",
        ),
        Row("negate", lambda xs, p, s: -xs[0], lambda xs, p, s: -xs[0], ELEMENTWISE),
        binary("bmax", np.maximum),
        binary("bmin", np.minimum),
        Row(
            "affine_transform",
            lambda xs, p, s: dy.affine_transform(xs),
            lambda xs, p, s: affine(*xs),
            variants(
                [(2,), (2, 3), (3,)],
                [(2,), (2, 3), (3,), (2, 4), (4,)],
                [(2,), (2, 3), (3, 4)],
                [(2, 4), (2, 3), (3, 4), (2, 1), (1, 4)],
                [(1,), (1, 3), (3,)],
                [(3,)],
                [(2, 3)],
            ),
        ),
        Row(
            "transpose", lambda xs, p, s: dy.transpose(xs[0]), lambda xs, p, s: np.atleast_2d(xs[0].T),
            variants([(2, 3)], [(3,)], [(1, 3)], [(3, 1)], [(1,)]),
        ),
        Row(
            "dot_product", lambda xs, p, s: dy.dot_product(*xs), lambda xs, p, s: scalar((xs[0] * xs[1]).sum()),
            variants([(3,), (3,)], [(2, 3), (2, 3)], [(1,), (1,)]),
        ),
    ]  # fmt: skip


def _elementwise() -> list[Row]:
    def with_payload(name: str, f: Callable[[np.ndarray, float], np.ndarray]) -> Row:
        op = getattr(dy, name)
        return Row(name, lambda xs, p, s: op(xs[0], p[0]), lambda xs, p, s: f(xs[0], p[0]), ELEMENTWISE, number)

    def logistic(x: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-x))

    def constant(xs: Arrays, p: tuple[Any, ...], s: tuple[Any, ...]) -> np.ndarray:
        return np.zeros(xs[0].shape)

    return [
        unary("exp", np.exp),
        unary("log", np.log, "positive"),
        unary("sqrt", np.sqrt, "positive"),
        unary("square", lambda x: x * x),
        unary("abs", np.abs),
        unary("tanh", np.tanh),
        unary("logistic", logistic),
        unary("rectify", lambda x: np.maximum(x, 0)),
        with_payload("elu", lambda x, a: np.where(x > 0, x, a * (np.exp(x) - 1))),
        unary("elu", lambda x: np.where(x > 0, x, np.exp(x) - 1), note="default"),
        with_payload("silu", lambda x, b: x * logistic(b * x)),
        unary("silu", lambda x: x * logistic(x), note="default"),
        unary("gelu", lambda x: x * 0.5 * (1 + erf(x / math.sqrt(2)))),
        unary("softsign", lambda x: x / (1 + np.abs(x))),
        unary("log_sigmoid", lambda x: np.log(logistic(x))),
        unary("nobackprop", lambda x: x, gradient_of=constant),
        unary("flip_gradient", lambda x: x, gradient_of=lambda xs, p, s: -xs[0]),
        Row(
            "scale_gradient", lambda xs, p, s: dy.scale_gradient(xs[0], p[0]), lambda xs, p, s: xs[0], ELEMENTWISE,
            number, gradient_of=lambda xs, p, s: p[0] * xs[0],
        ),
        unary("scale_gradient", lambda x: x, note="default"),
    ]  # fmt: skip


def _lists() -> list[Row]:
    def ragged(name: str, f: Callable[[np.ndarray], np.ndarray]) -> Row:
        op = getattr(dy, name)
        return Row(
            name, lambda xs, p, s: op(xs), lambda xs, p, s: f(np.stack(xs)), variants([(3,)], [(2, 3)], [(1,)]),
            ragged=True,
        )  # fmt: skip

    return [
        ragged("esum", lambda x: x.sum(0)),
        ragged("average", lambda x: x.mean(0)),
        ragged("emax", lambda x: x.max(0)),
        ragged("logsumexp", lambda x: log_sum_exp(x, 0)),
        Row(
            "esum", lambda xs, p, s: dy.esum(xs), lambda xs, p, s: aligned(lambda *a: sum(a[1:], a[0]))(*xs),
            variants([(2, 3), (2,), (1,)], [(1,), (3,)]), note="broadcasting",
        ),
    ]  # fmt: skip


def _reductions() -> list[Row]:
    over = [
        Variant(((2, 3),), (0,)),
        Variant(((2, 3),), (1,)),
        Variant(((3,),), (0,)),
        Variant(((2, 3, 2),), (1,)),
        Variant(((2, 3, 2),), (2,)),
        Variant(((1,),), (0,)),
    ]
    several = [*over[:3], Variant(((2, 3),), ((0, 1),)), Variant(((2, 3, 2),), ((0, 2),)), Variant(((2, 3),), ((),))]

    def along(x: np.ndarray, d: Any, mean: bool) -> np.ndarray:
        dims = (d,) if isinstance(d, int) else tuple(d)
        total = x.sum(axis=dims).reshape(without(x.shape, dims))
        return total / math.prod(x.shape[i] for i in dims) if mean else total

    def pair(name: str, f: Callable[[np.ndarray, np.ndarray], Any], **extra: Any) -> Row:
        op = getattr(dy, name)
        shapes = variants([(3,), (3,)], [(2, 3), (2, 3)], [(1,), (1,)])
        return Row(name, lambda xs, p, s: op(*xs), lambda xs, p, s: scalar(f(*xs)), shapes, **extra)

    def dims(d: Any) -> Any:
        return d if isinstance(d, int) else list(d)

    return [
        Row("sum_elems", lambda xs, p, s: dy.sum_elems(xs[0]), lambda xs, p, s: scalar(xs[0].sum()), ELEMENTWISE),
        Row("mean_elems", lambda xs, p, s: dy.mean_elems(xs[0]), lambda xs, p, s: scalar(xs[0].mean()), ELEMENTWISE),
        Row("sum_dim", lambda xs, p, s: dy.sum_dim(xs[0], dims(s[0])), lambda xs, p, s: along(xs[0], s[0], False),
            several),
        Row("mean_dim", lambda xs, p, s: dy.mean_dim(xs[0], dims(s[0])), lambda xs, p, s: along(xs[0], s[0], True),
            several),
        Row("mean_dim", lambda xs, p, s: dy.mean_dim(xs[0], [0], False, 7),
            lambda xs, p, s: along(xs[0], 0, False) / 7, over[:1], note="count"),
        Row("max_dim", lambda xs, p, s: dy.max_dim(xs[0], s[0]), lambda xs, p, s: vector_of(xs[0].max(axis=s[0])),
            over),
        Row("argmax", lambda xs, p, s: dy.argmax(xs[0], "zero_gradient", s[0]),
            lambda xs, p, s: one_hot_of_max(xs[0], s[0]), over, gradient_of=lambda xs, p, s: np.zeros(xs[0].shape)),
        Row("argmax", lambda xs, p, s: dy.argmax(xs[0], "straight_through_gradient", s[0]),
            lambda xs, p, s: one_hot_of_max(xs[0], s[0]), over, gradient_of=lambda xs, p, s: xs[0], note="straight"),
        Row("squared_norm", lambda xs, p, s: dy.squared_norm(xs[0]), lambda xs, p, s: scalar((xs[0] ** 2).sum()),
            ELEMENTWISE),
        pair("squared_distance", lambda x, y: ((x - y) ** 2).sum()),
        pair("l1_distance", lambda x, y: np.abs(x - y).sum()),
        pair("huber_distance", lambda x, y: huber(x - y, 1.345).sum(), note="default"),
        Row("huber_distance", lambda xs, p, s: dy.huber_distance(*xs, p[0]),
            lambda xs, p, s: scalar(huber(xs[0] - xs[1], p[0]).sum()), variants([(3,), (3,)], [(2, 3), (2, 3)]),
            number),
        pair("binary_log_loss", lambda x, y: -(y * np.log(x) + (1 - y) * np.log(1 - x)).sum(), domain="unit"),
        Row("binary_log_loss", lambda xs, p, s: dy.binary_log_loss(xs[0], dy.inputVector(p[0])),
            lambda xs, p, s: scalar(-np.where(np.array(p[0]) == 1, np.log(xs[0]), np.log(1 - xs[0])).sum()),
            variants([(3,)]), lambda rng, v: (rng.integers(0, 2, size=3).astype(float).tolist(),), domain="unit",
            cell=False, note="of_labels"),
    ]  # fmt: skip


def _softmaxes() -> list[Row]:
    over = [
        Variant(((4,),), (0,)),
        Variant(((3, 2),), (0,)),
        Variant(((3, 2),), (1,)),
        Variant(((2, 3, 2),), (1,)),
        Variant(((1,),), (0,)),
    ]
    scores = variants([(4,)], [(1,)])

    def mask(rng: np.random.Generator, v: Variant) -> tuple[np.ndarray]:
        """One entry in each softmax is masked out, another one in each instance."""
        shape, axis = v.shapes[0], v.static[0]
        masked = np.zeros(shape)
        chosen = np.expand_dims(rng.integers(shape[axis], size=without(shape, [axis])), axis)
        np.put_along_axis(masked, chosen.reshape([1 if d == axis else n for d, n in enumerate(shape)]), -np.inf, axis)
        return (masked,)

    def negative_log(x: np.ndarray, index: int) -> np.ndarray:
        return scalar(-np.log(softmax(x))[index])

    def hinge_payload(rng: np.random.Generator, v: Variant) -> tuple[int, float]:
        return int(rng.integers(v.shapes[0][0])), float(rng.uniform(0.5, 2.0))

    return [
        Row("softmax", lambda xs, p, s: dy.softmax(xs[0], s[0]), lambda xs, p, s: softmax(xs[0], s[0]), over),
        Row("softmax", lambda xs, p, s: dy.softmax(xs[0] + dy.inputTensor(p[0]), s[0]),
            lambda xs, p, s: softmax(xs[0] + p[0], s[0]), over[:4], mask, cell=False, note="masked"),
        Row("log_softmax", lambda xs, p, s: dy.log_softmax(xs[0], d=s[0]),
            lambda xs, p, s: np.log(softmax(xs[0], s[0])), over),
        Row("log_softmax", lambda xs, p, s: dy.select_rows(dy.log_softmax(xs[0], [3, 1]), [1, 3]),
            lambda xs, p, s: np.log(softmax(xs[0][[1, 3]])), scores[:1], cell=False, note="restrict"),
        Row("pickneglogsoftmax", lambda xs, p, s: dy.pickneglogsoftmax(xs[0], p[0]),
            lambda xs, p, s: negative_log(xs[0], p[0]), scores, index_into(0)),
        Row("hinge", lambda xs, p, s: dy.hinge(xs[0], p[0], p[1]), lambda xs, p, s: hinge(xs[0], p[0], p[1]), scores,
            hinge_payload),
        Row("hinge", lambda xs, p, s: dy.hinge(xs[0], p[0]), lambda xs, p, s: hinge(xs[0], p[0], 1.0), scores[:1],
            index_into(0), note="default"),
        Row("pickneglogsoftmax_batch",
            lambda xs, p, s: elements(dy.pickneglogsoftmax_batch(dy.concatenate_to_batch(xs), p[0])),
            lambda xs, p, s: np.concatenate([negative_log(x, i) for x, i in zip(xs, p[0])]), scores[:1],
            indices_for_each, ragged=True, lanes=False, cell=False),
        Row("pickneglogsoftmax", lambda xs, p, s: elements(dy.pickneglogsoftmax(dy.concatenate_to_batch(xs), p[0])),
            lambda xs, p, s: np.concatenate([negative_log(x, i) for x, i in zip(xs, p[0])]), scores[:1],
            indices_for_each, ragged=True, lanes=False, cell=False, note="of_lanes"),
        Row("hinge_batch", lambda xs, p, s: elements(dy.hinge_batch(dy.concatenate_to_batch(xs), p[0], 0.7)),
            lambda xs, p, s: np.concatenate([hinge(x, i, 0.7) for x, i in zip(xs, p[0])]), scores[:1],
            indices_for_each, ragged=True, lanes=False, cell=False),
    ]  # fmt: skip


def _shapes() -> list[Row]:
    def column_wise(xs: Arrays, d: int) -> np.ndarray:
        rank = max(d + 1, *(x.ndim for x in xs))
        return np.concatenate([x.reshape(x.shape + (1,) * (rank - x.ndim)) for x in xs], axis=d)

    joined = [
        Variant(((2,), (3,), (1,)), (0,)),
        Variant(((2, 3), (1, 3)), (0,)),
        Variant(((2, 3), (2, 1)), (1,)),
        Variant(((2, 3), (2,)), (1,)),
        Variant(((2,), (2,)), (1,)),
        Variant(((2, 3), (2, 3)), (2,)),
        Variant(((3,),), (0,)),
    ]
    reshapes = [
        Variant(((2, 3),), ((3, 2),)),
        Variant(((2, 3),), ((6,),)),
        Variant(((6,),), ((2, 3),)),
        Variant(((2, 3),), ((1, 6),)),
        Variant(((4, 3),), ((2, 3, 2),)),
        Variant(((1,),), ((1, 1),)),
    ]
    along = [
        Variant(((4,),), (0,)),
        Variant(((2, 3),), (0,)),
        Variant(((2, 3),), (1,)),
        Variant(((2, 3, 2),), (1,)),
        Variant(((2, 3, 2),), (2,)),
    ]
    ranges = [
        Variant(((4,),), (1, 3, 0)),
        Variant(((4,),), (0, 4, 0)),
        Variant(((2, 3),), (1, 3, 1)),
        Variant(((3, 2),), (0, 2, 0)),
        Variant(((2, 3, 2),), (1, 2, 1)),
    ]

    def picked(x: np.ndarray, i: int, d: int) -> np.ndarray:
        return vector_of(np.take(x, i, axis=d))

    def some(d: int, count: int) -> Callable[[np.random.Generator, Variant], tuple[list[int]]]:
        """Indices along a dimension, with repeats."""
        return lambda rng, v: ([int(i) for i in rng.integers(v.shapes[0][d], size=count)],)

    def item(note: str, index: Any, shapes: Sequence[Variant]) -> Row:
        return Row("get_item", lambda xs, p, s: xs[0][index], lambda xs, p, s: vector_of(np.asarray(xs[0][index])),
                   shapes, note=note)  # fmt: skip

    vectors = variants([(4,)], [(4, 2)])
    return [
        Row("concatenate", lambda xs, p, s: dy.concatenate(xs, s[0]), lambda xs, p, s: column_wise(xs, s[0]), joined),
        Row("concatenate_cols", lambda xs, p, s: dy.concatenate_cols(xs), lambda xs, p, s: column_wise(xs, 1),
            variants([(3,), (3,), (3,)], [(3,), (3, 2)], [(2, 3), (2, 1)])),
        Row("reshape", lambda xs, p, s: dy.reshape(xs[0], s[0]),
            lambda xs, p, s: xs[0].reshape(s[0], order="F"), reshapes),
        Row("pick", lambda xs, p, s: dy.pick(xs[0], p[0], s[0]), lambda xs, p, s: picked(xs[0], p[0], s[0]), along,
            lambda rng, v: (int(rng.integers(v.shapes[0][v.static[0]])),)),
        Row("pick", lambda xs, p, s: dy.pick(xs[0], -1), lambda xs, p, s: picked(xs[0], -1, 0), vectors,
            note="negative"),
        Row("pick_batch", lambda xs, p, s: elements(dy.pick_batch(dy.concatenate_to_batch(xs), p[0])),
            lambda xs, p, s: np.concatenate([picked(x, i, 0) for x, i in zip(xs, p[0])]), vectors,
            indices_for_each, ragged=True, lanes=False, cell=False),
        Row("pick", lambda xs, p, s: elements(dy.pick(dy.concatenate_to_batch(xs), p[0])),
            lambda xs, p, s: np.concatenate([picked(x, i, 0) for x, i in zip(xs, p[0])]), vectors,
            indices_for_each, ragged=True, lanes=False, cell=False, note="of_lanes"),
        Row("pick_range", lambda xs, p, s: dy.pick_range(xs[0], *s),
            lambda xs, p, s: np.take(xs[0], range(s[0], s[1]), axis=s[2]), ranges),
        Row("select_rows", lambda xs, p, s: dy.select_rows(xs[0], p[0]), lambda xs, p, s: xs[0][p[0]],
            variants([(4,)], [(3, 2)], [(2, 3, 2)]), some(0, 3)),
        Row("select_cols", lambda xs, p, s: dy.select_cols(xs[0], p[0]), lambda xs, p, s: xs[0][:, p[0]],
            variants([(2, 3)], [(1, 4)], [(2, 3, 2)]), some(1, 3)),
        Row("get_item", lambda xs, p, s: xs[0][p[0]], lambda xs, p, s: vector_of(np.asarray(xs[0][p[0]])), vectors,
            index_into(0)),
        item("negative", -1, vectors),
        item("slice", slice(1, 3), vectors),
        item("open_slice", slice(-3, None), vectors),
        item("backwards", slice(None, None, -1), vectors),
        item("stepped", slice(0, 4, 2), vectors),
        item("list", [2, 0, 2], vectors),
        item("array", np.array([2, 0, 2]), vectors),
        item("range", range(3), vectors),
    ]  # fmt: skip


def _normalization() -> list[Row]:
    return [
        Row("layer_norm", lambda xs, p, s: dy.layer_norm(*xs), lambda xs, p, s: layer_norm(*xs),
            variants([(4,), (4,), (4,)], [(4, 3), (4,), (4,)], [(4, 3), (4, 3), (1,)])),
    ]  # fmt: skip


def _batch_elements() -> list[Row]:
    shapes = variants([(3,)], [(2, 3)], [(1,)])

    def two(rng: np.random.Generator, v: Variant) -> tuple[list[int]]:
        return ([int(i) for i in rng.integers(len(v.shapes), size=2)],)

    def batch(xs: list[Any]) -> Any:
        return dy.concatenate_to_batch(xs)

    return [
        Row("concatenate_to_batch", lambda xs, p, s: elements(batch(xs)), lambda xs, p, s: np.concatenate(xs), shapes,
            ragged=True, lanes=False, cell=False),
        Row("pick_batch_elem", lambda xs, p, s: dy.pick_batch_elem(batch(xs), p[0]), lambda xs, p, s: xs[p[0]], shapes,
            lambda rng, v: (int(rng.integers(len(v.shapes))),), ragged=True, lanes=False, cell=False),
        Row("pick_batch_elems", lambda xs, p, s: elements(dy.pick_batch_elems(batch(xs), p[0])),
            lambda xs, p, s: np.concatenate([xs[i] for i in p[0]]), shapes, two, ragged=True, lanes=False, cell=False),
        Row("sum_batches", lambda xs, p, s: dy.sum_batches(batch(xs)), lambda xs, p, s: np.sum(xs, axis=0), shapes,
            ragged=True, lanes=False, cell=False),
        Row("sum_dim", lambda xs, p, s: dy.sum_dim(batch(xs), [0], True),
            lambda xs, p, s: vector_of(np.sum(xs, axis=(0, 1))), shapes,
            ragged=True, lanes=False, cell=False, note="batch"),
        Row("sum_dim", lambda xs, p, s: dy.sum_dim(batch(xs), [], True),
            lambda xs, p, s: np.sum(xs, axis=0), shapes, ragged=True, lanes=False, cell=False, note="batch_only"),
        Row("mean_dim", lambda xs, p, s: dy.mean_dim(batch(xs), [0], True),
            lambda xs, p, s: vector_of(np.mean(xs, axis=(0, 1))), shapes,
            ragged=True, lanes=False, cell=False, note="batch"),
    ]  # fmt: skip


def _custom() -> list[Row]:
    gate = dy.custom_op("gate", **custom_kernels.on_cpu("gate"))
    weigh = dy.custom_op("weigh", **custom_kernels.on_cpu("weigh"))
    return [
        Row("custom_op", lambda xs, p, s: gate(*xs), lambda xs, p, s: custom_kernels.gate_reference(*xs),
            variants([(3,), (3,)]), note="gate"),
        Row("custom_op", lambda xs, p, s: weigh(*xs), lambda xs, p, s: custom_kernels.weigh_reference(*xs),
            variants([(2, 3), (3,)], [(1, 2), (2,)]), note="weigh"),
    ]  # fmt: skip


ROWS = [
    *_inputs(),
    *_arithmetic(),
    *_elementwise(),
    *_lists(),
    *_reductions(),
    *_softmaxes(),
    *_shapes(),
    *_normalization(),
    *_batch_elements(),
    *_custom(),
]

OF_THEIR_OWN = {
    "parameter": "test_a_parameter_by_its_dynet_name",
    "const_parameter": "test_a_constant_parameter_gets_no_gradient",
    "lookup": "test_lookup",
    "lookup_batch": "test_lookup_batch",
    "random_normal": "test_moments",
    "random_uniform": "test_moments",
    "random_bernoulli": "test_moments",
    "random_gumbel": "test_moments",
    "dropout": "test_dropout_gradient",
    "noise": "test_noise_gradient",
}
"""Ops on tables and random ops, whose tests are written out, by name."""
