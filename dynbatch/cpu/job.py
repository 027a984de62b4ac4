"""One batch to run: where its operands, payload and kept values are, and where its results go."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from dynbatch.cpu.gather import gather, sum_edges
from dynbatch.cpu.memory import Arena
from dynbatch.signature import Signature

if TYPE_CHECKING:
    from dynbatch.batching.plan import Tables
    from dynbatch.cpu.pools import Pools


class Job:
    """A batch of a forward plan.

    Attributes:
        arena: where values lie.
        tables, b: index tables of the plan, and which batch of it this is.
        signature: whose nodes the batch holds.
        rows: how many.
        data: values given by the user.
        destination: where the rows of each stored value go.
        gathered: elements copied to bring operands together, counted by who copies.
        viewed: elements of operands that lay together and were not copied.
        tier: which ran it, ``numpy`` or ``compiled``.
    """

    __slots__ = ("arena", "b", "data", "destination", "gathered", "rows", "signature", "tables", "tier", "viewed")

    def __init__(
        self,
        arena: Arena,
        tables: Tables,
        b: int,
        signature: Signature,
        rows: int,
        data: np.ndarray,
        destination: dict[int, int],
    ) -> None:
        self.arena = arena
        self.tables = tables
        self.b = b
        self.signature = signature
        self.rows = rows
        self.data = data
        self.destination = destination
        self.gathered = self.viewed = 0
        self.tier = "numpy"

    def operand(self, index: int, storage: tuple[int, ...]) -> np.ndarray:
        """Rows of an argument as an array; a single one where the whole batch has the same."""
        width = math.prod(storage)
        where, run = self.tables.arg_column(self.b, index)
        one = self.tables.is_one(self.b, index)
        if one or (run and where.size):
            start = int(where[0])
            self.viewed += where.size * width
        else:
            start = self.arena.scratch(where.size * width)
            gather(self.arena.mem, where, 0, width, start, width)
            self.gathered += where.size * width
        return self.arena.view(start, (1 if one else where.size, *storage))

    def kept(self, v: int) -> int:
        """Location of forward value ``v`` of these rows, which follow each other (gradients only)."""
        raise NotImplementedError

    def pull(self, v: int, output: int, width: int) -> int:
        """Location of the gradient of an output, for gradient value ``v`` (gradients only)."""
        raise NotImplementedError


class Edges:
    """Where consumers leave gradients: the stream positions of each value's uses, and a location for each position."""

    __slots__ = ("edges", "location", "ptr")

    def __init__(self, ptr: np.ndarray, edges: np.ndarray, location: np.ndarray) -> None:
        self.ptr = ptr
        self.edges = edges
        self.location = location


class BackwardJob(Job):
    """A batch of a backward plan.

    Attributes:
        pools: where the forward values are.
        nodes_row: each node's row there.
        run: whether the rows follow each other.
        first: id of each node's first output.
        edges: see `Edges`.
    """

    __slots__ = ("edges", "first", "nodes_row", "pools", "run")

    pools: Pools
    nodes_row: np.ndarray
    run: bool
    first: np.ndarray
    edges: Edges

    def kept(self, v: int) -> int:
        """A place in the pool where the rows follow each other there, else a gathered copy."""
        width = self.pools.code.width(v)
        place = self.pools.place(v, int(self.nodes_row[0]), self.rows) if self.run else -1
        if place >= 0:
            return place
        location = self.arena.scratch(self.rows * width)
        gather(self.arena.mem, self.pools.locate(v, self.nodes_row), 0, width, location, width)
        self.gathered += self.rows * width
        return location

    def pull(self, v: int, output: int, width: int) -> int:
        """The sum of what the output's consumers left on their edges; one edge each, in a run, is not copied."""
        e, mem = self.edges, self.arena.mem
        start = self.destination.get(v, -1)
        if start < 0:
            start = sum_edges(mem, self.first, output, e.ptr, e.edges, e.location, width, -1)
            if start >= 0:
                return start
            start = self.arena.scratch(self.rows * width)
        return sum_edges(mem, self.first, output, e.ptr, e.edges, e.location, width, start)
