"""Static structures: a replay equals a recording, in values, gradients and random draws."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

import dynbatch as dy

N = 4


class Model:
    """A recursive model whose calls can be made static."""

    def __init__(self) -> None:
        self.collection = dy.ParameterCollection()
        self.E = self.collection.add_lookup_parameters((10, N))
        self.W = self.collection.add_parameters((N, N))
        self.V = self.collection.add_parameters((3, N))

    @dy.cell
    def step(self, h, x):
        return dy.tanh(self.W * h + x), dy.logistic(h)

    @dy.cell
    def gather(self, hs):
        return dy.esum([dy.tanh(self.W * h) for h in hs])

    def loss(self, words, state):
        h = self.E[words[0]]
        for word in words[1:]:
            h, _ = self.step(h, self.E[word] + 0.5)
        h = self.gather([h, state, h]) + dy.inputVector([1, 2, 3, len(words)])
        return dy.pickneglogsoftmax(self.V * h, words[0] % 3), {"h": h, "both": [h, state]}

    static_loss = dy.static(loss)


class Words(list):
    """A structure with an identity that can be watched."""


@pytest.fixture
def model() -> Model:
    dy.init(dtype="float64", seed=3)
    return Model()


def run(model: Model, loss, instances, strategy="agenda"):
    dy.renew_cg()
    x = dy.inputVector([1, 2, 3, 4])
    state = dy.tanh(x)
    made = [loss(words, state) for words in instances]
    total = dy.esum([m[0] for m in made]) + dy.sum_elems(made[0][1]["h"]) + dy.sum_elems(made[1][1]["both"][1])
    with dy.autobatch(strategy):
        value = total.value()
        total.backward(full=True)
    found = [value, state.gradient(), model.W.grad_as_array(), model.E.grad_as_array(), model.V.grad_as_array()]
    model.collection.reset_gradient()
    return found


@pytest.mark.parametrize("strategy", ["off", "depth", "agenda"])
def test_replay_equals_recording(model: Model, strategy: str) -> None:
    instances = [Words([1, 2, 3]), Words([4]), Words([5, 6, 7, 8, 9]), Words([1, 2, 3])]
    wanted = run(model, model.loss, instances, strategy)
    for _ in range(3):
        for found, expected in zip(run(model, model.static_loss, instances, strategy), wanted):
            np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_replays_stand_beside_fresh_nodes_in_any_order(model: Model) -> None:
    instances = [Words([1, 2, 3]), Words([4, 5])]
    mixed = iter([model.loss, model.static_loss] * 2)
    for found, expected in zip(
        run(model, lambda words, state: next(mixed)(words, state), instances), run(model, model.loss, instances)
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_parameters_have_their_current_values(model: Model) -> None:
    instances = [Words([1, 2]), Words([3])]
    run(model, model.static_loss, instances)
    model.W.set_value(model.W.as_array() + 1)
    for found, expected in zip(run(model, model.static_loss, instances), run(model, model.loss, instances)):
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_random_ops_draw_anew_and_repeat_with_the_seed() -> None:
    def draws() -> list[np.ndarray]:
        dy.init(dtype="float64", seed=5)
        noisy = dy.static(lambda size: dy.dropout(dy.ones(size), 0.5))
        dy.renew_cg()
        return [noisy(50).npvalue() for _ in range(3)]

    first, second = draws(), draws()
    assert not np.array_equal(first[0], first[1])
    for a, b in zip(first, second):
        np.testing.assert_array_equal(a, b)


def test_key_and_counts() -> None:
    calls = []

    @dy.static(key=len, maxsize=2)
    def sized(items, x):
        calls.append(len(items))
        return x * len(items)

    dy.renew_cg()
    x = dy.inputVector([1.0, 2.0])
    assert sized([1, 2], x).value() == [2.0, 4.0]
    assert sized([3, 4], x).value() == [2.0, 4.0]
    assert calls == [2]
    assert sized.cache_info() == (1, 1, 2, 1)
    sized([1], x), sized([1, 2, 3], x)
    assert sized.cache_info().currsize == 2
    sized([1, 2], x)
    assert calls == [2, 1, 3, 2]  # the least recently used one was dropped
    assert sized([1, 2], dy.inputVector([1.0, 2.0, 3.0])).dim()[0] == (3,)  # another type, another recording
    sized.cache_clear()
    assert sized.cache_info() == (0, 0, 2, 0)


def test_plain_arguments_count_by_value_and_objects_by_identity() -> None:
    made = []

    @dy.static
    def scaled(words, factor):
        made.append(factor)
        return dy.inputVector(words) * factor

    dy.renew_cg()
    words = [1.0, 2.0]
    assert scaled(words, 2.0).value() == [2.0, 4.0]
    assert scaled(words, 2.0).value() == [2.0, 4.0]
    assert scaled(words, 3.0).value() == [3.0, 6.0]
    assert scaled([1.0, 2.0], 3.0).value() == [3.0, 6.0]
    assert made == [2.0, 3.0, 3.0]


def test_the_cache_holds_its_keys_and_lets_them_go() -> None:
    @dy.static
    def vector(words):
        return dy.inputVector(list(words))

    words = Words([1.0])
    watch = weakref.ref(words)
    vector(words)
    del words
    gc.collect()
    assert watch() is not None
    vector.cache_clear()
    gc.collect()
    assert watch() is None


def test_batched_results_and_manual_batches_within() -> None:
    dy.init(dtype="float64", seed=1)

    @dy.static
    def both(scale):
        x = dy.inputTensor([[1.0, 2.0], [3.0, 4.0]], batched=True)
        return x * scale, dy.sum_batches(x)

    for _ in range(2):
        dy.renew_cg()
        dy.inputVector([9.0])
        scaled, total = both(2.0)
        assert scaled.dim() == ((2,), 2)
        np.testing.assert_array_equal(scaled.npvalue(), [[2.0, 4.0], [6.0, 8.0]])
        assert total.value() == [3.0, 7.0]


def test_what_a_recording_cannot_hold_is_refused_and_nothing_is_kept() -> None:
    dy.renew_cg()
    outside = dy.inputVector([1.0])

    def captures(words):
        return outside + 1

    def reads(words):
        return dy.inputVector([2.0]) if dy.inputVector(words).value() == 1 else None

    for function, text in ((captures, "pass other expressions as arguments"), (reads, "reads a value")):
        static = dy.static(function)
        with pytest.raises(dy.StaticError, match=text):
            static([1.0])
        assert static.cache_info().currsize == 0
    assert (outside + 1).value() == 2.0  # the graph is unharmed
    with pytest.raises(dy.StaticError, match="batch elements"):
        dy.static(lambda x: x + 1)(dy.inputTensor([[1.0, 2.0]], batched=True))


def test_debug_finds_a_structure_that_changed() -> None:
    @dy.static
    def chain(words):
        x = dy.inputVector([1.0])
        for _ in words:
            x = x + 1
        return x

    words = Words([1, 2])
    dy.renew_cg()
    assert chain(words).value() == 3.0
    words.append(3)
    assert chain(words).value() == 3.0  # what was recorded
    dy.init(debug=True)
    with pytest.raises(dy.StaticError, match="does not record now"):
        chain(words)


def test_within_a_cell_and_within_another_static() -> None:
    dy.init(dtype="float64")

    @dy.static
    def doubled(x):
        return x * 2

    @dy.static
    def inner(x):
        return doubled(doubled(x))

    @dy.cell
    def outer(x):
        return inner(x) + 1

    for _ in range(2):
        dy.renew_cg()
        assert outer(inner(dy.inputVector([1.0, 2.0]))).value() == [17.0, 33.0]
