"""What a trace read from outside of its arguments, and the check that it is still the same.

A traced function sees stand-ins for the objects it reaches through ``self``, closures and globals. A stand-in notes
each attribute read; the notes become one compiled expression, run before each call (about 18 ns a note). Most notes
follow from *facts*, that an attribute in an object's dictionary is a certain object; a `Watch` sees cheaper whether
those still hold.
"""

from __future__ import annotations

import enum
import re
import sys
import types
from collections.abc import Callable
from typing import Any

from dynbatch.errors import CellError, user_line
from dynbatch.graph import Operand, state

_PLAIN = (int, float, str, bytes, bool, complex, type(None))
_OPAQUE_MODULES = ("numpy", "dynbatch.parameters", "dynbatch.trainers", "dynbatch.initializers")
_OPAQUE = (type, types.ModuleType, types.BuiltinFunctionType, types.FunctionType, enum.Enum, Operand)

Fact = tuple[Any, str, Any]
"""``(owner, name, value)``: ``vars(owner)[name] is value``."""


class Guards:
    """Notes of what was read.

    Attributes:
        notes: expressions over ``roots`` that must stay true, each with facts that it follows from; None where it may
            change without any fact changing, as it may where it is about an element of a list.
        roots: the constants that the expressions use.
    """

    def __init__(self) -> None:
        self.notes: dict[str, tuple[Fact, ...] | None] = {}
        self.roots: list[Any] = []
        self._stand_ins: dict[int, _StandIn] = {}
        self._instrumented: dict[types.FunctionType, Callable[..., Any]] = {}

    def root(self, value: Any) -> str:
        """A name for a constant."""
        for i, known in enumerate(self.roots):
            if known is value:
                return f"r{i}"
        self.roots.append(value)
        return f"r{len(self.roots) - 1}"

    def wrap(self, value: Any, path: str, facts: tuple[Fact, ...] | None = None) -> Any:
        """Note that ``path`` gave ``value``, and return what the traced function gets to see.

        Arguments:
            facts: what that follows from, if it is known.
        """
        from dynbatch.cell import Cell

        if isinstance(value, _PLAIN):
            if isinstance(value, float) and value != value:
                return value
            known = repr(value) if isinstance(value, (bool, type(None))) else self.root(value)
            self.notes[f"{path} is {known} or type({path}) is type({known}) and {path} == {known}"] = facts
            return value
        bound = getattr(value, "bound_cell", None)
        if bound is not None:
            return Inlined(bound.cell, self.stand_in(bound.instance, self.root(bound.instance)))
        if isinstance(value, types.MethodType):
            self.notes[f"{path} == {self.root(value)}"] = None
            return self._method(value)
        if isinstance(value, types.BuiltinMethodType) and not isinstance(value.__self__, (types.ModuleType, type)):
            return value  # of a container: another object each time, and nothing to note
        if type(value) in (list, tuple):
            if all(getattr(v, "is_parameter", False) for v in value):  # one comparison, which tries identity first
                self.notes[f"{path} == {self.root(type(value)(value))}"] = None
                return value
            self.notes[f"len({path}) == {len(value)}"] = None
            return type(value)([self.wrap(v, f"{path}[{i}]") for i, v in enumerate(value)])
        if type(value) is dict:
            self.notes[f"len({path}) == {len(value)}"] = None
            return {k: self.wrap(v, f"{path}[{self._key(k)}]") for k, v in value.items()}
        if type(value) in (set, frozenset):
            self.notes[f"{path} == {self.root(frozenset(value))}"] = None
            return type(value)(value)
        opaque = isinstance(value, (*_OPAQUE, Cell)) or hasattr(value, "is_parameter")
        if opaque or not hasattr(value, "__dict__") or type(value).__module__ in _OPAQUE_MODULES:
            self.notes[f"{path} is {self.root(value)}"] = facts
            return value
        return self.stand_in(value, path, facts)

    def stand_in(self, value: Any, path: str, facts: tuple[Fact, ...] | None = ()) -> Any:
        """The stand-in for an object: the same one for the same object, so that ``is`` holds between stand-ins."""
        if isinstance(value, _StandIn):
            return value
        known = self._stand_ins.setdefault(id(value), _StandIn(value, path, facts, self))
        first = object.__getattribute__(known, "_stand_in_path")
        if first != path:
            own = object.__getattribute__(known, "_stand_in_facts")
            self.notes[f"{path} is {first}"] = None if own is None or facts is None else own + facts
        return known

    def _method(self, method: types.MethodType) -> Callable[..., Any]:
        owner, function = method.__self__, method.__func__
        if isinstance(owner, type) or not hasattr(owner, "__dict__") or not isinstance(function, types.FunctionType):
            return method
        return types.MethodType(self.instrument(function), self.stand_in(owner, self.root(owner)))

    def _key(self, key: Any) -> str:
        return repr(key) if type(key) in (str, int) else self.root(key)

    def instrument(self, function: types.FunctionType) -> Callable[..., Any]:
        """The function with stand-ins for what it reaches through its closure and its globals."""
        found = self._instrumented.get(function)
        if found is None:
            found = self._instrumented[function] = self._instrument(function)
        return found

    def _instrument(self, function: types.FunctionType) -> Callable[..., Any]:
        code = function.__code__
        globals_path = self.root(function.__globals__)
        seen = dict(function.__globals__)
        module = sys.modules.get(seen.get("__name__", ""))
        if type(module) is not types.ModuleType or vars(module) is not function.__globals__:
            module = None
        for name in _names(code):
            if name in seen and not _is_definition(seen[name], name):
                facts = None if module is None else ((module, name, seen[name]),)
                seen[name] = self.wrap(seen[name], f"{globals_path}[{name!r}]", facts)
        cells = []
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:
                cells.append(cell)
                continue
            is_class = isinstance(content, type)  # `__class__`, which super() needs as it is
            cells.append(cell if is_class else types.CellType(self.wrap(content, f"{self.root(cell)}.cell_contents")))
        copy = types.FunctionType(code, seen, function.__name__, function.__defaults__, tuple(cells) or None)
        copy.__kwdefaults__ = function.__kwdefaults__
        return copy

    @property
    def facts(self) -> tuple[Fact, ...]:
        """What the notes follow from that follow from facts; each once."""
        found = {
            (id(owner), name): (owner, name, value)
            for facts in self.notes.values()
            for owner, name, value in facts or ()
        }
        return tuple(found.values())

    @property
    def namespace(self) -> dict[str, Any]:
        """The constants of the notes."""
        return {f"r{i}": value for i, value in enumerate(self.roots)}

    def compile(self, but_facts: bool = False) -> Callable[[], bool]:
        """A function that says whether everything is still as it was noted.

        Arguments:
            but_facts: leave out what follows from `facts`.
        """
        notes = [note for note, facts in self.notes.items() if facts is None or not but_facts]
        condition = " and ".join(f"({note})" for note in notes) or "True"
        check = eval(compile(f"lambda: {condition}", "<guards of a cell>", "eval"), self.namespace)

        def holds() -> bool:
            try:
                return check()
            except FAILURES:
                return False

        return holds

    def broken(self) -> str:
        """What does not hold although it was noted just now, in words for an error; empty if everything holds."""
        for note in self.notes:
            try:
                if eval(note, self.namespace):
                    continue
            except FAILURES:
                pass
            path = note.removeprefix("len(").split(" ")[0].rstrip(")")
            return re.sub(r"^r(\d+)", lambda m: type(self.roots[int(m[1])]).__name__, path)
        return ""


FAILURES = (AttributeError, KeyError, IndexError, TypeError, ValueError)
"""What a guard raises where the things that it looks at have changed."""


def _names(code: types.CodeType) -> set[str]:
    """The global (and attribute) names in a function and in the functions and comprehensions inside of it."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*[_names(c) for c in inner])


def _is_definition(value: Any, name: str) -> bool:
    """Whether a global is a module, class or function under its own name, which are not expected to change."""
    if isinstance(value, types.FunctionType):
        return value.__name__ == name
    return isinstance(value, (types.ModuleType, type))


class Inlined:
    """A cell reached from within a trace: its function, on the stand-in of its object."""

    def __init__(self, cell: Any, instance: Any) -> None:
        self._cell = cell
        self._instance = instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result, its instructions becoming part of the trace."""
        return state.tracer.guards.instrument(self._cell.function)(self._instance, *args, **kwargs)


class _StandIn:
    """Stands for an object while a function is traced; attribute reads are noted."""

    __slots__ = ("_stand_in_facts", "_stand_in_guards", "_stand_in_object", "_stand_in_path")

    def __init__(self, value: Any, path: str, facts: tuple[Fact, ...] | None, guards: Guards) -> None:
        object.__setattr__(self, "_stand_in_object", value)
        object.__setattr__(self, "_stand_in_path", path)
        object.__setattr__(self, "_stand_in_facts", facts)
        object.__setattr__(self, "_stand_in_guards", guards)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._stand_in_object)

    def __getattr__(self, name: str) -> Any:
        from dynbatch.cell import Cell

        value, guards = self._stand_in_object, self._stand_in_guards
        found = getattr(type(value), name, None)
        own = getattr(value, "__dict__", {})
        if name not in own:
            if isinstance(found, property) and isinstance(found.fget, types.FunctionType):
                return guards.instrument(found.fget)(self)
            if isinstance(found, types.FunctionType):
                static = isinstance(_class_attribute(type(value), name), staticmethod)
                return found if static else types.MethodType(guards.instrument(found), self)
        if isinstance(found, Cell):
            return Inlined(found, self)
        result, facts = getattr(value, name), self._stand_in_facts
        facts = None if facts is None or own.get(name, own) is not result else (*facts, (value, name, result))
        return guards.wrap(result, f"{self._stand_in_path}.{name}", facts)

    def __setattr__(self, name: str, value: Any) -> None:
        raise CellError(f"{user_line()}: a cell cannot set {name}: it runs once per input types, not once per call")

    def _special(self, name: str) -> Callable[..., Any] | None:
        """The special method where the object's class has it in Python: then what that reads is noted."""
        found = getattr(type(self._stand_in_object), name, None)
        if not isinstance(found, types.FunctionType):
            return None
        return types.MethodType(self._stand_in_guards.instrument(found), self)

    def _pin(self) -> Any:
        """The object itself, noted as being the one that is there."""
        guards = self._stand_in_guards
        guards.notes[f"{self._stand_in_path} is {guards.root(self._stand_in_object)}"] = None
        return self._stand_in_object

    def __getitem__(self, index: Any) -> Any:
        special = self._special("__getitem__")
        if special is not None:
            return special(index)
        value, guards = self._stand_in_object[index], self._stand_in_guards
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return guards.wrap(value, f"{self._stand_in_path}[{guards._key(index)}]")

    def __len__(self) -> int:
        special = self._special("__len__")
        if special is not None:
            return special()
        self._stand_in_guards.notes[f"len({self._stand_in_path}) == {len(self._stand_in_object)}"] = None
        return len(self._stand_in_object)

    def __iter__(self) -> Any:
        special = self._special("__iter__")
        if special is not None:
            return special()
        if isinstance(self._stand_in_object, dict):
            len(self)
            return iter(self._stand_in_object)
        return iter([self[i] for i in range(len(self))])

    def __contains__(self, item: Any) -> bool:
        special = self._special("__contains__")
        return special(item) if special is not None else any(x is item or x == item for x in self)

    def __bool__(self) -> bool:
        special = self._special("__bool__")
        if special is not None:
            return special()
        return bool(len(self)) if hasattr(type(self._stand_in_object), "__len__") else True

    def __eq__(self, other: object) -> bool:
        other = other._pin() if type(other) is _StandIn else other
        return self._pin() == other

    def __hash__(self) -> int:
        return hash(self._pin())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from dynbatch.cell import Cell

        special = self._special("__call__")
        if special is not None:
            return special(*args, **kwargs)
        found = _class_attribute(type(self._stand_in_object), "__call__")
        return Inlined(found, self)(*args, **kwargs) if isinstance(found, Cell) else self._pin()(*args, **kwargs)


def _class_attribute(cls: type, name: str) -> Any:
    for base in cls.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return None
