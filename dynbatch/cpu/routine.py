"""Lowering: from a Program to steps that run on one batch.

A routine's steps work on a `Frame`, which holds for each value of the Program its array, or where its rows lie. What
depends on parameters alone runs once a parameter version (`shared`); what sums over a whole backward pass runs once
at its end (`final`); everything else runs for each batch (`steps`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dynbatch.compiler.ir import ROW, SHARED, Program, Value
from dynbatch.cpu.gather import gather
from dynbatch.cpu.memory import Arena

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
            if self.location[v] < 0:
                self.location[v] = self.arena.scratch(count * type.size)
                gather(self.arena.mem, self.index[v], type.size, self.location[v], type.size)
                self.gathered += count * type.size
            found = self.arrays[v] = self.arena.view(self.location[v], (count, *type.storage))
        return found

    def target(self, v: int) -> np.ndarray:
        """Where stored value ``v`` goes, as an array."""
        value = self.routine.program.values[v]
        assert value.type is not None
        start = self.location[v] = self.destination[v]
        result = self.arrays[v] = self.arena.view(start, (self.count(value.domain), *value.type.storage))
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
        forward: for a gradient, the routine that computes the shared values it reads.

    Attributes:
        shared, steps, final: see the module.
        shared_values: what the shared steps compute.
        late_inputs: what the final steps read, for all rows at once.
    """

    tier = "numpy"

    def __init__(self, program: Program, stored: frozenset[int], forward: Routine | None = None) -> None:
        self.program = program
        self.stored = stored
        self.shared: list[Step] = []
        self.steps: list[Step] = []
        self.final: list[Step] = []
        values = program.values
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
            else:
                self.steps.append(_run_op(v, value, v in stored))
        self.shared_values = [v for v, x in enumerate(values) if x.op and x.domain == SHARED and v not in late]
        self.inputs = [(v, x) for v, x in enumerate(values) if x.op is None and x.kind not in ("fwd", "dout")]
        self.kept_inputs = [(v, x) for v, x in enumerate(values) if x.kind == "fwd" and x.domain != SHARED]
        shared_inputs = [(v, x.index) for v, x in enumerate(values) if x.kind == "fwd" and x.domain == SHARED]
        self.forward_shared = (forward, shared_inputs) if forward and shared_inputs else None
        self.late_inputs = frozenset(a for v in late for a in values[v].args if a not in late)

