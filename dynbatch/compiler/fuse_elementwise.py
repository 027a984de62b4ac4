"""Vertical fusion: which instructions run together in one kernel, and in which order everything runs.

A region is a set of instructions that loops over rows of one domain can compute: elementwise ones, reductions within a
row, and what is composed of those. Their extents fit each other. An instruction joins the open regions that it reads;
a region is closed, and runs, before anything outside of it that needs its results.
"""

from __future__ import annotations

from collections.abc import Iterable

from dynbatch.compiler.ir import Program
from dynbatch.compiler.lower import Extents, join, kernel_extents
from dynbatch.ops.shape import reshape


class Region:
    """Instructions of one kernel, in order.

    Attributes:
        domain: whose rows it runs over.
        extents: of its loops.
        members: value ids.
        outside: members that something outside of the region reads.
    """

    def __init__(self, domain: int, extents: Extents) -> None:
        self.domain = domain
        self.extents = extents
        self.members: list[int] = []
        self.outside: set[int] = set()


def fuse_elementwise(program: Program, skip: Iterable[int], stored: Iterable[int]) -> list[Region | int]:
    """The order in which a batch runs: regions, and ids of single instructions.

    Arguments:
        program: any Program.
        skip: instructions that do not run with the batch.
        stored: values that are needed after the batch.
    """
    fusion = _Fusion(program)
    skipped = set(skip)
    for v, value in enumerate(program.values):
        if value.op is not None and v not in skipped:
            fusion.add(v)
    fusion.close_all()
    fusion.mark_outside(skipped, set(stored))
    return fusion.schedule


class _Fusion:
    """Regions while they grow. What is open depends on nothing else that is open, so any two may become one."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.schedule: list[Region | int] = []
        self.open: list[Region] = []
        self.region_of: dict[int, Region] = {}

    def add(self, v: int) -> None:
        value = self.program.values[v]
        read = [r for r in self.open if any(self.region_of.get(a) is r for a in value.args)]
        extents = kernel_extents(self.program, v)
        if value.op is reshape and not read:
            extents = None  # of memory that is there already: nothing runs
        joined: list[Region] = []
        for region in read:
            both = join(extents, region.extents) if extents and region.domain == value.domain else None
            if both is None:
                self.close(region)
            else:
                extents = both
                joined.append(region)
        if extents is None:
            self.schedule.append(v)
            return
        joined += [r for r in self.open if r not in joined and (r.domain, r.extents) == (value.domain, extents)]
        region = self.merge(joined, Region(value.domain, extents))
        region.members.append(v)
        self.region_of[v] = region

    def merge(self, regions: list[Region], into: Region) -> Region:
        for region in regions:
            self.open.remove(region)
            into.members += region.members
        into.members.sort()
        self.region_of.update(dict.fromkeys(into.members, into))
        self.open.append(into)
        return into

    def close(self, region: Region) -> None:
        self.schedule.append(region)
        self.open.remove(region)

    def close_all(self) -> None:
        """Close what is left; regions of scalars run with a wider one where there is one."""
        for region in [r for r in self.open if r.extents == (1, 1)]:
            others = [r for r in self.open if r is not region and r.domain == region.domain]
            if others:
                self.merge([region, others[0]], Region(region.domain, others[0].extents))
        for region in list(self.open):
            self.close(region)

    def mark_outside(self, skipped: set[int], stored: set[int]) -> None:
        for v, value in enumerate(self.program.values):
            if v in skipped or value.op is None:
                continue
            for a in value.args:
                if a in self.region_of and self.region_of[a] is not self.region_of.get(v):
                    self._mark(a)
        for v in stored & set(self.region_of):
            self.region_of[v].outside.add(v)

    def _mark(self, v: int) -> None:
        """Value ``v`` is read from outside: where it lies in another value's memory, that one is."""
        value = self.program.values[v]
        while value.op is reshape and value.args[0] in self.region_of:
            v = value.args[0]
            value = self.program.values[v]
        self.region_of[v].outside.add(v)
