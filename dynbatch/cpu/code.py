"""What is derived once from a Program: its optimized form, what its forward pass keeps, and its gradients."""

from __future__ import annotations

from typing import Any

from dynbatch.compiler.fuse_matmul import fuse_matmul
from dynbatch.compiler.gradient import gradient, read_by_gradient
from dynbatch.compiler.ir import SHARED, Program
from dynbatch.compiler.keep import choose_kept
from dynbatch.compiler.multiply_tables import multiply_tables
from dynbatch.compiler.placement import is_vector_concatenation
from dynbatch.config import config
from dynbatch.cpu.emit import CompiledRoutine
from dynbatch.cpu.routine import Routine, late_values
from dynbatch.cpu.tiers import digest
from dynbatch.ops.shape import pick_range, reshape


class ForwardCode:
    """How a Program runs forward.

    Attributes:
        program: after the passes.
        outputs: where each output's rows are stored: value ids.
        kept: intermediate values that the gradient reads.
        stored: what goes to pools, by whether intermediates are kept.
        checks: whether under ``debug`` there is something to check, which the NumPy tier does.
        digest: names the Program in the counts of `dynbatch.cpu.tiers`.
        devices: how it runs on devices, made by their backend.
    """

    def __init__(self, source: Program) -> None:
        self._source = source
        self.program = program = fuse_matmul(source)
        self.outputs = program.outputs
        self.kept = tuple(sorted(choose_kept(program, read_by_gradient(program))))
        stored = tuple(dict.fromkeys(self.outputs))
        self.stored = {False: stored, True: stored + self.kept}
        self.checks = _checks_in_debug(program)
        self.digest = digest(repr(program))
        self.devices: dict[Any, Any] = {}
        self._routines: dict[tuple[bool, bool, bool], Routine] = {}
        self._gradients: dict[tuple[object, ...], GradientCode] = {}

    def routine(self, keep: bool, compiled: bool, tables_are_small: bool = False) -> Routine:
        """How a batch runs: keeping intermediates or not, in either tier, with products of whole tables or without."""
        compiled = compiled and not (config.debug and self.checks)
        key = (keep, compiled, tables_are_small and compiled and not keep)
        found = self._routines.get(key)
        if found is None:
            found = self._with_tables() if key[2] else None
            kind = CompiledRoutine if compiled else Routine
            found = self._routines[key] = found or kind(self.program, frozenset(self.stored[keep]), self.program.groups)
        return found

    def _with_tables(self) -> Routine | None:
        """The routine that looks up products with rows of tables; None where there are none."""
        multiplied = multiply_tables(self._source)
        program = fuse_matmul(multiplied)
        names = dict(zip(program.outputs, self.outputs))
        if multiplied is self._source or not len(names) == len(set(program.outputs)) == len(set(self.outputs)):
            return None
        return CompiledRoutine(program, frozenset(program.outputs), program.groups, names=names)

    def width(self, v: int) -> int:
        """Elements of one row of value ``v``."""
        type = self.program.values[v].type
        assert type is not None
        return type.size

    def gradient_program(
        self,
        args: tuple[bool, ...],
        slots: tuple[bool, ...],
        lists: tuple[bool, ...],
        recompute: bool,
        outputs: bool = False,
    ) -> Program:
        """See `dynbatch.compiler.gradient.gradient`; ``recompute`` reads nothing that was kept."""
        return gradient(self.program, args, slots, lists, () if recompute else self.kept, outputs)

    def gradient(
        self,
        args: tuple[bool, ...],
        slots: tuple[bool, ...],
        lists: tuple[bool, ...],
        recompute: bool,
        outputs: bool,
    ) -> GradientCode:
        """The lowered gradient for what is wanted."""
        key = (args, slots, lists, recompute, outputs)
        found = self._gradients.get(key)
        if found is None:
            found = self._gradients[key] = GradientCode(self.gradient_program(*key), self)
        return found


class GradientCode:
    """How a Program's gradient runs.

    Attributes:
        results: for each argument (and list, numbered behind the arguments) whose gradient is computed: the stored
            value its rows lie in, and the column where they start.
        outputs: the same for the gradients of outputs, where they were asked for.
        slots: ``(kind, slot, value)`` of parameter gradients.
        devices: as of `ForwardCode`.
    """

    def __init__(self, program: Program, forward: ForwardCode) -> None:
        self.program = program
        self.forward = forward
        late = late_values(program)
        read = {a for v in late for a in program.values[v].args if a not in late}
        read = {a for a in read if _is_computed(program, a)}
        parts = {a: p for v in sorted(read) for a, p in _parts(program, v).items() if a in read}
        self.late_home: dict[int, tuple[int, int]] = {}
        stored = set()
        for a in read:
            home = parts.get(a) or _resolve(program, a)
            if home != (a, 0):
                self.late_home[a] = home
            stored.add(home[0])
        self.results: dict[int, tuple[int, int]] = {}
        self.outputs: dict[int, tuple[int, int]] = {}
        self.slots = [r for r in program.results if r[0] in ("slot", "table")]
        for role, index, v in program.results:
            if role in ("arg", "list", "output"):
                base, column = _resolve(program, v)
                stored.add(base)
                if role == "output":
                    self.outputs[index] = (base, column)
                else:
                    place = index if role == "arg" else forward.program.layout[0] + index
                    self.results[place] = (base, column)
        self.late_home = {a: home for a, home in self.late_home.items() if a not in stored}
        self.stored = tuple(sorted(stored))
        self.checks = _checks_in_debug(program)
        self.digest = digest(repr(program))
        self.devices: dict[Any, Any] = {}
        self._routines: dict[bool, Routine] = {}

    def routine(self, compiled: bool) -> Routine:
        """How a batch runs, in either tier."""
        compiled = compiled and not (config.debug and self.checks)
        found = self._routines.get(compiled)
        if found is None:
            forward = self.forward.routine(True, compiled)
            kind = CompiledRoutine if compiled else Routine
            found = self._routines[compiled] = kind(
                self.program, frozenset(self.stored), self.forward.program.groups, forward, self.late_home
            )
        return found

    def width(self, v: int) -> int:
        """Elements of one row of value ``v``."""
        type = self.program.values[v].type
        assert type is not None
        return type.size


def _checks_in_debug(program: Program) -> bool:
    return any(v.op is not None and v.op.checks_in_debug for v in program.values)


def _is_computed(program: Program, v: int) -> bool:
    """Whether value ``v`` is computed row by row, so that it must be stored to be seen later."""
    value = program.values[v]
    return value.domain != SHARED and (value.op is not None or value.kind == "dout")


def _parts(program: Program, v: int) -> dict[int, tuple[int, int]]:
    """The operands of a concatenation of vectors, with their places in it."""
    value = program.values[v]
    if not is_vector_concatenation(program, v):
        return {}
    found: dict[int, tuple[int, int]] = {}
    column = 0
    for a in value.args:
        if program.values[a].op is not None and program.values[a].domain == value.domain:
            found.setdefault(a, (v, column))
        column += program.values[a].type.size  # type: ignore[union-attr]
    return found


def _resolve(program: Program, v: int) -> tuple[int, int]:
    """The value whose memory holds ``v``, and at which column: slices of vectors and reshapes are not copied."""
    start, column = v, 0
    while True:
        value = program.values[v]
        if value.op is reshape:
            v = value.args[0]
        elif value.op is pick_range and len(program.values[value.args[0]].type.shape) == 1:  # type: ignore[union-attr]
            column += dict(value.attrs)["start"]
            v = value.args[0]
        else:
            break
    if value.op is None and value.kind != "dout":
        return start, 0
    return v, column
