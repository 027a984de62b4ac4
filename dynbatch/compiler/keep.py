"""Keep or recompute: which forward values the backward pass reads from memory, and which it computes again.

Keeping a value costs memory for as long as the graph lives, and the time to write and to read it. Recomputing it costs
its arithmetic, and what it is made of must be at hand: kept itself, an output, or an operand that is gathered again.
The costs are nanoseconds an element of one core, rounded from measurements of the generated kernels on arrays that do
not fit in the cache; only their proportions matter.
"""

from __future__ import annotations

import ast
from collections.abc import Collection

from dynbatch.compiler.ir import ROW, SHARED, Program, Value
from dynbatch.compiler.lower import NoLowering, lower
from dynbatch.ops.elementwise import constant
from dynbatch.ops.linear import matmul
from dynbatch.ops.primitive import Elementwise, Indexed
from dynbatch.ops.shape import concatenate, reshape

ARITHMETIC = 0.06
FUNCTION = 0.5
RANDOM = 0.3
LOAD = STORE = 0.25
HOLD = 0.1  # the memory itself: fresh pages, and less room in the caches
GATHER = 0.4
REFERENCE = 1.0  # what has no form for kernels and runs as a NumPy call
LIST = 2.0  # elements of a list, of which the Program does not know the number

_CHEAP = {"where", "abs", "sign", "maximum", "minimum"}
_NEVER = float("inf")


def is_keepable(program: Program, v: int) -> bool:
    """Whether value ``v`` can be kept: computed once a node, in memory of its own."""
    value = program.values[v]
    return value.op is not None and value.domain == ROW and value.type is not None and not value.op.view


def choose_kept(program: Program, read: Collection[int]) -> frozenset[int]:
    """The values to keep.

    Arguments:
        program: a forward Program.
        read: its values that the backward pass reads, inputs and outputs included; views stand for what they view.

    Returns:
        Keepable values from which, with the inputs and the outputs, everything that is read can be had.
    """
    choice = _Choice(program, read)
    for v in range(len(program.values)):
        choice.add(v)
    return frozenset(choice.kept)


def arithmetic_cost(program: Program, v: int) -> float:
    """Of computing value ``v`` once more from its operands, for one node; infinite for a product."""
    value = program.values[v]
    assert value.op is not None
    if value.op is matmul:
        return _NEVER
    if value.op is concatenate:
        return LOAD * _size(value)
    try:
        body = lower(program, [v])
    except NoLowering:
        return REFERENCE * _size(value)
    return sum(_block_cost(x) for x in body.values if x.op not in (None, constant, reshape))


def _block_cost(value: Value) -> float:
    unit = ARITHMETIC
    if isinstance(value.op, Indexed):
        unit = RANDOM
    elif isinstance(value.op, Elementwise):
        calls = [n.func.id for n in ast.walk(ast.parse(value.op.formula)) if isinstance(n, ast.Call)]  # type: ignore[attr-defined]
        unit += FUNCTION * sum(name not in _CHEAP for name in calls)
    return unit * _size(value)


def _size(value: Value) -> float:
    size = value.type.size if value.type else 1
    return size * (LIST if value.domain > ROW else 1.0)


class _Choice:
    """Costs of all values in order; what is cheapest for those that are read is settled on the way."""

    def __init__(self, program: Program, read: Collection[int]) -> None:
        self.program = program
        self.read = set(read)
        self.kept: set[int] = set()
        # a product's operands and results lie in memory in any case, so that keeping them writes nothing more
        products = [x for x in program.values if x.op is matmul]
        self.written = {a for x in products for a in x.args} | {
            v for v, x in enumerate(program.values) if x.op is matmul
        }
        self.cost: list[float] = []
        self.recomputed: list[float] = []

    def add(self, v: int) -> None:
        value = self.program.values[v]
        again = 0.0
        if value.op is None:
            gathered = value.kind in ("arg", "list", "data") and v not in self.read
            self.cost.append(GATHER * _size(value) if gathered else 0.0)
            self.recomputed.append(self.cost[v])
            return
        if value.domain != SHARED:
            again = sum(self.cost[a] for a in set(value.args))
            again += 0.0 if value.op.view else arithmetic_cost(self.program, v)
        self.recomputed.append(again)
        if v in self.program.outputs:
            self.cost.append(0.0 if v in self.read else LOAD * _size(value))
            return
        self.cost.append(min(again, self._keeping(v)))
        if v in self.read:
            self._settle(v)

    def _keeping(self, v: int) -> float:
        if not is_keepable(self.program, v):
            return _NEVER
        return (HOLD + LOAD + (0.0 if v in self.written else STORE)) * _size(self.program.values[v])

    def _settle(self, v: int) -> None:
        """Value ``v`` is needed: keep it, or settle what it is computed from."""
        pending = [v]
        while pending:
            v = pending.pop()
            value = self.program.values[v]
            if self.cost[v] and value.op is not None and v not in self.program.outputs:
                if self._keeping(v) <= self.recomputed[v]:
                    self.kept.add(v)
                else:
                    pending += value.args
            self.cost[v] = 0.0
