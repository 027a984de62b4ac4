"""Whole plans used again: when they are, that nothing else changes by it, and that memory is bounded."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import dynbatch as dy
from dynbatch.batching import reuse
from dynbatch.batching.backends import backend
from dynbatch.batching.reuse import Key, PlanCache
from dynbatch.graph import state


class Model:
    """A cell over a chain of words, its loss, and a list reduction."""

    def __init__(self) -> None:
        self.pc = dy.ParameterCollection()
        self.words = self.pc.add_lookup_parameters((7, 3))
        self.W, self.b = self.pc.add_parameters((3, 3)), self.pc.add_parameters(3)

    @dy.cell
    def step(self, word: int, h: Any) -> Any:
        return dy.tanh(dy.affine_transform([self.b, self.W, h]) + dy.lookup(self.words, word))

    @dy.cell
    def loss(self, h: Any, label: int, weight: float) -> Any:
        return dy.pickneglogsoftmax(h, label) * weight

    def sentence(self, words: list[int], start: float = 0.5, weight: float = 1.0) -> Any:
        h = dy.inputVector([start, -start, 1.0])
        for word in words:
            h = self.step(word, h)
        return self.loss(h, words[0] % 3, weight)

    def run(self, sentences: list[list[int]], **options: Any) -> Any:
        dy.renew_cg()
        return dy.esum([self.sentence(words, **options) for words in sentences])


SENTENCES = [[1, 2, 3], [4], [5, 6, 0, 1], [2, 2]]


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    reuse.plans.clear()
    yield
    reuse.plans.clear()


def evaluated(model: Model, sentences: list[list[int]] = SENTENCES, **options: Any) -> tuple[float, bool]:
    """The loss without gradients, and whether its plan was used again."""
    with dy.no_grad():
        value = model.run(sentences, **options).value()
    return value, dy.plan().reused


@pytest.mark.parametrize("strategy", ["off", "depth", "agenda"])
def test_the_third_equal_graph_uses_the_plan_of_the_second(strategy: str) -> None:
    model = Model()
    with dy.autobatch(strategy):
        expected = model.run(SENTENCES).value()
        batches = dy.plan().rows_per_batch
        found = [evaluated(model) for _ in range(4)]
    assert [reused for _, reused in found] == [False, False, True, True]
    assert [value for value, _ in found] == [expected] * 4
    assert dy.plan().rows_per_batch == batches and dy.plan().nodes == sum(batches)
    assert "reused in" in repr(dy.plan())
    assert reuse.plans.hits == 2


def test_values_of_parameters_inputs_and_numbers_are_those_of_the_new_graph() -> None:
    model = Model()
    for _ in range(3):
        evaluated(model)
    model.W.set_value(np.eye(3))
    for start in (0.5, 2.0):
        for weight in (1.0, 3.0):
            with dy.no_grad():
                dy.renew_cg()
                alone = [model.sentence(words, start, weight).value() for words in SENTENCES]
            got = [evaluated(model, start=start, weight=weight)[0] for _ in range(3)]
            np.testing.assert_allclose(got, sum(alone), rtol=1e-5)
    assert evaluated(model, start=3.0, weight=3.0)[1]  # another input is no other graph


@pytest.mark.parametrize(
    "other", [[[1, 2, 3], [4], [5, 6, 0, 2], [2, 2]], SENTENCES[:3], [*SENTENCES[1:], SENTENCES[0]]]
)
def test_another_graph_has_a_plan_of_its_own(other: list[list[int]]) -> None:
    model = Model()
    expected = model.run(other).value()
    for _ in range(3):
        evaluated(model)
    assert evaluated(model, other) == (expected, False)


def test_another_model_of_the_same_programs_has_a_plan_of_its_own() -> None:
    first, second = Model(), Model()
    for _ in range(3):
        evaluated(first)
    value, reused = evaluated(second)
    assert not reused
    assert value == second.run(SENTENCES).value()


def test_training_is_never_kept() -> None:
    model = Model()
    for _ in range(4):
        model.run(SENTENCES).value()
        assert not dy.plan().reused
    assert reuse.plans.bytes == 0


def test_a_graph_may_go_on_after_a_plan_was_used_again() -> None:
    model = Model()

    def go_on() -> list[Any]:
        with dy.no_grad():
            loss = model.run(SENTENCES)
            loss.value()
            reused = dy.plan().reused
            more = dy.esum([loss, model.sentence([3, 3])])
            value = more.value()
            assert dy.plan().nodes == 5  # an input, two steps, a loss, the sum
        more.backward()
        return [reused, value, *[p.grad_as_array().copy() for p in model.pc.parameters_list()]]

    seen = []
    for _ in range(4):
        model.pc.reset_gradient()
        seen.append(go_on())
    assert [entry[0] for entry in seen] == [False, False, True, True]
    for entry in seen[1:]:
        for got, wanted in zip(entry[1:], seen[0][1:]):
            np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_gradients_after_a_plan_was_used_again() -> None:
    model = Model()
    found = []
    for _ in range(3):
        model.pc.reset_gradient()
        with dy.no_grad():
            loss = model.run(SENTENCES)
            loss.value()
        loss.backward(full=True)
        found.append([p.grad_as_array().copy() for p in model.pc.parameters_list()])
    for got in found[1:]:
        for a, b in zip(got, found[0]):
            np.testing.assert_array_equal(a, b)


def test_random_numbers_are_drawn_anew() -> None:
    model = Model()

    def draw() -> float:
        with dy.no_grad():
            dy.renew_cg()
            return dy.dropout(model.sentence([1, 2]), 0.5).value() + dy.random_uniform(1, 0.0, 1.0).value()

    assert len({draw() for _ in range(5)}) == 5


def test_a_failure_leaves_the_graph_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    expected = [evaluated(model)[0] for _ in range(3)][0]
    with dy.no_grad():
        loss = model.run(SENTENCES)
        with monkeypatch.context() as patch:

            def fail(*_: Any) -> None:
                raise MemoryError

            patch.setattr(type(backend()), "forward", fail)
            with pytest.raises(MemoryError):
                loss.value()
        assert state.graph.execution.arena.used == 0
        assert loss.value() == expected


def test_plans_are_dropped_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    for _ in range(2):
        evaluated(model)
    one = reuse.plans.bytes
    assert one > 0
    small = PlanCache(limit=5 * one // 2)
    monkeypatch.setattr("dynbatch.batching.execution.plans", small)
    sets = [[[i, 2, 3], [4], [5, 6, 0, 1], [2, 2]] for i in range(4)]
    for _ in range(2):
        for sentences in sets:
            evaluated(model, sentences)
    assert 0 < small.bytes <= small.limit
    assert evaluated(model, sets[3])[1]
    assert not evaluated(model, sets[0])[1]
    tiny = PlanCache(limit=one // 2)
    monkeypatch.setattr("dynbatch.batching.execution.plans", tiny)
    for _ in range(3):
        assert not evaluated(model)[1]
    assert tiny.bytes == 0


def test_a_plan_does_not_outlive_what_it_was_made_for() -> None:
    model = Model()
    for _ in range(3):
        evaluated(model)
    with dy.no_grad():
        key = Key(model.run(SENTENCES).graph, "agenda", [0])
    assert key == key and key != Key(state.graph, "depth", [0]) and hash(key) == hash(Key(state.graph, "agenda", [0]))
    (kept,) = reuse.plans._kept.values()
    del model, key
    dy.renew_cg()
    gc.collect()
    assert any(ref() is None for ref in kept.signatures_alive)
