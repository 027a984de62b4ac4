"""Lowering: what a kernel computes for an instruction, in the building blocks that generated kernels know.

A `Body` is the inside of one kernel: the instructions of a region, with composite ops (a softmax, say) taken apart by
their own `lower`. It knows one row's values only, and those of the row's list elements; what comes from outside is an
input.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dynbatch.compiler.ir import ROW, SHARED, Builder, Program
from dynbatch.ops.elementwise import constant
from dynbatch.ops.primitive import Primitive
from dynbatch.ops.shape import reshape

Extents = tuple[int, int]
"""How far a value reaches along the two directions of a kernel's loops: within a column, and over columns."""


class NoLowering(Exception):
    """An op that generated kernels cannot compute."""


class Body(Builder):
    """Collects what a kernel computes.

    Attributes:
        inner: for each value of the Program that was met, its value here.
        outer: for each input here, the value of the Program that it is.
    """

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.inner: dict[int, int] = {}
        self.outer: dict[int, int] = {}

    def add(self, v: int) -> int:
        """Append instruction ``v`` of the Program; operands that are not here yet become inputs."""
        value = self.program.values[v]
        assert value.op is not None
        self.inner[v] = self.emit(value.op, *(self._operand(a) for a in value.args), **dict(value.attrs))
        return self.inner[v]

    def emit(self, op: Primitive, *args: int, **attrs: Any) -> int:
        """Append an instruction, or what it is made of; raises `NoLowering`."""
        if op.is_block:
            return super().emit(op, *args, **attrs)
        found = op.lower(self, args, **attrs)
        if found is None:
            raise NoLowering(op.name)
        return found

    def _operand(self, a: int) -> int:
        if a not in self.inner:
            value = self.program.values[a]
            if value.op is constant:
                self.inner[a] = self.emit(constant, **dict(value.attrs))
            else:
                self.inner[a] = self.input("outer", a, value.type, max(value.domain, ROW))
                self.outer[self.inner[a]] = a
        return self.inner[a]

    def is_boundaries(self, v: int) -> bool:
        """Whether value ``v`` here is where each row's list elements begin and end."""
        return v in self.outer and self.program.values[self.outer[v]].kind == "ptr"

    def extents(self, v: int) -> Extents:
        """Those of value ``v`` here; a value of more than two dimensions is one column. Integers are scalars."""
        type = self.values[v].type
        if type is None:
            return 1, 1
        return (type.shape[0], type.shape[1]) if len(type.shape) == 2 else (type.size, 1)


def lower(program: Program, members: Iterable[int]) -> Body:
    """The inside of a kernel for these instructions."""
    body = Body(program)
    for v in members:
        body.add(v)
    return body


def join(*extents: Extents) -> Extents | None:
    """The extents of loops over values of these extents, each of which stretches where it is one; None if none do."""
    result = []
    for sizes in zip(*extents):
        wide = set(sizes) - {1}
        if len(wide) > 1:
            return None
        result.append(wide.pop() if wide else 1)
    return result[0], result[1]


def kernel_extents(program: Program, v: int) -> Extents | None:
    """The extents of the loops that compute instruction ``v`` from its operands; None if no kernel can."""
    value = program.values[v]
    if value.op is None or value.domain == SHARED or value.type is None:  # memory holds no integers
        return None
    for a in value.args:
        operand = program.values[a]
        crosses = value.op.reduces == "segments" or value.op.expands  # between rows and list elements
        near = operand.domain in (SHARED, value.domain) and operand.kind != "ptr"
        if operand.kind == "table" or not (near or crosses):
            return None
    try:
        body = lower(program, [v])
    except NoLowering:
        return None
    # a reshape is its operand's memory seen as another shape, not a loop
    return join(*(body.extents(i) for i, x in enumerate(body.values) if x.op is not reshape))
