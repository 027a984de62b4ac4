"""Symbolic gradient: from a forward Program to the Program that computes its vector-Jacobian product.

The gradient Program reads the gradients of the outputs (``dout``), the call's own inputs, and values that the
forward pass kept (``fwd``), outputs among them. Everything else is computed again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dynbatch.compiler.ir import ROW, SHARED, Builder, Program, Value
from dynbatch.compiler.keep import is_keepable
from dynbatch.ops.elementwise import add
from dynbatch.ops.linear import matmul, matmul_rows
from dynbatch.ops.reduction import sum_rows
from dynbatch.ops.segment import segment_sum
from dynbatch.ops.shape import concatenate, pad_range


def gradient(
    program: Program,
    args: tuple[bool, ...],
    slots: tuple[bool, ...],
    lists: tuple[bool, ...],
    kept: Collection[int],
    outputs: bool = False,
) -> Program:
    """The Program of the gradients that are wanted.

    Arguments:
        program: a forward Program.
        args: which arguments' gradients are wanted.
        slots: which parameters'.
        lists: which list arguments'.
        kept: values that can be read, beside the outputs and what depends on parameters alone.
        outputs: also the gradients of the outputs, with what reaches them by way of other outputs.

    Returns:
        A Program whose results have the roles ``arg``, ``list``, ``slot``, ``table`` and ``output``.
    """
    wanted = {"arg": args, "list": lists, "slot": slots, "table": slots}
    b = _GradientBuilder(program, frozenset(kept).union(program.outputs))
    active = [False] * len(program.values)
    for i, value in enumerate(program.values):
        if value.op is not None:
            active[i] = any(active[a] for a in value.args)
        elif value.kind in wanted:
            active[i] = wanted[value.kind][value.index]
    parts: dict[int, list[int]] = {}
    for index, v in enumerate(program.outputs):
        if active[v]:
            dout = b.input("dout", index, program.values[v].type, ROW)
            parts.setdefault(v, []).append(b.to_domain(dout, program.values[v]))
    results: list[tuple[str, int, int]] = []
    if outputs:  # also of what depends on nothing that a gradient is wanted for
        for index, v in enumerate(program.outputs):
            if not active[v]:
                results.append(("output", index, b.input("dout", index, program.values[v].type, ROW)))
    for v in range(len(program.values) - 1, -1, -1):
        value = program.values[v]
        if v not in parts or not active[v]:
            continue
        for index, o in enumerate(program.outputs):
            if outputs and o == v:
                # of what the whole batch shares, each row has its own part
                shared = value.domain == SHARED
                total = b.input("dout", index, value.type, ROW) if shared else b.total(parts[v])
                results.append(("output", index, total))
        if value.op is None:
            dout = parts[v][0] if value.kind == "table" else b.total(parts[v])
            results += [(value.kind, value.index, d) for d in (parts[v] if value.kind == "table" else (dout,))]
            continue
        dout = b.total(parts[v])
        operands = tuple(b.forward(a) for a in value.args)
        grads = value.op.vjp(b, operands, b.forward(v), dout, **dict(value.attrs))
        for a, grad in zip(value.args, grads):
            if grad is not None and active[a]:
                parts.setdefault(a, []).append(b.to_domain(grad, program.values[a]))
    return b.finish(results=tuple(results[::-1]), name=program.name + " gradient")


def read_by_gradient(program: Program) -> frozenset[int]:
    """The values of a forward Program that its gradient reads, if all that can be kept is."""
    args, lists, _, _, slots = program.layout
    keepable = [v for v in range(len(program.values)) if is_keepable(program, v)]
    found = gradient(program, (True,) * args, (True,) * slots, (True,) * lists, keepable)
    inputs = {(x.kind, x.index): v for v, x in enumerate(program.values) if x.op is None}
    known = {(x.kind, x.index) for x in found.values}
    return frozenset(
        [index for kind, index in known if kind == "fwd"] + [inputs[key] for key in known if key in inputs]
    )


class _GradientBuilder(Builder):
    """A Builder that can refer to values of the forward Program."""

    def __init__(self, program: Program, known: frozenset[int]) -> None:
        super().__init__()
        self.program = program
        self.known = known

    def forward(self, v: int) -> int:
        """Forward value ``v``: an input again, a known value, or the instruction once more."""
        value = self.program.values[v]
        if value.op is None:
            return self.input(value.kind, value.index, value.type, value.domain)
        if value.domain == SHARED or v in self.known:
            return self.input("fwd", v, value.type, value.domain)
        return self.emit(value.op, *(self.forward(a) for a in value.args), **dict(value.attrs))

    def to_domain(self, grad: int, target: Value) -> int:
        """Sum a gradient over what the target is shared by."""
        domain = self.values[grad].domain
        if target.domain == SHARED and domain != SHARED:
            made = self.values[grad]
            if made.op is matmul:
                return self.emit(matmul_rows, *made.args, **dict(made.attrs))
            return self.emit(sum_rows, grad)
        if target.domain == ROW and domain > ROW:
            return self.emit(segment_sum, grad, self.ptr(domain))
        return grad

    def total(self, parts: Sequence[int]) -> int:
        """The sum of a value's gradient contributions; slices that do not overlap are put side by side."""
        parts = list(dict.fromkeys(parts)) if len(set(parts)) == len(parts) else list(parts)
        padded = [p for p in parts if self.values[p].op is pad_range]
        rest = [p for p in parts if self.values[p].op is not pad_range]
        joined = self._side_by_side(padded) if len(padded) > 1 else None
        if joined is None:
            rest, padded = parts, []
        else:
            rest.append(joined)
        result = rest[0]
        for part in rest[1:]:
            result = self.emit(add, result, part)
        return result

    def _side_by_side(self, padded: list[int]) -> int | None:
        """One concatenation instead of a sum of padded slices, where they tile the value without overlap."""
        spans = []
        for p in padded:
            value = self.values[p]
            attrs = dict(value.attrs)
            width = self.type(value.args[0]).shape[attrs["dim"]]
            spans.append((attrs["start"], attrs["start"] + width, value.args[0], attrs["dim"], value.domain))
        if len({(span[3], span[4]) for span in spans}) > 1:
            return None
        spans.sort()
        end = 0
        for start, stop, *_ in spans:
            if start != end:
                return None
            end = stop
        dim = spans[0][3]
        if end != self.type(padded[0]).shape[dim]:
            return None
        return self.emit(concatenate, *(span[2] for span in spans), dim=dim)
