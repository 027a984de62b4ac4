"""The same expressions in DyNet and in dynbatch: run as a script with the library's name and a file to write to.

A process of its own for each library: DyNet's memory, options and graph are global.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Case(NamedTuple):
    """Operands (all are parameters), and the expression; ``build(dy, *operands)``."""

    shapes: tuple[tuple[int, ...], ...]
    build: Callable[..., Any]
    domain: str = "real"


A, B, M, N = (3,), (4,), (3, 4), (4, 3)
BATCH = np.random.default_rng(3).normal(size=(3, 4)).astype(np.float32)
TABLE = (5, 3)

UNARY = dict.fromkeys(
    ["exp", "square", "abs", "tanh", "logistic", "rectify", "elu", "silu", "log_sigmoid", "nobackprop", "flip_gradient"]
    + ["sum_elems", "mean_elems", "squared_norm", "softmax", "log_softmax"],
    "real",
) | {"log": "positive", "sqrt": "positive"}
"""Ops that take one operand of any shape, and where it is drawn from."""


def _op(name: str) -> Callable[[Any, Any], Any]:
    return lambda dy, x: getattr(dy, name)(x)


CASES: dict[str, Case] = {
    # inputs
    "inputVector": Case((A,), lambda dy, x: dy.cmult(x, dy.inputVector([1.0, -2.0, 3.0]))),
    "inputTensor": Case((M,), lambda dy, x: dy.cmult(x, dy.inputTensor(BATCH))),
    "inputTensor_batched": Case((A,), lambda dy, x: dy.cmult(x, dy.inputTensor(BATCH, batched=True))),
    "scalarInput": Case((A,), lambda dy, x: x + dy.scalarInput(2.5)),
    "zeros": Case((M,), lambda dy, x: x + dy.zeros((3, 4))),
    "ones": Case((M,), lambda dy, x: x + dy.ones((3, 4))),
    "constant": Case((A,), lambda dy, x: x + dy.constant((3,), 0.7)),
    "parameter": Case((A,), lambda dy, x: dy.parameter(x) + dy.parameter(x)),
    "const_parameter": Case((A, A), lambda dy, x, y: dy.cmult(dy.const_parameter(x), y)),
    # arithmetic
    "plus": Case((A, A), lambda dy, x, y: x + y),
    "plus_matrix_vector": Case((M, A), lambda dy, x, y: x + y),
    "plus_scalar": Case((M, (1,)), lambda dy, x, y: x + y),
    "plus_number": Case((A,), lambda dy, x: x + 2.5),
    "minus": Case((A, A), lambda dy, x, y: x - y),
    "minus_matrix_vector": Case((M, A), lambda dy, x, y: x - y),
    "minus_number": Case((A,), lambda dy, x: x - 2.5),
    "negative": Case((A,), lambda dy, x: -x),
    "times_number": Case((A,), lambda dy, x: x * 2.5),
    "over_number": Case((A,), lambda dy, x: x / 2.5),
    "matrix_vector": Case((M, B), lambda dy, x, y: x * y),
    "matrix_matrix": Case((M, N), lambda dy, x, y: x * y),
    "outer_product": Case((A, B), lambda dy, x, y: x * dy.transpose(y)),
    "cmult": Case((A, A), lambda dy, x, y: dy.cmult(x, y)),
    "cmult_broadcast": Case((M, A), lambda dy, x, y: dy.cmult(x, y)),
    "cmult_scalar": Case((M, (1,)), lambda dy, x, y: dy.cmult(x, y)),
    "cdiv": Case((A, A), lambda dy, x, y: dy.cdiv(x, y), "positive"),
    "cdiv_broadcast": Case((M, A), lambda dy, x, y: dy.cdiv(x, y), "positive"),
    "pow": Case((A, (1,)), lambda dy, x, y: dy.pow(x, y), "positive"),
    "affine_transform": Case((A, M, B), lambda dy, b, w, x: dy.affine_transform([b, w, x])),
    "affine_transform_two": Case((A, M, B, (3, 3), A), lambda dy, b, w, x, u, y: dy.affine_transform([b, w, x, u, y])),
    "affine_transform_matrix": Case((A, M, N), lambda dy, b, w, x: dy.affine_transform([b, w, x])),
    "transpose": Case((M,), lambda dy, x: dy.transpose(x)),
    "transpose_vector": Case((A,), lambda dy, x: dy.transpose(x)),
    "dot_product": Case((A, A), lambda dy, x, y: dy.dot_product(x, y)),
    # elementwise
    **{name: Case((M,), _op(name), domain) for name, domain in UNARY.items()},
    "softsign": Case((A,), lambda dy, x: dy.softsign(x)),
    "elu_alpha": Case((A,), lambda dy, x: dy.elu(x, 0.7)),
    "silu_beta": Case((A,), lambda dy, x: dy.silu(x, 0.7)),
    "scale_gradient": Case((A,), lambda dy, x: dy.scale_gradient(x, 0.7)),
    "bmax": Case((A, A), lambda dy, x, y: dy.bmax(x, y)),
    "bmin": Case((A, A), lambda dy, x, y: dy.bmin(x, y)),
    # lists
    "esum": Case((A, A, A), lambda dy, *xs: dy.esum(list(xs))),
    "average": Case((A, A, A), lambda dy, *xs: dy.average(list(xs))),
    "emax": Case((A, A, A), lambda dy, *xs: dy.emax(list(xs))),
    "logsumexp": Case((A, A, A), lambda dy, *xs: dy.logsumexp(list(xs))),
    # reductions
    "sum_dim_0": Case((M,), lambda dy, x: dy.sum_dim(x, [0])),
    "sum_dim_1": Case((M,), lambda dy, x: dy.sum_dim(x, [1])),
    "sum_dim_all": Case((M,), lambda dy, x: dy.sum_dim(x, [0, 1])),
    "mean_dim_0": Case((M,), lambda dy, x: dy.mean_dim(x, [0], False)),
    "mean_dim_1": Case((M,), lambda dy, x: dy.mean_dim(x, [1], False)),
    "max_dim_0": Case((M,), lambda dy, x: dy.max_dim(x, 0)),
    "max_dim_1": Case((M,), lambda dy, x: dy.max_dim(x, 1)),
    "argmax": Case((A,), lambda dy, x: dy.argmax(x, gradient_mode="zero_gradient")),
    "argmax_straight": Case((A,), lambda dy, x: dy.argmax(x, gradient_mode="straight_through_gradient")),
    "squared_distance": Case((A, A), lambda dy, x, y: dy.squared_distance(x, y)),
    "l1_distance": Case((A, A), lambda dy, x, y: dy.l1_distance(x, y)),
    "huber_distance": Case((A, A), lambda dy, x, y: dy.huber_distance(x, y)),
    "huber_distance_c": Case((A, A), lambda dy, x, y: dy.huber_distance(x, y, 0.5)),
    "binary_log_loss": Case((A, A), lambda dy, x, y: dy.binary_log_loss(x, dy.nobackprop(y)), "unit"),
    # softmax
    "softmax_vector": Case((A,), lambda dy, x: dy.softmax(x)),
    "softmax_rows": Case((M,), lambda dy, x: dy.softmax(x, 1)),
    "log_softmax_vector": Case((A,), lambda dy, x: dy.log_softmax(x)),
    "log_softmax_restrict": Case((B,), lambda dy, x: dy.log_softmax(x, [1, 3])[1]),
    "pickneglogsoftmax": Case((B,), lambda dy, x: dy.pickneglogsoftmax(x, 2)),
    "hinge": Case((B,), lambda dy, x: dy.hinge(x, 2)),
    "hinge_margin": Case((B,), lambda dy, x: dy.hinge(x, 2, 0.3)),
    # shapes
    "concatenate": Case((A, B, (1,)), lambda dy, *xs: dy.concatenate(list(xs))),
    "concatenate_1": Case((M, (3, 2)), lambda dy, *xs: dy.concatenate(list(xs), d=1)),
    "concatenate_rows": Case((M, (2, 4)), lambda dy, *xs: dy.concatenate(list(xs), d=0)),
    "concatenate_cols": Case((A, A), lambda dy, *xs: dy.concatenate_cols(list(xs))),
    "reshape": Case((M,), lambda dy, x: dy.reshape(x, (2, 6))),
    "reshape_flat": Case((M,), lambda dy, x: dy.reshape(x, (12,))),
    "pick": Case((B,), lambda dy, x: dy.pick(x, 2)),
    "pick_0": Case((M,), lambda dy, x: dy.pick(x, 2, 0)),
    "pick_1": Case((M,), lambda dy, x: dy.pick(x, 2, 1)),
    "item": Case((B,), lambda dy, x: x[2]),
    "item_negative": Case((B,), lambda dy, x: x[-1]),
    "item_of_matrix": Case((M,), lambda dy, x: x[1]),
    "slice": Case((B,), lambda dy, x: x[1:3]),
    "pick_range": Case((B,), lambda dy, x: dy.pick_range(x, 1, 3)),
    "select_rows": Case((M,), lambda dy, x: dy.select_rows(x, [2, 0])),
    "select_cols": Case((M,), lambda dy, x: dy.select_cols(x, [3, 0])),
    "layer_norm": Case((B, B, B), lambda dy, x, g, b: dy.layer_norm(x, g, b)),
    # batch elements
    "concatenate_to_batch": Case((A, A), lambda dy, x, y: dy.concatenate_to_batch([x, y])),
    "batch_times": Case((M[::-1],), lambda dy, w: w * dy.inputTensor(BATCH, batched=True)),
    "sum_batches": Case((A, A), lambda dy, x, y: dy.sum_batches(dy.concatenate_to_batch([x, y]))),
    "pick_batch_elem": Case((A, A), lambda dy, x, y: dy.pick_batch_elem(dy.concatenate_to_batch([x, y]), 1)),
    "pick_batch_elems": Case((A, A, A), lambda dy, *xs: dy.pick_batch_elems(dy.concatenate_to_batch(list(xs)), [0, 2])),
    "pick_batch": Case((B, B), lambda dy, x, y: dy.pick_batch(dy.concatenate_to_batch([x, y]), [1, 3])),
    "pickneglogsoftmax_batch": Case(
        (B, B), lambda dy, x, y: dy.pickneglogsoftmax_batch(dy.concatenate_to_batch([x, y]), [1, 3])
    ),
    "hinge_batch": Case((B, B), lambda dy, x, y: dy.hinge_batch(dy.concatenate_to_batch([x, y]), [1, 3])),
    "affine_batch": Case((B, N), lambda dy, b, w: dy.affine_transform([b, w, dy.inputTensor(BATCH, batched=True)])),
    "sum_dim_batch": Case((A,), lambda dy, x: dy.sum_dim(dy.cmult(x, dy.inputTensor(BATCH, batched=True)), [0], True)),
    "mean_dim_batch": Case(
        (A,), lambda dy, x: dy.mean_dim(dy.cmult(x, dy.inputTensor(BATCH, batched=True)), [0], True)
    ),
    "softmax_batch": Case((A, A), lambda dy, x, y: dy.softmax(dy.concatenate_to_batch([x, y]))),
    "sum_elems_batch": Case((A, A), lambda dy, x, y: dy.sum_elems(dy.concatenate_to_batch([x, y]))),
}

LOOKUPS: dict[str, Callable[[Any, Any], Any]] = {
    "lookup": lambda dy, t: dy.lookup(t, 3) + dy.lookup(t, 3) * 2.0 + dy.lookup(t, 0),
    "lookup_item": lambda dy, t: t[2],
    "lookup_constant": lambda dy, t: dy.lookup(t, 1) + dy.lookup(t, 2, update=False),
    "lookup_batch": lambda dy, t: dy.lookup_batch(t, [4, 0, 4]),
    "lookup_batch_sum": lambda dy, t: dy.sum_batches(dy.tanh(dy.lookup_batch(t, [4, 0, 4]))),
}


def draw(case: Case, rng: np.random.Generator) -> list[np.ndarray]:
    """Values of the operands."""
    between = {"real": (-2.0, 2.0), "positive": (0.3, 2.0), "unit": (0.1, 0.9)}[case.domain]
    return [rng.uniform(*between, size=s).astype(np.float32) for s in case.shapes]


def evaluate(dy: Any) -> dict[str, np.ndarray]:
    """Value, shape and gradients of every case."""
    found: dict[str, np.ndarray] = {}

    def record(name: str, build: Callable[..., Any], parameters: list[Any]) -> None:
        try:
            attempt(name, build(dy, *parameters), parameters)
        except Exception as error:  # reported with the case that it belongs to
            found[f"{name}: error"] = np.array(f"{type(error).__name__}: {error}")

    def attempt(name: str, result: Any, parameters: list[Any]) -> None:
        value = np.asarray(result.npvalue())
        found[f"{name}: value"] = value
        found[f"{name}: shape"] = np.array([*result.dim()[0], result.dim()[1]])
        shape, lanes = result.dim()
        rng = np.random.default_rng(9)
        parts = []
        for lane in range(lanes):  # one by one: DyNet's batched vector inputs need a NumPy before 2
            part = dy.pick_batch_elem(result, lane) if lanes > 1 else result
            weights = rng.normal(size=shape).astype(np.float32)
            weights = dy.inputVector(weights.tolist()) if len(shape) == 1 else dy.inputTensor(weights)
            parts.append(dy.sum_elems(dy.cmult(part, weights)))
        dy.esum(parts).backward()
        for k, parameter in enumerate(parameters):
            found[f"{name}: gradient {k}"] = np.array(parameter.grad_as_array())

    for number, (name, case) in enumerate(CASES.items()):
        pc = dy.ParameterCollection()
        dy.renew_cg()
        values = draw(case, np.random.default_rng(number))
        operands = [pc.add_parameters(v.shape, init=v) for v in values]
        record(name, case.build, operands)
    for name, build in LOOKUPS.items():
        pc = dy.ParameterCollection()
        dy.renew_cg()
        table = pc.add_lookup_parameters(TABLE, init=np.random.default_rng(5).normal(size=TABLE).astype(np.float32))
        record(name, build, [table])
    return found


if __name__ == "__main__":
    library, path = sys.argv[1:]
    if library == "dynet":
        import dynet_config

        dynet_config.set(mem=512, random_seed=1)
    np.savez(path, **evaluate(importlib.import_module(library)))
