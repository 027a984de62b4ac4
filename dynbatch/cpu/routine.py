"""Lowering: from a Program to steps that run on one batch.

A routine's steps work on a `Frame`, which holds for each value of the Program its array, or where its rows lie. What
depends on parameters alone runs once a parameter version (`shared`); what sums over a whole backward pass runs once
at its end (`final`); everything else runs for each batch (`steps`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from dynbatch.compiler.ir import ROW, SHARED, Program, Value
from dynbatch.config import config
from dynbatch.cpu.gather import gather, gather_from
from dynbatch.cpu.job import Job
from dynbatch.cpu.memory import Arena
from dynbatch.cpu.products import Factor
from dynbatch.errors import ValidityError
from dynbatch.signature import Signature

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
            inside = self.routine.late_home.get(v)
            if inside is not None:  # part of a stored value, in the final steps
                whole = self.array(inside[0]).reshape(count, -1)
                found = whole[:, inside[1] : inside[1] + type.size].reshape(count, *type.storage)
            else:
                if self.location[v] < 0:
                    self.location[v] = self.arena.scratch(count * type.size)
                    gather(self.arena.mem, self.index[v], 0, type.size, self.location[v], type.size)
                    self.gathered += count * type.size
                found = self.arena.view(self.location[v], (count, *type.storage))
            self.arrays[v] = found
        return found

    def target(self, v: int) -> np.ndarray:
        """Where stored value ``v`` goes, as an array."""
        value = self.routine.program.values[v]
        assert value.type is not None
        result = self.arena.view(self.destination[v], (self.count(value.domain), *value.type.storage))
        self.arrays[v] = result
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
    """A lowered Program in the NumPy tier: every instruction runs as its batched reference.

    Arguments:
        program: forward or gradient.
        stored: values whose rows are kept in pools, beyond the batch.
        groups: for each list argument of the call, its segment domain.
        forward: for a gradient, the routine that computes the shared values it reads.
        late_home: what the final steps find inside of stored values: (the stored value, column).
        names: what jobs call the stored values, where their Program is another one.

    Attributes:
        shared, steps, final: see the module.
        late: values that the final steps compute.
    """

    def __init__(
        self,
        program: Program,
        stored: frozenset[int],
        groups: dict[int, int],
        forward: Routine | None = None,
        late_home: dict[int, tuple[int, int]] | None = None,
        names: dict[int, int] | None = None,
    ) -> None:
        self.program = program
        self.stored = stored
        self.groups = groups
        self.late_home = late_home or {}
        self.names = names
        values = program.values
        self.shared: list[Step] = []
        self.steps: list[Step] = []
        self.final: list[Step] = []
        self.late = late_values(program)
        for v, value in enumerate(values):
            if value.op is None:
                if v in stored and value.kind != "dout":
                    self.steps.append(_copy(v, value))
            elif v in self.late:
                self.final.append(_run_op(v, value, False))
            elif value.domain == SHARED:
                self.shared.append(_run_op(v, value, False))
                if v in stored:
                    self.steps.append(_copy(v, value))
            else:
                self.steps.append(_run_op(v, value, v in stored))
        shared_inputs = [(v, x.index) for v, x in enumerate(values) if x.kind == "fwd" and x.domain == SHARED]
        self.forward_shared = (forward, shared_inputs) if forward and shared_inputs else None

    def run(self, job: Job) -> None:
        """Run one batch."""
        frame = self.frame(job)
        for v, value in enumerate(self.program.values):
            if value.kind == "fwd" and value.domain != SHARED:
                frame.location[v] = job.kept(value.index)
            elif value.kind == "dout":
                assert value.type is not None
                frame.location[v] = job.pull(v, value.index, value.type.size)
        for step in self.steps:
            step(frame)
        if config.check_validity:
            computed = [v for v, x in enumerate(self.program.values) if x.op is not None and x.domain != SHARED]
            check_finite(frame, f"batch {job.b} of the plan", computed)
        job.gathered += frame.gathered

    def factors(self, signature: Signature) -> list[Factor]:
        """The weights that are prepared for its products; none in this tier."""
        return []

    def frame(self, job: Job) -> Frame:
        """A frame with the job's operands, payload and parameters."""
        frame = Frame(self, job.arena, job.rows)
        frame.destination = job.destination
        tables, b = job.tables, job.b
        for v, value in enumerate(self.program.values):
            kind, index = value.kind, value.index
            if kind == "arg":
                where, run = tables.arg_column(b, index)
                if run:
                    frame.location[v] = int(where[0])
                    job.viewed += where.size * value.type.size  # type: ignore[union-attr]
                frame.index[v] = where
            elif kind == "list":
                _, where, run = tables.list_segments(b, index)
                frame.elements[value.domain] = where.size
                if run and where.size:
                    frame.location[v] = int(where[0])
                    job.viewed += where.size * value.type.size  # type: ignore[union-attr]
                frame.index[v] = where
            elif kind == "ptr":
                which = next(k for k, g in self.groups.items() if g == index)
                frame.arrays[v], where, _ = tables.list_segments(b, which)
                frame.elements[index] = where.size
            elif kind == "int":
                frame.arrays[v] = tables.int_column(b, index)
            elif kind == "float":
                frame.arrays[v] = tables.float_column(b, index).astype(job.arena.mem.dtype)[:, None]
            elif kind == "data":
                assert value.type is not None
                start = job.arena.scratch(job.rows * value.type.size)
                gather_from(job.data, tables.int_column(b, index), value.type.size, job.arena.mem, start)
                frame.location[v] = start
        for v, array in self.shared_arrays(job.signature, job.arena).items():
            frame.arrays[v] = array
        return frame

    def shared_arrays(self, signature: Signature, arena: Arena) -> dict[int, Any]:
        """Parameters, and what depends on them alone, which is computed once a version."""
        version = signature.version()
        known = signature.cache.get(self)
        if known is None or known[0] != version:
            frame = Frame(self, arena, 1)
            for v, value in enumerate(self.program.values):
                if value.kind == "slot":
                    frame.arrays[v] = signature.binding[value.index].data[None]
                elif value.kind == "table":
                    frame.arrays[v] = signature.binding[value.index].data
            if self.forward_shared:
                forward, inputs = self.forward_shared
                source = forward.shared_arrays(signature, arena)
                for v, index in inputs:
                    frame.arrays[v] = source[index]
            for step in self.shared:
                step(frame)
            found = {v: array for v, array in enumerate(frame.arrays) if array is not None}
            known = signature.cache[self] = (version, found)
        return known[1]


def check_finite(frame: Frame, where: str, values: Iterable[int]) -> None:
    """Raise `ValidityError` for the first of these values that has a NaN or an infinity."""
    program = frame.routine.program
    for v in values:
        value = program.values[v]
        found = frame.array(v)
        if value.op is None or not isinstance(found, np.ndarray):
            continue
        if found.dtype.kind == "f" and not np.isfinite(found).all():
            what = "NaN" if np.isnan(found).any() else "infinity"
            inside = f" in {program.name}" if value.op.name != program.name else ""
            raise ValidityError(f"{what} computed by {value.op.name}{inside}, {where} ({frame.rows} rows)")
