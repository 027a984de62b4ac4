"""Where the values of a batch lie: which share the memory of another, and which are computed into a concatenation."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from dynbatch.compiler.ir import SHARED, Program
from dynbatch.compiler.kernel_body import resolve
from dynbatch.ops.shape import concatenate


class Placement:
    """How the values that a batch computes lie in memory.

    Arguments:
        program: any Program.
        skip: instructions that do not run with the batch.
        stored: values that have rows of their own.
        elsewhere: for values that must lie inside of a stored one: it, and the column.
        written: instructions that can write rows at any distance.

    Attributes:
        home: for each value, the one whose memory holds it, and at which column.
        stride: elements from one row of a value to the next.
        part_of: for values that are computed into a concatenation: it, and the column.
    """

    def __init__(
        self,
        program: Program,
        skip: Collection[int],
        stored: Collection[int],
        elsewhere: Mapping[int, tuple[int, int]],
        written: Collection[int],
    ) -> None:
        values = program.values
        self.home = [(v, 0) for v in range(len(values))]
        self.stride = [v.type.size if v.type else 1 for v in values]
        self.part_of: dict[int, tuple[int, int]] = {}
        for v, value in enumerate(values):
            if v in skip or value.op is None:
                continue
            if v not in stored:
                self.home[v] = resolve(program, v)
            if not is_vector_concatenation(program, v):
                continue
            column = 0
            for a in value.args:
                fits = a in written and a not in stored and elsewhere.get(a, (v, column)) == (v, column)
                if fits and a not in self.part_of and values[a].domain == value.domain:
                    self.part_of[a] = (v, column)
                    self.stride[a] = self.stride[v]
                column += values[a].type.size  # type: ignore[union-attr]


def is_vector_concatenation(program: Program, v: int) -> bool:
    """Whether value ``v`` puts vectors one after the other in each row."""
    return _concatenated_rank(program, v) == 1


def is_matrix_concatenation(program: Program, v: int) -> bool:
    """Whether value ``v`` puts matrices one below the other in each row."""
    return _concatenated_rank(program, v) == 2


def _concatenated_rank(program: Program, v: int) -> int:
    """The rank of what value ``v`` concatenates along the first dimension; 0 where it does not."""
    value = program.values[v]
    if value.op is not concatenate or value.domain == SHARED or dict(value.attrs)["dim"] != 0:
        return 0
    return len(value.type.shape)  # type: ignore[union-attr]
