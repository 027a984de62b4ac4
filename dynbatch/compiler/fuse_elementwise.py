"""Vertical fusion: which instructions run together in one kernel, and in which order everything runs.

A region is a set of elementwise instructions over rows of one domain and one number of elements. An instruction
joins the open region of its kind; a region is closed, and runs, before anything outside of it that needs its results.
"""

from __future__ import annotations

from collections.abc import Iterable

from dynbatch.compiler.ir import SHARED, Program, Value
from dynbatch.ops.elementwise import constant
from dynbatch.ops.primitive import Elementwise


class Region:
    """Instructions of one kernel, in order.

    Attributes:
        domain: whose rows it runs over.
        size: elements in a row.
        members: value ids.
        outside: members that something outside of the region reads.
    """

    def __init__(self, domain: int, size: int) -> None:
        self.domain = domain
        self.size = size
        self.members: list[int] = []
        self.outside: set[int] = set()


def is_fusible(program: Program, v: int) -> bool:
    """Whether value ``v`` is an elementwise instruction whose operands are rows like its own, scalars, or shared."""
    value = program.values[v]
    if not isinstance(value.op, Elementwise) or value.domain == SHARED:
        return False
    return all(_fits(program.values[a], value) for a in value.args)


def _fits(operand: Value, result: Value) -> bool:
    if operand.type is None or result.type is None:
        return False
    if operand.op is constant:
        return True
    if operand.domain not in (SHARED, result.domain):
        return False
    return operand.type.size == 1 or operand.type.shape == result.type.shape


def fuse_elementwise(program: Program, skip: Iterable[int], stored: Iterable[int]) -> list[Region | int]:
    """The order in which a batch runs: regions, and ids of single instructions.

    Arguments:
        program: any Program.
        skip: instructions that do not run with the batch.
        stored: values that are needed after the batch.
    """
    skipped = set(skip)
    stored = set(stored)
    schedule: list[Region | int] = []
    open_regions: dict[tuple[int, int], Region] = {}
    region_of: dict[int, Region] = {}

    def close(region: Region) -> None:
        schedule.append(region)
        del open_regions[region.domain, region.size]

    for v, value in enumerate(program.values):
        if value.op is None or v in skipped:
            continue
        fusible = is_fusible(program, v)
        key = (value.domain, value.type.size if value.type else 0)
        for a in value.args:
            region = region_of.get(a)
            if region is None:
                continue
            kind = (region.domain, region.size)
            is_open = open_regions.get(kind) is region
            if not (fusible and is_open and kind == key):
                region.outside.add(a)
                if is_open:
                    close(region)
        if fusible:
            region = open_regions.setdefault(key, Region(*key))
            region.members.append(v)
            region_of[v] = region
        else:
            schedule.append(v)
    for region in list(open_regions.values()):
        close(region)
    for v in stored:
        if v in region_of:
            region_of[v].outside.add(v)
    return schedule
