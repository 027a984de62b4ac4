"""Lowering: from a Program to steps that run on one batch.

A routine's steps work on a `Frame`, which holds for each value of the Program its array, or where its rows lie. What
depends on parameters alone runs once a parameter version (`shared`); what sums over a whole backward pass runs once
at its end (`final`); everything else runs for each batch (`steps`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dynbatch.compiler.fuse_elementwise import Region, fuse_elementwise
from dynbatch.compiler.ir import ROW, SHARED, Program, Value
from dynbatch.cpu.codegen import generate, resolve
from dynbatch.cpu.gather import gather
from dynbatch.cpu.kernels import load_kernel
from dynbatch.cpu.memory import Arena
from dynbatch.ops.linear import matmul
from dynbatch.ops.shape import concatenate
from dynbatch.types import Type

Step = Callable[["Frame"], None]


class Frame:
    """The values of one run of a routine.

    Attributes:
        arena: where stored values and scratch rows lie.
        rows: nodes in the batch.
        elements: list elements in the batch, by segment domain.
        arrays: each value as an array with its domain as leading axis, or None while only ``location`` knows.
        location: offset of each value's first row in the arena, where its rows follow each other.
        index: offset of each row, for operands that are scattered over the pools.
        destination: offset where a stored value's rows go.
    """

    __slots__ = ("arena", "arrays", "destination", "elements", "gathered", "index", "location", "routine", "rows")

    def __init__(self, routine: Routine, arena: Arena, rows: int) -> None:
        size = len(routine.program.values)
        self.routine = routine
        self.arena = arena
        self.rows = rows
        self.elements: dict[int, int] = {}
        self.arrays: list[Any] = [None] * size
        self.location: list[int] = [-1] * size
        self.index: list[Any] = [None] * size
        self.destination: dict[int, int] = {}
        self.gathered = 0

    def count(self, domain: int) -> int:
        """Length of the leading axis of values of this domain."""
        return self.rows if domain == ROW else 1 if domain == SHARED else self.elements[domain]

    def array(self, v: int) -> Any:
        """Value ``v`` as an array; scattered rows are gathered into scratch space."""
        found = self.arrays[v]
        if found is None:
            value = self.routine.program.values[v]
            type = value.type
            assert type is not None
            count = self.count(value.domain)
            source, column = self.routine.home[v]
            if source != v:
                found = self._part(v, source, column, count, type)
            else:
                if self.location[v] < 0:
                    self.location[v] = self.arena.scratch(count * type.size)
                    gather(self.arena.mem, self.index[v], type.size, self.location[v], type.size)
                    self.gathered += count * type.size
                found = self._view(self.location[v], self.routine.stride[v], count, type)
            self.arrays[v] = found
        return found

    def locate(self, v: int) -> int:
        """Where the rows of value ``v`` lie in the arena, at equal distances; they are brought there if need be."""
        if self.location[v] < 0:
            array = self.array(v)
            if self.location[v] < 0:
                type = self.routine.program.values[v].type
                assert type is not None
                start = self.arena.scratch(array.shape[0] * type.size)
                copy = self.arrays[v] = self.arena.view(start, array.shape)
                copy[...] = array
                self.location[v] = start
        return self.location[v]

    def space(self, v: int) -> int:
        """Where value ``v`` is to be written: its pool, its part of a concatenation, or scratch."""
        if self.location[v] < 0:
            owner, column = self.routine.part_of.get(v, (v, 0))
            if owner != v:
                self.location[v] = self.space(owner) + column
            elif v in self.destination:
                self.location[v] = self.destination[v]
            else:
                value = self.routine.program.values[v]
                assert value.type is not None
                self.location[v] = self.arena.scratch(self.count(value.domain) * value.type.size)
        return self.location[v]

    def _part(self, v: int, source: int, column: int, count: int, type: Type) -> np.ndarray:
        """A slice of a vector, or a reshape, as a view of the value it is part of."""
        if self.location[source] < 0:
            array = self.array(source)
            if self.location[source] < 0:
                flat = array.reshape(array.shape[0], -1)[:, column : column + type.size]
                return flat.reshape(array.shape[0], *type.storage)
        return self._view(self.location[source] + column, self.routine.stride[source], count, type)

    def _view(self, start: int, stride: int, count: int, type: Type) -> np.ndarray:
        """``count`` rows at equal distances in the arena."""
        if stride == type.size:
            return self.arena.view(start, (count, *type.storage))
        mem, item = self.arena.mem, self.arena.itemsize
        strides = [item]
        for n in type.storage[:0:-1]:
            strides.insert(0, strides[0] * n)
        return np.ndarray((count, *type.storage), mem.dtype, mem, start * item, (stride * item, *strides))

    def target(self, v: int) -> np.ndarray:
        """Where stored value ``v`` goes, as an array."""
        value = self.routine.program.values[v]
        assert value.type is not None
        start = self.space(v)
        stride = self.routine.stride[v]
        result = self.arrays[v] = self._view(start, stride, self.count(value.domain), value.type)
        return result


def _run_op(v: int, value: Value, stored: bool) -> Step:
    """The step that computes one instruction with its NumPy reference."""
    assert value.op is not None
    op, args, attrs = value.op, value.args, dict(value.attrs)
    run = op.numpy

    def step(f: Frame) -> None:
        f.arrays[v] = run(*[f.array(a) for a in args], **attrs)

    def step_stored(f: Frame) -> None:
        operands = [f.array(a) for a in args]
        f.target(v)[...] = run(*operands, **attrs)

    def step_in_place(f: Frame) -> None:
        operands = [f.array(a) for a in args]
        run(*operands, out=f.target(v), **attrs)

    if not stored:
        return step
    return step_in_place if op.writes_out else step_stored


def _copy(v: int, value: Value) -> Step:
    """The step that stores an input, or what the whole batch shares, once a row."""
    assert value.type is not None
    storage = value.type.storage

    def step(f: Frame) -> None:
        count = f.rows if value.domain == SHARED else f.count(value.domain)
        f.arena.view(f.destination[v], (count, *storage))[...] = f.array(v)

    return step


def late_values(program: Program) -> frozenset[int]:
    """What can only be computed once all batches have run: sums over rows, and what follows from them."""
    late: set[int] = set()
    for v, value in enumerate(program.values):
        if value.op is not None and (value.op.reduces == "rows" or any(a in late for a in value.args)):
            late.add(v)
    return frozenset(late)


class Routine:
    """A lowered Program.

    Arguments:
        program: forward or gradient.
        stored: values whose rows are kept in pools, beyond the batch.
        compiled: fuse elementwise regions into compiled kernels; else every instruction runs as its NumPy reference.
        forward: for a gradient, the routine that computes the shared values it reads.
        late_home: what the final steps find inside of stored values: (the stored value, column).

    Attributes:
        shared, steps, final: see the module.
        shared_values: what the shared steps compute.
        home: for each value, the value in whose memory it lies and the column where (itself and zero for most).
        stride: for each value, the distance of its rows where they lie in the arena.
        part_of: vectors that are written right into a concatenation: (the concatenation, column).
    """

    def __init__(
        self,
        program: Program,
        stored: frozenset[int],
        compiled: bool,
        forward: Routine | None = None,
        late_home: dict[int, tuple[int, int]] | None = None,
    ) -> None:
        self.program = program
        self.stored = stored
        self.tier = "compiled" if compiled else "numpy"
        values = program.values
        self.stride = [v.type.size if v.type else 1 for v in values]
        self.home = [(v, 0) for v in range(len(values))]
        self.part_of: dict[int, tuple[int, int]] = {}
        self.shared: list[Step] = []
        self.steps: list[Step] = []
        self.final: list[Step] = []
        late = late_values(program)
        for v, value in enumerate(values):
            if value.op is None:
                if v in stored and value.kind != "dout":
                    self.steps.append(_copy(v, value))
            elif v in late:
                self.final.append(_run_op(v, value, False))
            elif value.domain == SHARED:
                self.shared.append(_run_op(v, value, False))
                if v in stored:
                    self.steps.append(_copy(v, value))
            elif not compiled:
                self.steps.append(_run_op(v, value, v in stored))
        late_home = late_home or {}
        if compiled:
            self._compile(late, late_home)
        self.home = [late_home.get(v, home) for v, home in enumerate(self.home)]
        self.shared_values = [v for v, x in enumerate(values) if x.op and x.domain == SHARED and v not in late]
        self.inputs = [(v, x) for v, x in enumerate(values) if x.op is None and x.kind not in ("fwd", "dout")]
        self.kept_inputs = [(v, x) for v, x in enumerate(values) if x.kind == "fwd" and x.domain != SHARED]
        shared_inputs = [(v, x.index) for v, x in enumerate(values) if x.kind == "fwd" and x.domain == SHARED]
        self.forward_shared = (forward, shared_inputs) if forward and shared_inputs else None

    def _compile(self, late: frozenset[int], late_home: dict[int, tuple[int, int]]) -> None:
        """Steps with one kernel for each fused region, and slices and concatenations that copy nothing."""
        program, values = self.program, self.program.values
        skip = late | {v for v, x in enumerate(values) if x.op is not None and x.domain == SHARED}
        schedule = fuse_elementwise(program, skip, self.stored)
        written = {v for item in schedule if isinstance(item, Region) for v in item.outside}
        aliases = set()
        for v, value in enumerate(values):
            if v in skip or value.op is None:
                continue
            if v not in self.stored:
                self.home[v] = resolve(program, v)
                if self.home[v][0] != v:
                    aliases.add(v)
            if is_vector_concatenation(program, v):
                column = 0
                for a in value.args:
                    type = values[a].type
                    assert type is not None
                    in_place = (a in written or values[a].op is matmul) and a not in self.stored
                    elsewhere = late_home.get(a, (v, column)) != (v, column)
                    if in_place and not elsewhere and a not in self.part_of and values[a].domain == value.domain:
                        self.part_of[a] = (v, column)
                        self.stride[a] = value.type.size  # type: ignore[union-attr]
                    column += type.size
        for item in schedule:
            if isinstance(item, Region):
                self.steps.append(_run_kernel(self, item))
            elif item in aliases:
                continue
            elif is_vector_concatenation(program, item):
                self.steps.append(_run_concatenation(self, item))
            else:
                needed = item in self.stored or item in self.part_of
                self.steps.append(_run_op(item, values[item], needed))


def is_vector_concatenation(program: Program, v: int) -> bool:
    """Whether value ``v`` puts vectors one after the other in each row."""
    value = program.values[v]
    if value.op is not concatenate or value.domain == SHARED or dict(value.attrs)["dim"] != 0:
        return False
    return len(value.type.shape) == 1  # type: ignore[union-attr]


def _run_concatenation(routine: Routine, v: int) -> Step:
    """The step that brings together the parts of a concatenation that were not written in place."""
    program = routine.program
    width = program.values[v].type.size  # type: ignore[union-attr]
    parts, column = [], 0
    for a in program.values[v].args:
        size = program.values[a].type.size  # type: ignore[union-attr]
        if routine.part_of.get(a) != (v, column):
            source, inner = resolve(program, a)
            parts.append((a, column, size, source, inner, program.values[source].kind in ("arg", "list")))
        column += size

    def step(f: Frame) -> None:
        start = f.space(v)
        for a, at, size, source, inner, scattered in parts:
            if scattered:
                index = f.index[source]
                gather(f.arena.mem, index + inner if inner else index, size, start + at, width)
                f.gathered += index.size * size
            else:
                array = f.array(a)
                count = f.count(program.values[v].domain)
                target = f._view(start + at, width, count, program.values[a].type)  # type: ignore[arg-type]
                target[...] = array

    return step


def _run_kernel(routine: Routine, region: Region) -> Step:
    """The step that runs one fused region."""
    program = routine.program
    dtype = program.values[region.members[0]].type.dtype.name  # type: ignore[union-attr]
    source = generate(program, region, dtype)
    operands, outputs, size, domain = source.operands, source.outputs, region.size, region.domain
    kernel: list[Any] = []

    def step(f: Frame) -> None:
        if not kernel:
            kernel.append(load_kernel(source.text))
        numbers: list[int] = []
        arrays: list[Any] = []
        for value, column, kind, _ in operands:
            if kind == "affine":
                numbers += (f.locate(value) + column, routine.stride[value])
            elif kind == "index":
                numbers.append(column)
                arrays.append(f.index[value])
            else:
                arrays.append(f.arrays[value].reshape(-1))
        for v in outputs:
            numbers += (f.space(v), routine.stride[v])
        kernel[0](f.arena.mem, 0, f.count(domain), size, np.array(numbers, np.int64), *arrays)

    return step
