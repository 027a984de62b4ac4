"""Where the values of one signature lie: rows in the order they were computed, one column of memory a stored value."""

from __future__ import annotations

from typing import Any

import numpy as np

from dynbatch.compiler.multiply_tables import MOST_ROWS
from dynbatch.cpu.code import ForwardCode
from dynbatch.cpu.memory import Arena
from dynbatch.signature import Signature


class Segment:
    """Consecutive rows of one signature: where each stored value's row ``first_row`` lies."""

    __slots__ = ("bases", "end_row", "first_row", "kept")

    def __init__(self, first_row: int, end_row: int, bases: dict[int, int], kept: bool) -> None:
        self.first_row = first_row
        self.end_row = end_row
        self.bases = bases
        self.kept = kept


class Pools:
    """What a graph holds for one signature.

    Attributes:
        outputs: of each output the value in the forward Program, and the elements of a row.
        rows: how many have been computed.
        segments: where they lie, by first row; usually one.
        kept: whether all rows have the intermediates that the gradient reads.
        version: of the parameters that the rows were computed with; None before the first.
        tables_are_small: whether all lookup parameters have few rows; see `dynbatch.compiler.multiply_tables`.
    """

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.code: ForwardCode = signature.program.cache.get("code") or signature.program.cache.setdefault(
            "code", ForwardCode(signature.program)
        )
        self.outputs = [(v, self.code.width(v)) for v in self.code.outputs]
        self.rows = 0
        self.segments: list[Segment] = []
        self.kept = True
        self.version: Any = None
        self.tables_are_small = all(
            signature.binding[x.index].size <= MOST_ROWS for x in signature.program.values if x.kind == "table"
        )
        self.shapes = ", ".join(str(t.shape) for t in signature.types)

    def reserve(self, count: int, keep: bool, arena: Arena) -> Segment:
        """Room for ``count`` more rows, all in one segment."""
        last = self.segments[-1] if self.segments else None
        if last is None or last.kept != keep or last.end_row < self.rows + count:
            # past the first plan, grow so that many small plans still make long runs of rows
            capacity = count if last is None else max(count, self.rows)
            if last is not None:
                last.end_row = self.rows  # what is left of it is not used: rows from here on lie in the new segment
            code = self.code
            bases = {v: arena.allocate(capacity * code.width(v)) for v in code.stored[keep]}
            last = Segment(self.rows, self.rows + capacity, bases, keep)
            self.segments.append(last)
        return last

    def find(self, row: int, end: int) -> Segment | None:
        """The segment that holds rows ``row`` to ``end`` (exclusive), if a single one does."""
        for segment in reversed(self.segments):
            if segment.first_row <= row:
                return segment if end <= segment.end_row else None
        return None

    def destination(self, row: int, count: int) -> dict[int, int]:
        """Where the stored values of new rows go, which `reserve` has made room for."""
        segment = self.find(row, row + count)
        assert segment is not None
        at = row - segment.first_row
        return {v: base + at * self.code.width(v) for v, base in segment.bases.items()}

    def place(self, v: int, row: int, count: int) -> int:
        """Location of a stored value of rows that follow each other; -1 where they lie in several segments."""
        segment = self.find(row, row + count)
        return -1 if segment is None else segment.bases[v] + (row - segment.first_row) * self.code.width(v)

    def locate(self, v: int, rows: np.ndarray) -> np.ndarray:
        """Location of stored value ``v`` of each row."""
        width = self.code.width(v)
        firsts = np.array([s.first_row for s in self.segments])
        bases = np.array([s.bases.get(v, -1) for s in self.segments])
        which = np.searchsorted(firsts, rows, side="right") - 1
        return bases[which] + (rows - firsts[which]) * width
