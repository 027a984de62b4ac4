"""Watching attributes: never true of a fact that does not hold, whatever way it came about."""

from __future__ import annotations

import builtins
import sys
from typing import Any

import numpy as np
import pytest

import dynbatch as dy
from dynbatch import compiled
from dynbatch.watch import Watch


class Thing:
    def __init__(self) -> None:
        self.first, self.x, self.y = object(), object(), object()


class Slotted:
    __slots__ = ("x",)


def watching(*owners: Any) -> Watch:
    return Watch(tuple((owner, name, vars(owner)[name]) for owner in owners for name in ("x", "y")))


@pytest.mark.skipif(not compiled.in_use, reason="uncompiled, nothing is known")
def test_facts_that_hold_are_known_to_hold() -> None:
    things = Thing(), Thing()
    watch = watching(*things)
    for _ in range(3):
        assert watch.unchanged()
    for number in range(40):  # the dictionary grows, and its entries lie elsewhere
        setattr(things[0], f"a{number}", number)
        assert watch.unchanged()
    del things[0].first
    assert watch.unchanged()
    x = things[1].x
    things[1].x = None
    assert not watch.unchanged()
    things[1].x = x
    assert watch.unchanged()


@pytest.mark.skipif(not compiled.in_use, reason="uncompiled, nothing is known")
def test_names_that_were_computed() -> None:
    thing = Thing()
    for number in range(20):
        setattr(thing, f"W_{number}", object())
    watch = Watch(tuple((thing, f"W_{number}", getattr(thing, f"W_{number}")) for number in range(20)))
    assert watch.unchanged()
    thing.W_19 = thing.W_18
    assert not watch.unchanged()


@pytest.mark.skipif(not compiled.in_use, reason="uncompiled, nothing is known")
def test_a_changed_class_is_looked_at_again() -> None:
    class Own(Thing):
        pass

    thing = Own()
    watch = watching(thing)
    assert watch.unchanged()
    Own.z = 1
    assert watch.unchanged()
    Own.x = 1  # the instance's own attribute comes first
    assert watch.unchanged()
    Thing.later = None
    assert watch.unchanged()


def changes() -> dict[str, Any]:
    def another_value(thing: Any) -> None:
        thing.x = object()

    def another_value_by_the_dictionary(thing: Any) -> None:
        vars(thing)["y"] = object()

    def no_value(thing: Any) -> None:
        del thing.x

    def another_dictionary(thing: Any) -> None:
        thing.__dict__ = {"x": object(), "y": object()}

    def an_empty_dictionary(thing: Any) -> None:
        vars(thing).clear()

    def the_names_swapped(thing: Any) -> None:
        thing.x, thing.y = thing.y, thing.x

    def another_class(thing: Any) -> None:
        class Other(type(thing)):
            x = property(lambda self: None)

        thing.__class__ = Other

    def a_property(thing: Any) -> None:
        type(thing).x = property(lambda self: None)

    def a_property_in_a_base(thing: Any) -> None:
        type(thing).__mro__[1].x = property(lambda self: None)

    def a_descriptor(thing: Any) -> None:
        type(thing).x = Described()

    def another_way_to_read(thing: Any) -> None:
        type(thing).__getattribute__ = lambda self, name: None

    return {name: change for name, change in locals().items()}


class Described:
    """Looks like the value that it hides where the class is asked for it."""

    def __get__(self, instance: Any, owner: type) -> Any:
        return 1 if instance is None else None

    def __set__(self, instance: Any, value: Any) -> None:
        raise AttributeError


@pytest.mark.parametrize("change", changes().values(), ids=changes())
def test_changes_are_seen(change: Any) -> None:
    class Base:
        pass

    class Own(Base, Thing):
        pass

    thing = Own()
    watch = watching(Thing(), thing)
    watch.unchanged()
    x, y = thing.x, thing.y
    change(thing)
    assert getattr(thing, "x", None) is not x or getattr(thing, "y", None) is not y
    assert not watch.unchanged()
    assert not watch.unchanged()


def test_facts_that_never_held() -> None:
    thing, slotted = Thing(), Slotted()
    slotted.x = 1
    for facts in (((thing, "x", object()),), ((thing, "nothing", None),), ((slotted, "x", 1),)):
        assert not Watch(facts).unchanged()


def test_no_facts() -> None:
    assert Watch(()).unchanged() == compiled.in_use


def test_what_of_a_trace_follows_from_facts() -> None:
    class Part:
        def __init__(self) -> None:
            self.scale = 2.0

    class Model:
        shared = 3.0

        def __init__(self) -> None:
            self.W = dy.ParameterCollection().add_parameters(2)
            self.part, self.items = Part(), [0.5, 4.0]
            self.unread = 1.0

        @dy.cell
        def step(self, x: Any) -> Any:
            return dy.cmult(x, self.W) * (self.part.scale * self.shared * self.items[1])

    model, x = Model(), dy.inputVector([1.0, 2.0])

    def check() -> None:
        factor = model.part.scale * model.shared * model.items[1]
        np.testing.assert_allclose(model.step(x).npvalue(), model.W.as_array() * [1.0, 2.0] * factor, rtol=1e-6)

    check()
    ((variant,),) = vars(model)["step"].bound_cell.variants.values()
    facts = {(type(owner).__name__, name): value for owner, name, value in variant.guards.facts}
    assert facts == {("Model", "W"): model.W, ("Model", "part"): model.part, ("Part", "scale"): 2.0}
    model.part.scale = 5.0
    check()
    model.items[1] = 6.0
    check()
    Model.shared = 7.0
    check()
    model.shared = 8.0
    check()
    model.part = Part()
    check()
    del model.shared
    check()


SCALE = 2.0
SETTINGS = Thing()
SETTINGS.x = 3.0


def test_globals_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As attributes of their module; those of code that has no module are compared at each call."""

    class Model:
        @dy.cell
        def step(self, x: Any) -> Any:
            return x * (SCALE * SETTINGS.x)

    model, x, module = Model(), dy.inputVector([1.0, 2.0]), sys.modules[__name__]

    def check(factor: float) -> None:
        np.testing.assert_allclose(model.step(x).npvalue(), np.array([1.0, 2.0]) * factor, rtol=1e-6)

    check(6.0)
    ((variant,),) = vars(model)["step"].bound_cell.variants.values()
    facts = [(owner, name) for owner, name, _ in variant.guards.facts]
    assert facts == [(module, "SCALE"), (module, "SETTINGS"), (SETTINGS, "x")]
    watch = Watch(variant.guards.facts)
    assert watch.unchanged() == compiled.in_use
    with monkeypatch.context() as patch:
        patch.setattr(module, "SCALE", 5.0)
        assert not watch.unchanged()
        check(15.0)
        patch.setattr(SETTINGS, "x", 4.0)
        check(20.0)
        patch.delattr(module, "SCALE")
        patch.setattr(builtins, "SCALE", 7.0, raising=False)
        assert not watch.unchanged()
        check(28.0)
        patch.setattr(module, "SETTINGS", Thing())
        module.SETTINGS.x = 1.0
        check(7.0)
    check(6.0)

    space: dict[str, Any] = {"dy": dy, "K": 2.0, "__name__": "nowhere"}
    exec("class Model:\n    def step(self, x):\n        return x * K\n", space)
    space["Model"].step = dy.cell(space["Model"].step)
    space["Model"].step.__set_name__(space["Model"], "step")
    model = space["Model"]()
    check(2.0)
    ((variant,),) = vars(model)["step"].bound_cell.variants.values()
    assert variant.guards.facts == ()
    space["K"] = 3.0
    check(3.0)
