"""Every op of the table, in float64: its value against NumPy, its gradients against finite differences, in batches."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import op_table
import pytest
from op_table import OF_THEIR_OWN, ROWS, Instance, Row, Variant

import dynbatch as dy
import dynbatch.functions
from dynbatch.cpu import tiers

# These rows' kernels are for the CPU; tests/cuda/simulator_cases.py has others.
MARKS = {"custom_op": [pytest.mark.cpu]}

CASES = [
    pytest.param(row, variant, id=f"{row}-{variant}", marks=MARKS.get(row.name, []))
    for row in ROWS
    for variant in row.variants
]
WITH_OPERANDS = [case for case in CASES if case.values[1].shapes]
FIRST_VARIANTS = [pytest.param(row, row.variants[0], id=str(row), marks=MARKS.get(row.name, [])) for row in ROWS]
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
    assert set(dynbatch.functions.__all__) <= {row.name for row in ROWS} | set(OF_THEIR_OWN)
    operators = {row.name for row in ROWS} - set(dynbatch.functions.__all__)
    assert operators == {"plus", "minus", "times", "matrix_product", "divide", "negate", "get_item", "custom_op"}
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
    if strategy != "off" and len({value.shape for *_, value, _ in made}) == 1:
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


@pytest.mark.parametrize(("row", "variant"), [c for c in WITH_OPERANDS if c.values[0].lanes])
def test_on_batch_elements(row: Row, variant: Variant) -> None:
    """Manually batched operands, some or all of them; the others are the same for all batch elements."""
    rng = np.random.default_rng(1)
    lanes = [row.draw(rng, variant, length=2) for _ in range(3)]
    payload = lanes[0].payload
    count = len(lanes[0].arrays)
    for batched in {(0,), (count - 1,), tuple(range(count))}:
        arrays = [[(lane if i in batched else lanes[0]).arrays[i] for i in range(count)] for lane in lanes]
        xs = [
            dy.inputTensor(np.stack([a[i] for a in arrays], axis=-1), batched=True) if i in batched
            else dy.inputTensor(lanes[0].arrays[i])
            for i in range(count)
        ]  # fmt: skip
        instances = [Instance(a, payload) for a in arrays]
        values = [row.value(instance, variant) for instance in instances]
        weights = rng.normal(size=(*values[0].shape, len(lanes)))
        result = row.build(xs, payload, variant.static)
        assert result.dim() == (values[0].shape, len(lanes))
        assert_value(result.npvalue(), np.stack(values, axis=-1), f"value with operands {batched} batched")
        product = dy.cmult(result, dy.inputTensor(weights, batched=True))
        dy.sum_batches(dy.sum_elems(product)).backward(full=True)
        gradients = [row.gradients(instance, variant, weights[..., k]) for k, instance in enumerate(instances)]
        for i, x in enumerate(xs):
            of_lanes = [g[i] for g in gradients]
            wanted = np.stack(of_lanes, axis=-1) if i in batched else np.sum(of_lanes, axis=0)
            assert_close(x.gradient(), wanted, f"gradient of operand {i} with operands {batched} batched")


def in_a_cell(row: Row, variant: Variant, parameters: dict[int, Any]) -> Any:
    """The op in the middle of a cell, some of its operands being parameters."""

    @dy.cell
    def cell(operands, payload):
        xs = [x * 2.0 for x in operands]
        xs = [parameters[i] * 2.0 if i in parameters else xs.pop(0) for i in range(len(parameters) + len(xs))]
        return row.build(xs, payload, variant.static) * 3.0

    @dy.cell
    def list_cell(operands, payload):
        return row.build([x * 2.0 for x in operands], payload, variant.static) * 3.0

    return list_cell if row.ragged else cell


def as_tuple(payload: Any) -> Any:
    return tuple(as_tuple(p) for p in payload) if isinstance(payload, (tuple, list)) else payload


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("row", "variant"), [c for c in CASES if c.values[0].cell])
def test_in_a_cell(row: Row, variant: Variant, strategy: str) -> None:
    dy.init(autobatch=strategy)
    cell = in_a_cell(row, variant, {})
    kind = list if row.ragged else tuple
    made = []
    for instance, value, weights, gradients in expected(row, variant):
        bases = [dy.inputTensor(a / 2) for a in instance.arrays]
        result = cell(kind(bases), as_tuple(instance.payload))
        made.append((bases, result, loss_of(result, weights), value, gradients))
    dy.esum([loss for _, _, loss, _, _ in made]).backward(full=True)
    for k, (bases, result, _, value, gradients) in enumerate(made):
        assert_value(result.npvalue(), 3 * value, f"value of instance {k}")
        for position, (x, gradient) in enumerate(zip(bases, gradients)):
            assert_close(x.gradient(), 6 * gradient, f"gradient of operand {position} of instance {k}")
    if strategy != "off" and variant.shapes:
        rows = [r.rows for r in dy.plan().batch_reports if "cell" in r.name]
        assert rows == [BATCH], "the calls of one cell do not run together"


@pytest.mark.parametrize(("row", "variant"), [c for c in FIRST_VARIANTS if c.values[0].cell])
def test_compiled(row: Row, variant: Variant) -> None:
    """The compiled tier, on one Program of each op; `test_in_a_cell` with kernels instead of NumPy."""
    tiers.set_mode("always")
    test_in_a_cell(row, variant, "agenda")


SHARED_BY_A_BATCH = [
    *[c for c in FIRST_VARIANTS if c.values[1].shapes],
    *[c for c in CASES if c.values[0].name in ("times", "affine_transform")],
]


@pytest.mark.parametrize("cells", [False, True], ids=["ops", "cells"])
@pytest.mark.parametrize(("row", "variant"), SHARED_BY_A_BATCH)
@pytest.mark.usefixtures("interpreted", "tier")
def test_operands_that_the_whole_batch_shares(row: Row, variant: Variant, cells: bool) -> None:
    """One value is an operand of every node of a batch: only the first operand, the last, or all of them."""
    if cells and not row.cell:
        return

    def build(operands, payload):
        return row.build(operands if row.ragged else list(operands), payload, variant.static) * 3.0

    if cells:
        build = dy.cell(build)
    kind = list if row.ragged else tuple
    cases = expected(row, variant)
    first = cases[0][0].arrays
    count = min(len(instance.arrays) for instance, _, _, _ in cases)
    for places in {(0,), (count - 1,), tuple(range(count))}:
        dy.renew_cg()
        shared = {i: dy.inputTensor(first[i] / 2) * 2.0 for i in places}
        wanted = {i: np.zeros(first[i].shape) for i in places}
        results, losses = [], []
        for instance, _, weights, _ in cases:
            arrays = [first[i] if i in places else a for i, a in enumerate(instance.arrays)]
            moved = Instance(arrays, instance.payload)
            operands = [shared[i] if i in places else dy.inputTensor(a / 2) * 2.0 for i, a in enumerate(arrays)]
            result = build(kind(operands), as_tuple(instance.payload) if cells else instance.payload)
            results.append((result, 3 * row.value(moved, variant)))
            losses.append(loss_of(result, weights))
            for i, gradient in enumerate(row.gradients(moved, variant, weights)):
                if i in places:
                    wanted[i] += 3 * gradient
        dy.esum(losses).backward(full=True)
        for k, (result, value) in enumerate(results):
            assert_value(result.npvalue(), value, f"value of instance {k} with operands {places} shared")
        for i, x in shared.items():
            assert_close(x.gradient(), wanted[i], f"gradient of operand {i} of {places} shared")


@pytest.mark.parametrize(("row", "variant"), [c for c in WITH_OPERANDS if c.values[0].cell and not c.values[0].ragged])
def test_on_parameters_in_a_cell(row: Row, variant: Variant) -> None:
    cases = expected(row, variant)
    first = cases[0][0].arrays
    for places in [{position} for position in range(len(first))] + [set(range(len(first)))]:
        dy.renew_cg()
        pc = dy.ParameterCollection()
        parameters = {i: pc.add_parameters(first[i].shape, init=first[i] / 2) for i in sorted(places)}
        cell = in_a_cell(row, variant, parameters)
        wanted = {i: np.zeros(first[i].shape) for i in places}
        losses, results = [], []
        for instance, _, weights, _ in cases:
            arrays = [first[i] if i in places else a for i, a in enumerate(instance.arrays)]
            moved = Instance(arrays, instance.payload)
            bases = [dy.inputTensor(a / 2) for i, a in enumerate(arrays) if i not in places]
            result = cell(tuple(bases), as_tuple(instance.payload))
            results.append((result, row.value(moved, variant)))
            losses.append(loss_of(result, weights))
            for i, gradient in enumerate(row.gradients(moved, variant, weights)):
                if i in places:
                    wanted[i] += 6 * gradient
        dy.esum(losses).backward()
        for result, value in results:
            assert_value(result.npvalue(), 3 * value, f"value with parameters at {places}")
        for i, parameter in parameters.items():
            assert_close(parameter.grad_as_array(), wanted[i], f"gradient of the parameter at {i} of {places}")


@pytest.mark.parametrize("cells", [False, True], ids=["ops", "cells"])
@pytest.mark.parametrize(("row", "variant"), WITH_OPERANDS)
def test_backward_of_values_computed_without_gradients(row: Row, variant: Variant, cells: bool) -> None:
    """What was computed under no_grad kept no intermediates; backward computes them again."""
    if cells and not row.cell:
        return
    cell = in_a_cell(row, variant, {}) if cells else None
    kind = list if row.ragged else tuple
    made = []
    for instance, _, weights, gradients in expected(row, variant)[:2]:
        xs = [dy.inputTensor(a / 2 if cells else a) for a in instance.arrays]
        if cell:
            result = cell(kind(xs), as_tuple(instance.payload))
        else:
            result = row.build(xs, instance.payload, variant.static)
        made.append((xs, loss_of(result, weights), gradients))
    with dy.no_grad():
        total = dy.esum([loss for _, loss, _ in made])
        total.value()
    total.backward(full=True)
    for xs, _, gradients in made:
        for x, gradient in zip(xs, gradients):
            assert_close(x.gradient(), 6 * gradient if cells else gradient, "gradient")


# ---- inputs, parameters and tables -----------------------------------------------------------------------------------


def test_a_batched_input() -> None:
    array = np.arange(24.0).reshape(2, 3, 4)
    x = dy.inputTensor(array, batched=True)
    assert x.dim() == ((2, 3), 4)
    np.testing.assert_array_equal(x.npvalue(), array)
    for i in range(4):
        np.testing.assert_array_equal(dy.pick_batch_elem(x, i).npvalue(), array[..., i])
    scalars = dy.inputTensor([1.0, 2.0, 3.0], batched=True)
    assert scalars.dim() == ((1,), 3)
    assert dy.sum_batches(scalars).value() == 6


def test_inputs_are_copies() -> None:
    array = np.ones(3)
    x = dy.inputTensor(array)
    array[:] = 7
    assert x.value() == [1, 1, 1]
    x.npvalue()[:] = 9
    assert x.value() == [1, 1, 1]


@pytest.mark.parametrize("made", [lambda: np.asfortranarray(np.arange(6.0).reshape(2, 3)), lambda: np.arange(12.0)[::2],
                                  lambda: np.arange(6, dtype=np.int32).reshape(3, 2), lambda: [[1, 2], [3, 4]],
                                  lambda: np.float32(3), lambda: np.ones((2, 2), bool)])  # fmt: skip
def test_any_array_is_an_input(made: Any) -> None:
    wanted = np.atleast_1d(np.asarray(made(), dtype=float))
    np.testing.assert_array_equal(dy.inputTensor(made()).npvalue(), wanted)


def test_a_parameter_by_its_dynet_name() -> None:
    W = dy.ParameterCollection().add_parameters((2, 3))
    x = dy.inputVector([1.0, 2.0, 3.0])
    y = dy.parameter(W) * x
    np.testing.assert_allclose(y.npvalue(), W.as_array() @ [1, 2, 3])
    dy.sum_elems(y).backward()
    np.testing.assert_allclose(W.grad_as_array(), np.ones((2, 1)) * [1, 2, 3])


def test_a_constant_parameter_gets_no_gradient() -> None:
    pc = dy.ParameterCollection()
    W, V = pc.add_parameters((2, 3)), pc.add_parameters((2, 3))
    x = dy.inputVector([1.0, 2.0, 3.0])
    loss = dy.sum_elems(dy.const_parameter(W) * x + dy.parameter(V, update=False) * x + W * x + W * x)
    assert loss.value() == pytest.approx(((3 * W.as_array() + V.as_array()) @ [1, 2, 3]).sum())
    loss.backward()
    np.testing.assert_allclose(W.grad_as_array(), 2 * np.ones((2, 1)) * [1, 2, 3])
    assert not V.grad_as_array().any()
    dy.renew_cg()
    inner = dy.tanh(dy.inputVector([1.0, 2.0, 3.0]))
    dy.sum_elems(dy.const_parameter(W) * inner).backward(full=True)
    np.testing.assert_allclose(inner.gradient(), W.as_array().sum(0)), "it passes the gradient on"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_parameter_that_is_not_updated_gets_no_gradient(strategy: str) -> None:
    dy.init(autobatch=strategy)
    pc = dy.ParameterCollection()
    W, V = pc.add_parameters((2, 2)), pc.add_parameters((2, 2), update=False)
    xs = [dy.inputVector([float(i), 1.0]) for i in range(3)]
    dy.sum_elems(dy.esum([W * (V * x) for x in xs])).backward()
    wanted = sum(np.ones((2, 1)) * (V.as_array() @ [float(i), 1.0]) for i in range(3))
    np.testing.assert_allclose(W.grad_as_array(), wanted)
    assert not V.grad_as_array().any()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_lookup(strategy: str) -> None:
    dy.init(autobatch=strategy)
    table = dy.ParameterCollection().add_lookup_parameters((5, 2, 3))
    rows = [dy.lookup(table, 3), table[0], dy.lookup(table, -2), dy.lookup(table, 1, update=False)]
    for row, index in zip(rows, (3, 0, 3, 1)):
        np.testing.assert_array_equal(row.npvalue(), table.row_as_array(index))
    weights = np.arange(6.0).reshape(2, 3)
    dy.esum([loss_of(row, weights * (k + 1)) for k, row in enumerate(rows)]).backward()
    wanted = np.zeros((5, 2, 3))
    wanted[3], wanted[0] = 4 * weights, 2 * weights
    np.testing.assert_allclose(table.grad_as_array(), wanted)
    np.testing.assert_array_equal(table.touched, [0, 3])


def test_lookup_batch() -> None:
    table = dy.ParameterCollection().add_lookup_parameters((5, 3))
    batch = dy.lookup_batch(table, [4, 0, 4])
    assert batch.dim() == ((3,), 3)
    np.testing.assert_array_equal(batch.npvalue(), table.as_array()[[4, 0, 4]].T)
    weights = np.arange(9.0).reshape(3, 3)
    loss = dy.sum_batches(dy.sum_elems(dy.cmult(batch, dy.inputTensor(weights, batched=True))))
    constant = dy.sum_batches(dy.squared_norm(dy.lookup_batch(table, [1, 2], update=False)))
    (loss + constant).backward()
    wanted = np.zeros((5, 3))
    wanted[4], wanted[0] = weights[:, 0] + weights[:, 2], weights[:, 1]
    np.testing.assert_allclose(table.grad_as_array(), wanted)


# ---- where functions are not smooth ----------------------------------------------------------------------------------


def gradient_at(build: Any, *values: Any) -> list[list[float]]:
    """Gradients of the sum of the elements, at these operands."""
    xs = [dy.inputTensor(v) for v in values]
    dy.sum_elems(build(*xs)).backward(full=True)
    return [x.gradient().reshape(-1).tolist() for x in xs]


def test_gradients_of_ties_go_to_one_operand() -> None:
    assert gradient_at(lambda x, y: dy.emax([x, y]), [1.0, 2.0, 3.0], [1.0, 5.0, 0.0]) == [[1, 0, 1], [0, 1, 0]]
    assert gradient_at(lambda x, y: dy.emax([x, y, x]), [1.0], [1.0]) == [[1], [0]]
    for op in (dy.bmax, dy.bmin):
        first, second = gradient_at(op, [1.0], [1.0])
        assert first[0] + second[0] == 1
    assert gradient_at(lambda x: dy.max_dim(x), [2.0, 5.0, 5.0]) == [[0, 1, 0]]
    assert gradient_at(lambda x: dy.argmax(x, "straight_through_gradient"), [1.0, 1.0]) == [[1, 1]]
    assert dy.argmax(dy.inputVector([1.0, 3.0, 3.0])).value() == [0, 1, 0]


def test_gradients_at_the_edges_are_finite() -> None:
    assert gradient_at(dy.abs, [0.0]) == [[0]]
    assert gradient_at(dy.rectify, [0.0, -0.0]) == [[0, 0]]
    assert gradient_at(lambda x: dy.pow(x, 2), [0.0, -2.0]) == [[0, -4]]
    assert gradient_at(lambda x: dy.pow(x, 1), [0.0]) == [[1]]
    assert gradient_at(lambda x: dy.pow(x, 0), [0.0, 2.0]) == [[0, 0]]
    assert gradient_at(dy.softsign, [0.0]) == [[1]]


def test_large_operands_do_not_overflow() -> None:
    x = [-800.0, 0.0, 800.0]
    with np.errstate(over="raise", divide="raise", invalid="raise"):
        assert dy.logistic(dy.inputVector(x)).value() == [0, 0.5, 1]
        assert dy.tanh(dy.inputVector(x)).value() == [-1, 0, 1]
        assert dy.log_sigmoid(dy.inputVector(x)).value() == pytest.approx([-800, -np.log(2), 0])
        assert dy.softmax(dy.inputVector(x)).value() == [0, 0, 1]
        assert dy.log_softmax(dy.inputVector(x)).value() == [-1600, -800, 0]
        assert dy.pickneglogsoftmax(dy.inputVector(x), 0).value() == 1600
        assert dy.logsumexp([dy.scalarInput(v) for v in x]).value() == 800
        assert dy.elu(dy.inputVector(x)).value() == [-1, 0, 800]
        assert dy.silu(dy.inputVector(x)).value() == pytest.approx([0, 0, 800])
        assert dy.gelu(dy.inputVector(x)).value() == pytest.approx([0, 0, 800])
    for op in (dy.logistic, dy.tanh, dy.log_sigmoid, dy.softmax, dy.log_softmax, dy.elu, dy.silu, dy.gelu):
        assert np.isfinite(gradient_at(op, x)).all(), op.__name__


@pytest.mark.usefixtures("tier")
def test_accuracy_in_float32() -> None:
    """The compiled tier has approximations of its own; an absolute error, relative where values are large."""
    dy.init(dtype="float32")
    x = np.concatenate([np.linspace(-30, 30, 4001), np.linspace(-1, 1, 2001)]).astype(np.float32)
    wanted = {
        "tanh": np.tanh, "logistic": lambda x: 1 / (1 + np.exp(-x)), "exp": np.exp,
        "softsign": lambda x: x / (1 + np.abs(x)),
        "log_sigmoid": lambda x: -np.log1p(np.exp(-x)), "elu": lambda x: np.where(x > 0, x, np.expm1(x)),
        "silu": lambda x: x / (1 + np.exp(-x)), "gelu": lambda x: x * 0.5 * (1 + op_table.erf(x / np.sqrt(2))),
    }  # fmt: skip
    for name, f in wanted.items():
        exact = f(x.astype(np.float64))
        error = np.abs(getattr(dy, name)(dy.inputVector(x)).npvalue() - exact) / np.maximum(1, np.abs(exact))
        assert error.max() < 2e-6, f"{name} at {x[error.argmax()]}"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.usefixtures("tier")
def test_a_logarithm_of_a_small_probability(dtype: str) -> None:
    """The logistic function keeps its relative precision where it is tiny, as DyNet's does."""
    dy.init(dtype=dtype)
    x = dy.inputVector([-20.0, -60.0, -1.0])
    y = dy.log(dy.logistic(x))
    assert y.value() == pytest.approx([-20, -60, -np.log1p(np.e)], rel=1e-6)
    dy.sum_elems(y).backward(full=True)
    assert x.gradient().tolist() == pytest.approx([1, 1, 1 - 1 / (1 + np.e)], rel=1e-5)


@pytest.mark.parametrize("op", [
    dy.exp, dy.log, dy.sqrt, dy.square, dy.abs, dy.tanh, dy.logistic, dy.rectify, dy.elu, dy.silu, dy.gelu,
    dy.softsign, dy.log_sigmoid, dy.softmax, dy.log_softmax,
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.usefixtures("tier")
def test_nan_is_kept(op: Any, dtype: str) -> None:
    """A fault upstream must stay visible."""
    dy.init(dtype=dtype)
    assert np.isnan(op(dy.inputVector([np.nan, 1.0])).value()[0])


def test_binary_log_loss_of_certain_labels() -> None:
    assert dy.binary_log_loss(dy.inputVector([0.0, 1.0]), dy.inputVector([0.0, 1.0])).value() == 0
    first, _ = gradient_at(dy.binary_log_loss, [0.0, 1.0, 0.5], [0.0, 1.0, 1.0])
    assert first == [1, -1, -2]


# ---- masks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_masked_softmaxes_have_finite_gradients(strategy: str) -> None:
    dy.init(autobatch=strategy)
    x = [dy.inputVector([1.0, -np.inf, 2.0]), dy.inputVector([-np.inf, -np.inf, 0.5])]
    loss = dy.esum([dy.pick(dy.log_softmax(v), 2) + dy.pick(dy.softmax(v), 2) + dy.pickneglogsoftmax(v, 2) for v in x])
    loss.backward(full=True)
    for v in x:
        assert np.isfinite(v.gradient()).all()
        assert v.gradient()[1] == 0


def test_a_fully_masked_softmax_is_defined() -> None:
    masked = [-np.inf, -np.inf]
    assert dy.softmax(dy.inputVector(masked)).value() == [0, 0]
    assert dy.log_softmax(dy.inputVector(masked)).value() == masked
    assert dy.pickneglogsoftmax(dy.inputVector(masked), 0).value() == np.inf
    assert dy.logsumexp([dy.scalarInput(v) for v in masked]).value() == -np.inf
    for build in (dy.softmax, dy.log_softmax, lambda x: dy.logsumexp([x, x]), lambda x: dy.pickneglogsoftmax(x, 0)):
        assert np.isfinite(gradient_at(build, masked)).all()


@pytest.mark.parametrize("op", [dy.softmax, dy.log_softmax, lambda x: dy.pickneglogsoftmax(x, 0)])
def test_a_fully_masked_softmax_is_an_error_in_debug(op: Any) -> None:
    dy.init(debug=True)
    with pytest.raises(dy.ValidityError, match="softmax"):
        op(dy.inputVector([-np.inf, -np.inf])).value()


# ---- random ops ------------------------------------------------------------------------------------------------------


RANDOM = {
    "random_normal": (lambda n: dy.random_normal((n,), 2.0, 3.0), 2.0, 3.0),
    "random_uniform": (lambda n: dy.random_uniform((n,), -1.0, 5.0), 2.0, 6 / np.sqrt(12)),
    "random_bernoulli": (lambda n: dy.random_bernoulli((n,), 0.3, 2.0), 0.6, 2 * np.sqrt(0.3 * 0.7)),
    "random_gumbel": (lambda n: dy.random_gumbel((n,), 1.0, 2.0), 1 + 2 * np.euler_gamma, 2 * np.pi / np.sqrt(6)),
    "dropout": (lambda n: dy.dropout(dy.ones((n,)), 0.4), 1.0, np.sqrt(0.4 / 0.6)),
    "noise": (lambda n: dy.noise(dy.ones((n,)), 0.5), 1.0, 0.5),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", RANDOM)
def test_moments(name: str, dtype: str) -> None:
    dy.init(dtype=dtype)
    draw, mean, deviation = RANDOM[name]
    n = 100_000
    values = draw(n).npvalue()
    assert values.dtype == dtype
    assert np.isfinite(values).all()
    assert values.mean() == pytest.approx(mean, abs=6 * deviation / np.sqrt(n))
    assert values.std() == pytest.approx(deviation, rel=0.03)
    several = np.stack([e.npvalue() for e in [draw(8) for _ in range(4000)]])
    assert several.mean() == pytest.approx(mean, abs=6 * deviation / np.sqrt(32_000))
    between = np.corrcoef(several[:-1].reshape(-1), several[1:].reshape(-1))[0, 1]
    assert abs(between) < 6 / np.sqrt(32_000), "draws of consecutive nodes are correlated"
    within = np.corrcoef(several[:, :-1].reshape(-1), several[:, 1:].reshape(-1))[0, 1]
    assert abs(within) < 6 / np.sqrt(28_000), "elements of one draw are correlated"


def test_uniforms_are_uniform() -> None:
    values = np.sort(dy.random_uniform((100_000,)).npvalue())
    assert values[0] > 0 and values[-1] < 1
    distance = np.abs(values - (np.arange(values.size) + 0.5) / values.size).max()
    assert distance < 2.2 / np.sqrt(values.size), "Kolmogorov-Smirnov, at a chance of about 1e-4"


def test_normals_have_normal_tails() -> None:
    values = dy.random_normal((200_000,)).npvalue()
    assert (values**3).mean() == pytest.approx(0, abs=0.06)
    assert (values**4).mean() == pytest.approx(3, abs=0.15)
    assert np.abs(values).max() > 4


def test_bernoulli_takes_two_values() -> None:
    assert set(dy.random_bernoulli((1000,), 0.5, 3.0).value()) == {0.0, 3.0}
    assert set(dy.random_bernoulli((100,), 0.0).value()) == {0.0}
    assert set(dy.random_bernoulli((100,), 1.0).value()) == {1.0}


def draws(seed: int, strategy: str, others: int = 0, midway: bool = False) -> list[np.ndarray]:
    """The same random nodes, recorded among ``others`` more nodes that draw nothing."""
    dy.init(seed=seed, autobatch=strategy)
    dy.renew_cg()
    x = dy.inputVector([1.0, -2.0, 3.0])
    found = []
    for _ in range(3):
        for _ in range(others):
            dy.tanh(x) + dy.ones((3,))
        found += [draw(3) for draw, _, _ in RANDOM.values()]
        found.append(dy.dropout(dy.tanh(x), 0.5))
        if midway:
            found[-2].value()
    return [e.npvalue() for e in found]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_seed_gives_the_same_draws_in_any_batch(strategy: str) -> None:
    wanted = draws(5, "off")
    for others, midway in ((0, False), (4, False), (1, True)):
        for a, b in zip(wanted, draws(5, strategy, others, midway)):
            np.testing.assert_array_equal(a, b)
    assert any((a != b).any() for a, b in zip(wanted, draws(6, strategy)))
    flat = np.concatenate([a for a in wanted if a.size == 3])
    assert len(np.unique(flat)) > len(flat) / 2, "nodes share their draws"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_draws_of_batch_elements_and_cells_differ(strategy: str) -> None:
    dy.init(autobatch=strategy)
    batch = dy.noise(dy.inputTensor(np.zeros((4, 3)), batched=True), 1.0).npvalue()
    assert len(np.unique(batch)) == 12

    @dy.cell
    def twice(x):
        return dy.noise(x, 1.0), dy.noise(x, 1.0)

    zero = dy.inputVector([0.0, 0.0])
    values = [e.npvalue() for _ in range(3) for e in twice(zero)]
    assert len(np.unique(np.concatenate(values))) == 12


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_dropout_gradient(strategy: str, keep: bool) -> None:
    """The gradient has the mask of the forward pass, also where it is drawn again."""
    dy.init(autobatch=strategy)
    arrays = [np.arange(1.0, 21.0) + i for i in range(3)]
    xs = [dy.inputVector(a) for a in arrays]
    dropped = [dy.dropout(x, rate) for x, rate in zip(xs, (0.5, 0.25, 0.0))]
    loss = dy.esum([dy.sum_elems(y) for y in dropped])
    if not keep:
        with dy.no_grad():
            loss.value()
    loss.backward(full=True)
    for x, y, a, rate in zip(xs, dropped, arrays, (0.5, 0.25, 0.0)):
        mask = y.npvalue() / a
        assert set(np.round(mask, 12)) <= {0.0, round(1 / (1 - rate), 12)}
        np.testing.assert_allclose(x.gradient(), mask, atol=1e-12)


def test_noise_gradient() -> None:
    x = dy.inputVector([1.0, 2.0])
    dy.sum_elems(dy.noise(x, 0.5)).backward(full=True)
    np.testing.assert_array_equal(x.gradient(), [1, 1])


def test_dropout_rates_are_checked() -> None:
    x = dy.inputVector([1.0])
    for rate in (-0.1, 1.0, 2.0):
        with pytest.raises(ValueError, match="dropout"):
            dy.dropout(x, rate)


def test_the_dtype_can_change_until_parameters_exist() -> None:
    """What an op has cached for one dtype must not be used for another."""

    def everything() -> list[np.ndarray]:
        x = dy.inputVector([1.0, 2.0])
        made = [dy.zeros((2,)), dy.ones((2, 2)), dy.constant((3,), 0.1), dy.scalarInput(0.1), dy.tanh(x), x * 0.1]
        made += [draw(4) for draw, _, _ in RANDOM.values()]
        return [e.npvalue() for e in made]

    for dtype in ("float32", "float64", "float32"):
        dy.init(dtype=dtype, seed=1)
        values = everything()
        assert {v.dtype.name for v in values} == {dtype}
        assert values[2].tolist() == [np.dtype(dtype).type(0.1)] * 3
        assert values[4].tolist() == pytest.approx(np.tanh([1, 2]), rel=1e-6)
