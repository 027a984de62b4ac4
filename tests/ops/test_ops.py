"""Every op of the table, in float64: its value against NumPy, its gradients against finite differences, in batches."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np
import pytest
from op_table import OF_THEIR_OWN, ROWS, Instance, Row, Variant

import dynbatch as dy
import dynbatch.ops

CASES = [pytest.param(row, variant, id=f"{row}-{variant}") for row in ROWS for variant in row.variants]
WITH_OPERANDS = [case for case in CASES if case.values[1].shapes]
STRATEGIES = ["off", "depth", "agenda"]
BATCH = 4

pytestmark = pytest.mark.usefixtures("float64")


# ---- what a row should give ------------------------------------------------------------------------------------------


@functools.cache
def expected(row: Row, variant: Variant) -> list[tuple[Instance, np.ndarray, np.ndarray, list[np.ndarray]]]:
    """For some instances: (operands and payload, value, weights of the loss, gradients)."""
    rng = np.random.default_rng(list(f"{row}-{variant}".encode()))
    found = []
    for _ in range(BATCH):
        instance = row.draw(rng, variant)
        value = row.value(instance, variant)
        weights = rng.normal(size=value.shape)
        found.append((instance, value, weights, row.gradients(instance, variant, weights)))
    return found


def loss_of(result: Any, weights: np.ndarray) -> Any:
    """A scalar that depends on every element of the result in its own way."""
    return dy.sum_elems(dy.cmult(result, dy.inputTensor(weights)))


def assert_close(actual: Any, wanted: np.ndarray, what: str) -> None:
    actual = np.asarray(actual)
    assert actual.shape == wanted.shape, f"{what}: shape {actual.shape}, expected {wanted.shape}"
    np.testing.assert_allclose(actual, wanted, rtol=1e-6, atol=1e-8, err_msg=what)


def assert_value(actual: Any, wanted: np.ndarray, what: str) -> None:
    actual = np.asarray(actual)
    assert actual.shape == wanted.shape, f"{what}: shape {actual.shape}, expected {wanted.shape}"
    np.testing.assert_allclose(actual, wanted, rtol=1e-11, atol=1e-13, err_msg=what)


# ---- the table is complete -------------------------------------------------------------------------------------------


def test_every_public_op_has_a_row() -> None:
    public = {
        name
        for name, function in vars(dynbatch.ops).items()
        if inspect.isfunction(function) and function.__module__ == "dynbatch.ops" and not name.startswith("_")
    }
    assert public == {row.name for row in ROWS} | set(OF_THEIR_OWN)
    assert set(OF_THEIR_OWN.values()) <= set(globals())


def test_rows_can_be_told_apart() -> None:
    names = [f"{row}-{variant}" for row in ROWS for variant in row.variants]
    assert len(set(names)) == len(names)


# ---- the table -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("row", "variant"), CASES)
def test_alone(row: Row, variant: Variant) -> None:
    instance, value, weights, gradients = expected(row, variant)[0]
    xs = [dy.inputTensor(a) for a in instance.arrays]
    result = row.build(xs, instance.payload, variant.static)
    assert result.dim() == (value.shape, 1)
    assert_value(result.npvalue(), value, "value")
    loss = loss_of(result, weights)
    loss.backward(full=True)
    for position, (x, gradient) in enumerate(zip(xs, gradients)):
        assert_close(x.gradient(), gradient, f"gradient of operand {position}")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("row", "variant"), CASES)
def test_in_a_batch_of_different_instances(row: Row, variant: Variant, strategy: str) -> None:
    dy.init(autobatch=strategy)
    batches = []
    for count in (1, BATCH):
        dy.renew_cg()
        made = []
        for instance, value, weights, gradients in expected(row, variant)[:count]:
            xs = [dy.inputTensor(a) for a in instance.arrays]
            result = row.build(xs, instance.payload, variant.static)
            made.append((xs, result, loss_of(result, weights), value, gradients))
        total = dy.esum([loss for _, _, loss, _, _ in made])
        total.backward(full=True)
        batches.append((dy.plan("forward").batches, dy.plan("backward").batches))
        for k, (xs, result, _, value, gradients) in enumerate(made):
            assert_value(result.npvalue(), value, f"value of instance {k}")
            for position, (x, gradient) in enumerate(zip(xs, gradients)):
                assert_close(x.gradient(), gradient, f"gradient of operand {position} of instance {k}")
    if strategy != "off":
        assert batches[0] == batches[1], "several instances take more batches than one"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("row", "variant"), WITH_OPERANDS)
def test_operands_at_other_rows_of_a_batch(row: Row, variant: Variant, strategy: str) -> None:
    """Operands are themselves rows of a batch: one of them shared by all instances, the others out of order."""
    dy.init(autobatch=strategy)
    cases = expected(row, variant)
    shared = cases[0][0].arrays[0]
    instances = [Instance([shared, *instance.arrays[1:]], instance.payload) for instance, _, _, _ in cases]
    for _ in range(2):
        dy.inputTensor(np.ones(shared.shape)) * 2.0  # takes the first rows of the batch
    shared_base = dy.inputTensor(shared / 2)
    bases: list[list[Any]] = [[dy.inputTensor(a / 2) for a in i.arrays[1:]] for i in reversed(instances)][::-1]
    shared_operand = shared_base * 2.0
    operands = [[b * 2.0 for b in row_bases] for row_bases in reversed(bases)][::-1]
    results = [
        row.build([shared_operand, *xs], instance.payload, variant.static) for xs, instance in zip(operands, instances)
    ]
    total = dy.esum([loss_of(result, case[2]) for result, case in zip(results, cases)])
    total.backward(full=True)
    gradient_of_shared = np.zeros(shared.shape)
    for k, (instance, result) in enumerate(zip(instances, results)):
        assert_value(result.npvalue(), row.value(instance, variant), f"value of instance {k}")
        first, *others = row.gradients(instance, variant, cases[k][2])
        gradient_of_shared += first
        for position, (base, gradient) in enumerate(zip(bases[k], others)):
            assert_close(base.gradient(), 2 * gradient, f"gradient of operand {position + 1} of instance {k}")
    assert_close(shared_base.gradient(), 2 * gradient_of_shared, "gradient of the shared operand")


@pytest.mark.parametrize(("row", "variant"), WITH_OPERANDS)
def test_on_parameters(row: Row, variant: Variant) -> None:
    """A parameter in each place in turn, shared by all instances, and then parameters in all places."""
    cases = expected(row, variant)
    first = cases[0][0].arrays
    for places in [{position} for position in range(len(first))] + [set(range(len(first)))]:
        dy.renew_cg()
        pc = dy.ParameterCollection()
        parameters = {i: pc.add_parameters(first[i].shape, init=first[i]) for i in sorted(places)}
        wanted = {i: np.zeros(first[i].shape) for i in places}
        losses, results = [], []
        for instance, _, weights, _ in cases:
            if len(instance.arrays) < len(first):  # a list that is too short for the parameter's place
                continue
            arrays = [first[i] if i in places else a for i, a in enumerate(instance.arrays)]
            moved = Instance(arrays, instance.payload)
            operands = [parameters[i] if i in places else dy.inputTensor(a) for i, a in enumerate(arrays)]
            result = row.build(operands, instance.payload, variant.static)
            results.append((result, row.value(moved, variant)))
            losses.append(loss_of(result, weights))
            for i, gradient in enumerate(row.gradients(moved, variant, weights)):
                if i in places:
                    wanted[i] += gradient
        dy.esum(losses).backward()
        for result, value in results:
            assert_value(result.npvalue(), value, f"value with parameters at {places}")
        for i, parameter in parameters.items():
            assert_close(parameter.grad_as_array(), wanted[i], f"gradient of the parameter at {i} of {places}")


@pytest.mark.parametrize(("row", "variant"), WITH_OPERANDS)
def test_on_lookups(row: Row, variant: Variant) -> None:
    """The first operand is a row of a lookup table, one of them used by two instances."""
    indices = [2, 0, 4, 2]
    cases = expected(row, variant)
    table = dy.ParameterCollection().add_lookup_parameters((5, *cases[0][0].arrays[0].shape))
    for index, case in reversed(list(zip(indices, cases))):
        table.init_row(index, case[0].arrays[0])
    wanted = np.zeros(table.shape)
    losses, results = [], []
    for index, (instance, _, weights, _) in zip(indices, cases):
        moved = Instance([table.row_as_array(index), *instance.arrays[1:]], instance.payload)
        operands = [dy.lookup(table, index), *[dy.inputTensor(a) for a in instance.arrays[1:]]]
        result = row.build(operands, instance.payload, variant.static)
        results.append((result, row.value(moved, variant)))
        losses.append(loss_of(result, weights))
        wanted[index] += row.gradients(moved, variant, weights)[0]
    dy.esum(losses).backward()
    for result, value in results:
        assert_value(result.npvalue(), value, "value")
    assert_close(table.grad_as_array(), wanted, "gradient of the table")
