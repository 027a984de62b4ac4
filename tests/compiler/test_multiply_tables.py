"""Products with rows of small tables are looked up: the rewritten Program, and what graphs compute with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dynbatch as dy
from dynbatch.compiler.ir import ROW, SHARED, Builder
from dynbatch.compiler.multiply_tables import MOST_ROWS, multiply_tables
from dynbatch.cpu import tiers
from dynbatch.ops.elementwise import add
from dynbatch.ops.indexing import lookup
from dynbatch.ops.linear import matmul, table_product
from dynbatch.types import type_of


def rows(b: Builder, size: int = 3, kind: str = "table") -> int:
    """A vector that is looked up."""
    table = b.input(kind, 0, type_of((size,), "float32"), SHARED)
    return b.emit(lookup, table, b.input("int", 0, None, ROW))


def weight(b: Builder, index: int, *shape: int) -> int:
    return b.input("slot", index, type_of(shape, "float32"), SHARED)


def test_a_product_with_a_row_is_a_row_of_the_product() -> None:
    b = Builder()
    product = b.emit(matmul, weight(b, 0, 2, 3), rows(b), vector=True)
    program = multiply_tables(b.finish((b.emit(add, product, product),)))
    assert [program.values[v].op for v in program.instructions] == [table_product, lookup, add]
    of_table, looked_up, _ = (program.values[v] for v in program.instructions)
    assert of_table.domain == SHARED and looked_up.domain == ROW and looked_up.type.shape == (2,)  # type: ignore[union-attr]


def test_what_needs_the_row_itself_has_it() -> None:
    b = Builder()
    row = rows(b)
    program = multiply_tables(b.finish((b.emit(matmul, weight(b, 0, 3, 3), row, vector=True), row)))
    assert [program.values[v].op for v in program.instructions].count(lookup) == 2


def test_other_products_stay() -> None:
    b = Builder()
    x = b.input("arg", 0, type_of((3,), "float32"), ROW)
    W = weight(b, 0, 3, 3)
    kept = b.finish(
        (b.emit(matmul, W, x, vector=True), b.emit(matmul, W, rows(b), ta=True, vector=True), b.emit(add, x, rows(b)))
    )
    assert multiply_tables(kept) is kept


@pytest.fixture(autouse=True)
def compiled_always() -> None:
    tiers.set_mode("always")


class Model:
    """Two products with one table's rows, one of them in a sum with another product, and a row itself."""

    def __init__(self, count: int) -> None:
        self.collection = collection = dy.ParameterCollection()
        self.E = collection.add_lookup_parameters((count, 5))
        self.W, self.V, self.U = (collection.add_parameters((4, size)) for size in (5, 4, 5))

    @dy.cell
    def step(self, h: Any, k: int) -> Any:
        x = self.E[k]
        return dy.tanh(self.W * x + self.V * h), self.U * x + 1, x

    def values(self, words: list[int]) -> list[np.ndarray]:
        """Of all outputs along a chain."""
        dy.renew_cg()
        h, made = dy.inputVector([0.1, -0.2, 0.3, 0.4]), []
        for k in words:
            h, u, x = self.step(h, k)
            made += [h, u, x]
        dy.forward(made)
        return [e.npvalue() for e in made]


def shapes_multiplied() -> str:
    return " ".join(dy.plan().products)


@pytest.mark.cpu
@pytest.mark.parametrize("count", [3, MOST_ROWS, MOST_ROWS + 1])
def test_values_are_those_with_a_gradient(count: int) -> None:
    """Until parameters change, and behind that; a large table is not multiplied."""
    dy.init(dtype="float64", seed=1)
    model, words = Model(count), [2, 0, 1, 2, count - 1]
    for change in (1.0, 0.5):
        for parameter in (*model.collection.parameters_list(), *model.collection.lookup_parameters_list()):
            parameter.scale(change)
        expected = model.values(words)
        assert "9x4" in shapes_multiplied()  # W and V side by side
        with dy.no_grad():
            found = model.values(words)
        assert ("9x4" in shapes_multiplied()) == (count > MOST_ROWS)
        for actual, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=1e-12)


@pytest.mark.cpu
def test_a_graph_computed_in_part_without_a_gradient_has_its_gradients() -> None:
    dy.init(dtype="float64", seed=1)
    model = Model(3)
    found = []
    for read_before in (False, True):
        model.collection.reset_gradient()
        dy.renew_cg()
        h = first = model.step(dy.inputVector([0.1, -0.2, 0.3, 0.4]), 1)[0]
        for k in (2, 0):
            h = model.step(h, k)[0]
        if read_before:
            with dy.no_grad():
                first.npvalue()
        dy.sum_elems(h).backward()
        found.append([p.grad_as_array().copy() for p in (model.W, model.V, model.E)])
    for actual, wanted in zip(*found, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-12)
