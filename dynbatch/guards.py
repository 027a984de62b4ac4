"""What a trace read from outside of its arguments, and the check that it is still the same.

A traced function sees stand-ins for the objects it reaches through ``self``, closures and globals. A stand-in notes
each attribute read; the notes become one compiled expression, run before each call (about 10 ns a note).
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from dynbatch.errors import CellError, user_line
from dynbatch.graph import Operand

_PLAIN = (int, float, str, bytes, bool, complex, type(None))
_OPAQUE_MODULES = ("numpy", "dynbatch.parameters", "dynbatch.trainers", "dynbatch.initializers")
_OPAQUE = (type, types.ModuleType, types.BuiltinFunctionType, types.FunctionType, Operand)


class Guards:
    """Notes of what was read.

    Attributes:
        notes: expressions over ``roots`` that must stay true.
        roots: the constants that the expressions use.
    """

    def __init__(self) -> None:
        self.notes: dict[str, None] = {}
        self.roots: list[Any] = []

    def root(self, value: Any) -> str:
        """A name for a constant."""
        for i, known in enumerate(self.roots):
            if known is value:
                return f"r{i}"
        self.roots.append(value)
        return f"r{len(self.roots) - 1}"

    def wrap(self, value: Any, path: str) -> Any:
        """Note that ``path`` gave ``value``, and return what the traced function gets to see."""
        from dynbatch.cell import Cell

        if isinstance(value, _PLAIN):
            if isinstance(value, float) and value != value:
                return value
            known = repr(value) if isinstance(value, (bool, type(None))) else self.root(value)
            self.notes[f"{path} is {known} or type({path}) is type({known}) and {path} == {known}"] = None
            return value
        bound = getattr(value, "bound_cell", None)
        if bound is not None:
            return _Inlined(bound.cell, self.stand_in(bound.instance, self.root(bound.instance)))
        if type(value) in (list, tuple):
            if all(getattr(v, "is_parameter", False) for v in value):  # one comparison, which tries identity first
                self.notes[f"{path} == {self.root(type(value)(value))}"] = None
                return value
            self.notes[f"len({path}) == {len(value)}"] = None
            return type(value)([self.wrap(v, f"{path}[{i}]") for i, v in enumerate(value)])
        if type(value) is dict and all(isinstance(k, (str, int)) for k in value):
            self.notes[f"len({path}) == {len(value)}"] = None
            return {k: self.wrap(v, f"{path}[{k!r}]") for k, v in value.items()}
        opaque = isinstance(value, (*_OPAQUE, Cell)) or hasattr(value, "is_parameter")
        if opaque or not hasattr(value, "__dict__") or type(value).__module__ in _OPAQUE_MODULES:
            self.notes[f"{path} is {self.root(value)}"] = None
            return value
        return self.stand_in(value, path)

    def stand_in(self, value: Any, path: str) -> Any:
        """The stand-in for an object."""
        return _StandIn(value, path, self)

    def instrument(self, function: types.FunctionType) -> Callable[..., Any]:
        """The function with stand-ins for what it reaches through its closure and its globals."""
        code = function.__code__
        globals_path = self.root(function.__globals__)
        seen = dict(function.__globals__)
        for name in code.co_names:
            if name in seen and not isinstance(seen[name], (types.ModuleType, type, types.FunctionType)):
                seen[name] = self.wrap(seen[name], f"{globals_path}[{name!r}]")
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
    def condition(self) -> str:
        """Python text that is true while everything is as it was noted; uses the names of `namespace`."""
        return " and ".join(f"({note})" for note in self.notes) or "True"

    @property
    def namespace(self) -> dict[str, Any]:
        """The constants of the condition."""
        return {f"r{i}": value for i, value in enumerate(self.roots)}

    def compile(self) -> Callable[[], bool]:
        """A function that says whether everything is still as it was noted."""
        check = eval(compile(f"lambda: {self.condition}", "<guards of a cell>", "eval"), self.namespace)

        def holds() -> bool:
            try:
                return check()
            except (AttributeError, KeyError, IndexError, TypeError):
                return False

        return holds


class _Inlined:
    """A cell reached from within a trace: its function, on the stand-in of its object."""

    def __init__(self, cell: Any, instance: Any) -> None:
        self._cell = cell
        self._instance = instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._cell.function(self._instance, *args, **kwargs)


class _StandIn:
    """Stands for an object while a function is traced; attribute reads are noted."""

    __slots__ = ("_stand_in_guards", "_stand_in_object", "_stand_in_path")

    def __init__(self, value: Any, path: str, guards: Guards) -> None:
        object.__setattr__(self, "_stand_in_object", value)
        object.__setattr__(self, "_stand_in_path", path)
        object.__setattr__(self, "_stand_in_guards", guards)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._stand_in_object)

    def __getattr__(self, name: str) -> Any:
        from dynbatch.cell import Cell

        value = self._stand_in_object
        found = getattr(type(value), name, None)
        if name not in getattr(value, "__dict__", {}):
            if isinstance(found, property) and found.fget is not None:
                return found.fget(self)
            if isinstance(found, types.FunctionType):
                static = isinstance(_class_attribute(type(value), name), staticmethod)
                return found if static else types.MethodType(found, self)
        if isinstance(found, Cell):
            return _Inlined(found, self)
        return self._stand_in_guards.wrap(getattr(value, name), f"{self._stand_in_path}.{name}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise CellError(f"{user_line()}: a cell cannot set {name}: it runs once per input types, not once per call")

    def __getitem__(self, index: Any) -> Any:
        value = self._stand_in_object[index]
        if isinstance(index, (int, str)):
            return self._stand_in_guards.wrap(value, f"{self._stand_in_path}[{index!r}]")
        return value

    def __len__(self) -> int:
        self._stand_in_guards.notes[f"len({self._stand_in_path}) == {len(self._stand_in_object)}"] = None
        return len(self._stand_in_object)

    def __iter__(self) -> Any:
        return iter([self[i] for i in range(len(self))])

    def __bool__(self) -> bool:
        return bool(self._stand_in_object)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return type(self._stand_in_object).__call__(self, *args, **kwargs)


def _class_attribute(cls: type, name: str) -> Any:
    for base in cls.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return None
