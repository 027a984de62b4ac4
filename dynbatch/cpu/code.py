"""What is derived once from a Program: its optimized form, what its forward pass keeps, and its gradients."""

from __future__ import annotations

from dynbatch.compiler.fuse_matmul import fuse_matmul
from dynbatch.compiler.gradient import gradient
from dynbatch.compiler.ir import ROW, SHARED, Program
from dynbatch.cpu.routine import Routine, late_values
from dynbatch.ops.shape import pick_range, reshape


class ForwardCode:
    """How a Program runs forward.

    Attributes:
        program: after the passes.
        outputs: where each output's rows are stored: value ids.
        kept: intermediate values that the gradient reads.
        routines: by whether intermediates are kept.
    """

    def __init__(self, source: Program) -> None:
        self.program = program = fuse_matmul(source)
        self.outputs = program.outputs
        self.names = source.name
        everything = self.gradient_program((True,) * program.layout[0], (True,) * program.layout[4], (True,) * program.layout[1], False)
        self.kept = tuple(
            sorted({v.index for v in everything.values if v.kind == "fwd" and v.domain == ROW} - set(self.outputs))
        )
        stored = tuple(dict.fromkeys(self.outputs))
        self.stored = {False: stored, True: stored + self.kept}
        self.routines = {keep: Routine(program, frozenset(self.stored[keep])) for keep in (False, True)}
        self._gradients: dict[tuple[object, ...], GradientCode] = {}

    def width(self, v: int) -> int:
        """Elements of one row of value ``v``."""
        type = self.program.values[v].type
        assert type is not None
        return type.size

    def gradient_program(
        self, args: tuple[bool, ...], slots: tuple[bool, ...], lists: tuple[bool, ...], recompute: bool
    ) -> Program:
        """See `dynbatch.compiler.gradient.gradient`."""
        return gradient(self.program, args, slots, lists, recompute)

    def gradient(
        self, args: tuple[bool, ...], slots: tuple[bool, ...], lists: tuple[bool, ...], recompute: bool
    ) -> GradientCode:
        """The lowered gradient for what is wanted."""
        key = (args, slots, lists, recompute)
        found = self._gradients.get(key)
        if found is None:
            found = self._gradients[key] = GradientCode(self.gradient_program(*key), self)
        return found


class GradientCode:
    """How a Program's gradient runs.

    Attributes:
        results: for each argument (and list, numbered behind the arguments) whose gradient is computed: the stored
            value its rows lie in, and the column where they start.
        slots: ``(kind, slot, value)`` of parameter gradients.
    """

    def __init__(self, program: Program, forward: ForwardCode) -> None:
        self.program = program
        self.forward = forward
        late = late_values(program)
        stored = {
            a
            for v in late
            for a in program.values[v].args
            if a not in late
            and program.values[a].domain != SHARED
            and (program.values[a].op is not None or program.values[a].kind == "dout")
        }
        self.results: dict[int, tuple[int, int]] = {}
        self.slots = [r for r in program.results if r[0] in ("slot", "table")]
        for role, index, v in program.results:
            if role in ("arg", "list"):
                place = index if role == "arg" else forward.program.layout[0] + index
                base, column = _resolve(program, v)
                stored.add(base)
                self.results[place] = (base, column)
        self.stored = tuple(sorted(stored))
        self.routine = Routine(program, frozenset(stored), forward.routines[True])
        self.douts = [(v, x.index) for v, x in enumerate(program.values) if x.kind == "dout"]

    def width(self, v: int) -> int:
        """Elements of one row of value ``v``."""
        type = self.program.values[v].type
        assert type is not None
        return type.size


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
