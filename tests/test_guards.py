"""What a cell reads from outside of its arguments, and notices when it changes; copies and kinds of objects."""

from __future__ import annotations

import copy
import enum
import functools
import gc
import math
import pickle
import types
import weakref
from typing import Any

import numpy as np
import pytest
from cell_model import Model, batches, here, vector

import dynbatch as dy
from dynbatch.errors import CellError

pytestmark = pytest.mark.usefixtures("float64")


# ---- what a trace reads, and notices when it changes -----------------------------------------------------------------


def test_a_flag_or_number_of_self() -> None:
    model = Model()
    x = vector()
    on = model.switched(x).npvalue()
    model.gated = False
    off = model.switched(x).npvalue()
    assert not np.allclose(on, off)
    model.factor = 4.0
    np.testing.assert_allclose(model.switched(x).npvalue(), off * 2)
    model.gated, model.factor = True, 2.0
    np.testing.assert_array_equal(model.switched(x).npvalue(), on)
    assert [len(v) for v in vars(model)["switched"].bound_cell.variants.values()] == [3]


def test_a_replaced_parameter_and_a_changed_list() -> None:
    model = Model()
    x = vector()
    before = model.switched(x).npvalue()
    model.W = model.pc.add_parameters((3, 3))
    replaced = model.switched(x).npvalue()
    assert not np.allclose(before, replaced)
    model.layers[1] = model.pc.add_parameters((3, 3))
    changed = model.switched(x).npvalue()
    assert not np.allclose(replaced, changed)
    model.layers.append(model.layers[0])
    longer = model.switched(x).npvalue()
    assert not np.allclose(changed, longer)
    model.layers = []
    np.testing.assert_allclose(model.switched(x).npvalue(), 2 / (1 + np.exp(-model.W.as_array() @ x.npvalue())))
    model.layers = [None]
    with pytest.raises(TypeError):
        model.switched(x)


class Kind(enum.Enum):
    DOUBLE = 1
    TRIPLE = 2


class Holder:
    """Reads whatever the test puts here: `read` gives a number."""

    def __init__(self, read: Any, **attributes: Any) -> None:
        self.read = read
        vars(self).update(attributes)

    @property
    def doubled(self) -> float:
        return self.thing * 2

    def method(self) -> float:
        return self.thing + 1

    @staticmethod
    def static_method() -> float:
        return 5.0

    @classmethod
    def class_method(cls) -> float:
        return 6.0

    @dy.cell
    def f(self, x: Any) -> Any:
        return x * self.read(self)


class Numbers(list):
    """A list by another name."""


class Wrapped:
    """An object that acts as a container and as a function."""

    def __init__(self, *items: float) -> None:
        self.items = list(items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> float:
        return self.items[index]

    def __iter__(self) -> Any:
        return iter(self.items)

    def __contains__(self, item: float) -> bool:
        return item in self.items

    def __call__(self, k: float) -> float:
        return self.items[0] * k


def _set(holder: Holder, value: Any) -> None:
    holder.thing = value


SEEN: dict[str, tuple[Any, Any, Any]] = {
    # what is read, what is there at first, and how it is changed
    "attribute": (lambda s: s.thing, 2.0, lambda s: _set(s, 3.0)),
    "type of a number": (lambda s: 1.0 if isinstance(s.thing, int) else 2.0, 1, lambda s: _set(s, 1.0)),
    "flag": (lambda s: 2.0 if s.thing else 3.0, True, lambda s: _set(s, False)),
    "none": (lambda s: 2.0 if s.thing is None else 3.0, None, lambda s: _set(s, 0)),
    "string": (lambda s: float(len(s.thing)), "ab", lambda s: _set(s, "abc")),
    "enum": (lambda s: 2.0 if s.thing is Kind.DOUBLE else 3.0, Kind.DOUBLE, lambda s: _set(s, Kind.TRIPLE)),
    "property": (lambda s: s.doubled, 2.0, lambda s: _set(s, 3.0)),
    "method": (lambda s: s.method(), 2.0, lambda s: _set(s, 3.0)),
    "list": (lambda s: sum(s.thing), [1.0, 2.0], lambda s: s.thing.append(3.0)),
    "item": (lambda s: s.thing[0], [1.0, 2.0], lambda s: s.thing.__setitem__(0, 4.0)),
    "nested list": (lambda s: s.thing[0][1], [[1.0, 2.0]], lambda s: s.thing[0].__setitem__(1, 4.0)),
    "tuple": (lambda s: sum(s.thing), (1.0, 2.0), lambda s: _set(s, (1.0, 3.0))),
    "dict": (lambda s: s.thing["a"], {"a": 1.0, "b": 2.0}, lambda s: s.thing.update(a=5.0)),
    "keys": (lambda s: float(len(s.thing)), {(1, 2): 1.0}, lambda s: s.thing.update({"b": 5.0})),
    "tuple keys": (lambda s: s.thing[1, 2], {(1, 2): 1.0}, lambda s: s.thing.update({(1, 2): 5.0})),
    "set": (lambda s: 2.0 if "a" in s.thing else 3.0, {"a"}, lambda s: s.thing.discard("a")),
    "list subclass": (lambda s: s.thing[0] + len(s.thing), Numbers([1.0]), lambda s: s.thing.append(2.0)),
    "object": (lambda s: s.thing.a, types.SimpleNamespace(a=1.0), lambda s: setattr(s.thing, "a", 2.0)),
    "other object": (
        lambda s: s.thing.a,
        types.SimpleNamespace(a=1.0),
        lambda s: _set(s, types.SimpleNamespace(a=2.0)),
    ),
    "container": (lambda s: s.thing[1] + len(s.thing), Wrapped(1.0, 2.0), lambda s: s.thing.items.append(3.0)),
    "contained": (lambda s: 2.0 if 2.0 in s.thing else 3.0, Wrapped(1.0, 2.0), lambda s: s.thing.items.pop()),
    "iterated": (lambda s: sum(s.thing), Wrapped(1.0, 2.0), lambda s: s.thing.items.append(3.0)),
    "called": (lambda s: s.thing(3.0), Wrapped(1.0), lambda s: s.thing.items.__setitem__(0, 2.0)),
    "bound method": (lambda s: s.thing(3.0), Wrapped(1.0).__call__, lambda s: _set(s, Wrapped(2.0).__call__)),
    "partial": (lambda s: s.thing(), functools.partial(float, 2), lambda s: _set(s, functools.partial(float, 3))),
    "function": (lambda s: s.thing(4.0), math.sqrt, lambda s: _set(s, math.floor)),
    "equality": (lambda s: 2.0 if s.thing == s.other else 3.0, "x", lambda s: _set(s, "y")),
    "identity": (
        lambda s: 2.0 if s.thing is s.self_again.thing else 3.0,
        Wrapped(1.0),
        lambda s: _set(s, Wrapped(1.0)),
    ),
}


@pytest.mark.parametrize("name", SEEN)
def test_whatever_is_read_from_self_is_a_guard(name: str) -> None:
    read, first, change = SEEN[name]
    value = copy.deepcopy(first)
    holder = Holder(read, thing=value, other="x")
    holder.self_again = types.SimpleNamespace(thing=holder.thing)
    x = vector(1.0)
    before = read(holder)
    assert [holder.f(x).value() for _ in range(3)] == [before] * 3
    if name == "bound method":  # a copy of the object is bound to it
        assert holder.thing(1.0) == 1.0
    change(holder)
    after = read(holder)
    assert before != after
    assert [holder.f(x).value() for _ in range(3)] == [after] * 3
    assert [len(v) for v in vars(holder)["f"].bound_cell.variants.values()] == [2]


def test_methods_without_self() -> None:
    x = vector(1.0)
    assert Holder(lambda s: s.static_method()).f(x).value() == 5
    assert Holder(lambda s: s.class_method()).f(x).value() == 6


FACTOR = 2.0
ACTIVATION = dy.tanh
SETTINGS = types.SimpleNamespace(factor=2.0)


@dy.cell
def of_globals(x: Any) -> Any:
    return dy.esum([ACTIVATION(x) * FACTOR for _ in range(1)]) * SETTINGS.factor


def test_globals(monkeypatch: pytest.MonkeyPatch) -> None:
    @dy.cell
    def outer(x: Any) -> Any:
        return of_globals(x)

    x = vector()
    for cell in (of_globals, outer):
        with monkeypatch.context() as patch:
            tanh = np.tanh(x.npvalue())
            np.testing.assert_allclose(cell(x).npvalue(), 4 * tanh)
            patch.setitem(globals(), "FACTOR", 3.0)
            np.testing.assert_allclose(cell(x).npvalue(), 6 * tanh)
            patch.setattr(SETTINGS, "factor", 5.0)
            np.testing.assert_allclose(cell(x).npvalue(), 15 * tanh)
            patch.setitem(globals(), "ACTIVATION", dy.logistic)
            np.testing.assert_allclose(cell(x).npvalue(), 15 / (1 + np.exp(-x.npvalue())))


def test_closures() -> None:
    factor, items = 2.0, [1.0]

    @dy.cell
    def scaled(x: Any) -> Any:
        return x * factor + sum(items)

    x = vector(1, 2)
    np.testing.assert_allclose(scaled(x).npvalue(), [3, 5])
    factor = 3.0
    np.testing.assert_allclose(scaled(x).npvalue(), [4, 7])
    items.append(1.0)
    np.testing.assert_allclose(scaled(x).npvalue(), [5, 8])


def test_a_flag_of_an_inner_cell() -> None:
    model = Model()

    class Outer:
        def __init__(self) -> None:
            self.inner = model
            self.step = model.switched

        @dy.cell
        def f(self, x: Any) -> Any:
            return self.inner.switched(x) + self.step(x)

    outer, x = Outer(), vector()
    for gated in (True, False, True):
        model.gated = gated
        expected = 2 * Model.switched.function(model, x).npvalue()
        np.testing.assert_allclose(outer.f(x).npvalue(), expected, rtol=1e-12)


def test_what_is_another_object_each_time_is_refused() -> None:
    class Lazy:
        def __getattr__(self, name: str) -> Any:
            if name != "thing":
                raise AttributeError(name)
            return np.ones(1)

        @dy.cell
        def f(self, x: Any) -> Any:
            return x * float(self.thing[0])

    with pytest.raises(CellError, match=r"reads Lazy\.thing, which gives another object each time"):
        Lazy().f(vector())


def test_a_cell_cannot_set_attributes() -> None:
    class Counting:
        @dy.cell
        def f(self, x: Any) -> Any:
            self.calls = 1
            return x

    line = here(-3)
    with pytest.raises(CellError, match="cannot set calls") as error:
        Counting().f(vector())
    assert line in str(error.value)


def test_debug_finds_hidden_state() -> None:
    state = iter([1.0, 1.0, 2.0])

    @dy.cell
    def f(x: Any) -> Any:
        return x * next(state)

    dy.init(debug=True)
    f(vector())
    f(vector())
    with pytest.raises(CellError, match="does not do now what it did when it was traced"):
        f(vector())
    dy.init(debug=False)
    f(vector())


def test_traces_of_the_same_program_batch() -> None:
    """A guard that failed gives a new trace; where that is the same Program, nothing is lost."""

    class Verbose:
        def __init__(self) -> None:
            self.calls = 0

        @dy.cell
        def f(self, x: Any) -> Any:
            if self.calls > 10:
                pass
            return dy.tanh(x)

    thing, x = Verbose(), vector()
    found = []
    for thing.calls in range(5):
        found.append(thing.f(x))
    assert batches(found) == 2


# ---- objects ---------------------------------------------------------------------------------------------------------


def test_copies_of_a_model_trace_their_own() -> None:
    model, x = Model(), vector()
    before = [model.step(x, x).npvalue() for _ in range(3)][-1]
    shallow, deep = copy.copy(model), copy.deepcopy(model)
    pickled = pickle.loads(pickle.dumps(model))
    for other in (deep, pickled):
        np.testing.assert_array_equal(other.step(x, x).npvalue(), before)
        other.W.set_value(np.zeros((3, 3)))
        other.U.set_value(np.zeros((3, 3)))
        np.testing.assert_allclose(other.step(x, x).npvalue(), np.tanh(other.b.as_array()))
    shallow.W = shallow.U = model.pc.add_parameters((3, 3), init=0.0)
    np.testing.assert_allclose(shallow.step(x, x).npvalue(), np.tanh(model.b.as_array()))
    np.testing.assert_array_equal(model.step(x, x).npvalue(), before)


def test_a_copied_model_trains_alone() -> None:
    model, x = Model(), vector()
    dy.sum_elems(model.step(x, x)).backward()
    dy.AdagradTrainer(model.pc).update()
    before = model.W.as_array()
    other = copy.deepcopy(model)
    trainer = dy.SimpleSGDTrainer(other.pc, learning_rate=1.0)
    dy.renew_cg()
    x = vector()
    dy.sum_elems(other.step(x, x)).backward()
    assert np.abs(other.W.grad_as_array()).max() > 0
    assert np.abs(model.W.grad_as_array()).max() == 0
    trainer.update()
    assert not np.allclose(other.W.as_array(), before)
    np.testing.assert_array_equal(model.W.as_array(), before)
    extra = other.pc.add_parameters((40, 40))
    assert np.shares_memory(other.W.data, other.pc.dense_values)
    assert np.shares_memory(extra.data, other.pc.dense_values)


def test_models_with_their_own_way_of_copying() -> None:
    class Own(Model):
        def __getstate__(self) -> Any:
            return dict(vars(self))

    class Cloned(Model):
        def __copy__(self) -> Cloned:
            other = Cloned.__new__(Cloned)
            vars(other).update(vars(self))
            return other

    x = vector()
    for cls in (Own, Cloned):
        model = cls()
        assert batches([model.step(x, x) for _ in range(4)]) <= 2
        other = copy.copy(model)
        other.W = other.U = other.pc.add_parameters((3, 3), init=0.0)
        np.testing.assert_allclose(other.step(x, x).npvalue(), np.tanh(other.b.as_array()))
        assert not np.allclose(model.step(x, x).npvalue(), other.step(x, x).npvalue())


def test_overridden_cells() -> None:
    class Base:
        @dy.cell
        def f(self, x: Any) -> Any:
            return x * 2

    class Plain(Base):
        def f(self, x: Any) -> Any:
            return super().f(x) + 1

    class Celled(Base):
        @dy.cell
        def f(self, x: Any) -> Any:
            return super().f(x) + 1

    class Explicit(Base):
        @dy.cell
        def f(self, x: Any) -> Any:
            return Base.f(self, x) + 1

    x = vector(1, 2)
    for cls in (Plain, Celled, Explicit):
        thing = cls()
        for _ in range(3):
            np.testing.assert_array_equal(thing.f(x).npvalue(), [3, 5])
            np.testing.assert_array_equal(Base.f(thing, x).npvalue(), [2, 4])
            np.testing.assert_array_equal(cls.f(thing, x).npvalue(), [3, 5])
        assert batches([thing.f(x) for _ in range(5)]) <= 2


def test_a_call_operator_is_traced_once() -> None:
    class Layer:
        def __init__(self) -> None:
            self.W = dy.ParameterCollection().add_parameters((3, 3))

        @dy.cell
        def __call__(self, x: Any) -> Any:
            return dy.tanh(self.W * x)

    class Stack:
        def __init__(self) -> None:
            self.layers = [Layer(), Layer()]

        @dy.cell
        def __call__(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x

    stack, x = Stack(), vector()
    assert batches([stack.layers[0](x) for _ in range(6)]) == 2
    expected = stack.layers[1](stack.layers[0](x)).npvalue()
    found = [stack(x) for _ in range(4)]
    assert batches(found) == 1
    np.testing.assert_allclose(found[3].npvalue(), expected, rtol=1e-12)


def test_instances_with_slots() -> None:
    class Bare:
        __slots__ = ("factor",)

        @dy.cell
        def f(self, x: Any) -> Any:
            return x * self.factor

    class Open:
        __slots__ = ("__dict__", "factor")

        @dy.cell
        def f(self, x: Any) -> Any:
            return x * self.factor

    with pytest.raises(TypeError, match='add "__dict__" to the __slots__'):
        Bare().f(vector())
    thing = Open()
    thing.factor = 3.0
    x = vector(1, 2)
    assert batches([thing.f(x) for _ in range(4)]) == 2
    other = copy.copy(thing)
    other.factor = 4.0
    np.testing.assert_array_equal(other.f(x).npvalue(), [4, 8])
    np.testing.assert_array_equal(thing.f(x).npvalue(), [3, 6])


def test_names_that_mean_something_elsewhere() -> None:
    for name in ("state", "signature", "graph", "config", "record", "slow", "missing", "r0", "out0", "a0"):
        namespace: dict[str, Any] = {"dy": dy}
        exec(f"@dy.cell\ndef {name}(x, k):\n    return dy.tanh(x) * k\n", namespace)
        cell, x = namespace[name], vector()
        for k in (1, 2, 3):
            np.testing.assert_allclose(cell(x, k).npvalue(), np.tanh(x.npvalue()) * k)
    double = dy.cell(lambda x: x * 2)
    for _ in range(3):
        np.testing.assert_array_equal(double(vector(1, 2)).npvalue(), [2, 4])


def test_static_and_class_level_cells() -> None:
    class Tools:
        @staticmethod
        @dy.cell
        def double(x: Any) -> Any:
            return x * 2

    x = vector(1, 2)
    assert batches([Tools.double(x), Tools().double(x), Tools.double(x)]) == 2
    np.testing.assert_array_equal(Tools.double(x).npvalue(), [2, 4])


def test_models_are_freed() -> None:
    @dy.cell
    def project(W: Any, x: Any) -> Any:
        return dy.tanh(W * x)

    def use() -> list[Any]:
        model, x = Model(), vector()
        h = project(model.W, model.step(x, model.embed(1)))
        for _ in range(3):
            h = model.child_sum(model.switched(h), [h, x])
        loss = model.loss(h, 1, 1.0)
        loss.backward()
        dy.AdamTrainer(model.pc).update()
        return [weakref.ref(p) for p in (model.W, model.words, model.pc)]

    references = use()
    dy.renew_cg()
    gc.collect()
    assert [r() for r in references] == [None] * 3
