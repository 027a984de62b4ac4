"""Tracer: a Builder that also collects what a call must supply: parameters, literal indices and random keys."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

from dynbatch.compiler.ir import ROW, SHARED, Builder
from dynbatch.errors import ShapeError
from dynbatch.signature import Signature
from dynbatch.types import Type


class Tracer(Builder):
    """Builds the Program of one op call or one cell.

    Arguments:
        name: of the op or cell, for people.
        dtype: of the graph.

    Attributes:
        binding: the parameters met so far; a parameter's place is its slot.
        bounds: integer payloads that index something; see `Signature.bounds`.
        tail: integer payloads that every call gets without the caller's doing; see `Signature.tail`.
    """

    def __init__(self, name: str, dtype: str) -> None:
        super().__init__()
        self.name = name
        self.dtype = dtype
        self.binding: list[Any] = []
        self.tail: list[int | None] = []
        self.bounds: list[tuple[int, int, str, str]] = []
        self.ints = 0
        self.floats = 0
        self.args = 0
        self.lists = 0
        self.draws = 0

    def new_arg(self, type: Type) -> int:
        """The next Expression argument."""
        self.args += 1
        return self.input("arg", self.args - 1, type, ROW)

    def new_list(self, type: Type) -> int:
        """The elements of the next list argument; every list starts as a segment domain of its own."""
        self.lists += 1
        return self.input("list", self.lists - 1, type, self.lists)

    def new_int(self) -> int:
        """The next integer payload. All of the caller's come before any literal or key."""
        assert not self.tail
        self.ints += 1
        return self.input("int", self.ints - 1, None, ROW)

    def new_float(self) -> int:
        """The next float payload, a scalar."""
        from dynbatch.types import type_of

        self.floats += 1
        return self.input("float", self.floats - 1, type_of((1,), self.dtype), ROW)

    def new_data(self, type: Type) -> int:
        """A value given by the user; the next integer payload holds its offset."""
        self.ints += 1
        return self.input("data", self.ints - 1, type, ROW)

    def slot(self, parameter: Any) -> int:
        """The parameter's slot (or table) value."""
        if not any(known is parameter for known in self.binding):
            self.binding.append(parameter)
        index = next(i for i, known in enumerate(self.binding) if known is parameter)
        if parameter.type.dtype.name != self.dtype:
            raise ShapeError(
                f"{self.name}: parameter {parameter.name} is {parameter.type.dtype.name}, the graph is {self.dtype}"
            )
        return self.input("table" if parameter.is_lookup else "slot", index, parameter.type, SHARED)

    def literal_int(self, value: int) -> int:
        """An integer that the traced code wrote itself: payload that is the same at each call."""
        if value not in self.tail:
            self.tail.append(int(value))
        return self.input("int", self.ints + self.tail.index(value), None, ROW)

    def random_key(self, like: int | None = None) -> int:
        """A random key, drawn anew at each call; several draws in one Program differ by their salt.

        Arguments:
            like: a value that the draw is for; a list's elements each get a key.
        """
        from dynbatch.ops.random import element_key

        if None not in self.tail:
            self.tail.append(None)
        key = self.input("int", self.ints + self.tail.index(None), None, ROW)
        domain = ROW if like is None else self.values[like].domain
        return self.emit(element_key, key, self.ptr(domain)) if domain > ROW else key

    def salt(self) -> int:
        """Distinguishes the draws of one Program."""
        self.draws += 1
        return self.draws

    def constant(self, value: float, shape: tuple[int, ...] = (1,)) -> int:
        """A number that is part of the Program."""
        from dynbatch.ops.elementwise import constant

        return self.emit(constant, shape=shape, value=float(value), dtype=self.dtype)

    def to_float(self, v: int) -> int:
        """An integer payload as a scalar."""
        from dynbatch.ops.elementwise import to_float

        return self.emit(to_float, v, dtype=self.dtype)

    def signature(self, outputs: tuple[int, ...]) -> Signature:
        """Finish: the interned signature of the interned Program with the binding found."""
        layout = (
            self.args,
            self.lists,
            self.ints + len(self.tail),
            self.floats,
            len(self.binding),
        )
        program = self.finish(outputs, name=self.name, layout=layout)
        key = (program, tuple(id(p) for p in self.binding), tuple(self.tail), tuple(self.bounds))
        found = _signatures.get(key)
        if found is None:
            found = Signature(program, tuple(self.binding), tuple(self.tail), tuple(self.bounds))
            _signatures[key] = found
        return found


_signatures: WeakValueDictionary[Any, Signature] = WeakValueDictionary()
"""Interned, so that two traces of the same thing batch; a signature keeps the parameters whose ids are in its key."""
