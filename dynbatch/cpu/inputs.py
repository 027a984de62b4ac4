"""Filling a frame: a batch's operands, payload and parameters, and what depends on parameters alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from dynbatch.batching.plan import Tables
from dynbatch.cpu.gather import gather_from
from dynbatch.cpu.memory import Arena
from dynbatch.cpu.routine import Frame, Routine
from dynbatch.signature import Signature


def load_inputs(frame: Frame, tables: Tables, b: int, signature: Signature, data: np.ndarray) -> None:
    """Fill in the inputs of batch ``b``; ``data`` holds the values that the user gave."""
    routine = frame.routine
    for v, value in routine.inputs:
        kind, index = value.kind, value.index
        if kind == "arg":
            where, run = tables.arg_column(b, index)
            if run:
                frame.location[v] = int(where[0])
            frame.index[v] = where
        elif kind == "list":
            _, where, run = tables.list_segments(b, index)
            frame.elements[value.domain] = where.size
            if run and where.size:
                frame.location[v] = int(where[0])
            frame.index[v] = where
        elif kind == "ptr":
            lists = [k for k, g in signature.program.groups.items() if g == index]
            frame.arrays[v], where, _ = tables.list_segments(b, lists[0])
            frame.elements[index] = where.size
        elif kind == "int":
            frame.arrays[v] = tables.int_column(b, index)
        elif kind == "float":
            frame.arrays[v] = tables.float_column(b, index).astype(frame.arena.mem.dtype)[:, None]
        elif kind == "data":
            assert value.type is not None
            start = frame.arena.scratch(frame.rows * value.type.size)
            gather_from(data, tables.int_column(b, index), value.type.size, frame.arena.mem, start)
            frame.location[v] = start
        elif kind == "slot":
            frame.arrays[v] = signature.binding[index].data[None]
        elif kind == "table":
            frame.arrays[v] = signature.binding[index].data
    for v, array in shared_values(routine, signature, frame.arena).items():
        frame.arrays[v] = array


def shared_values(routine: Routine, signature: Signature, arena: Arena) -> dict[int, Any]:
    """What the routine needs that depends on parameters alone, computed once a parameter version."""
    if not routine.shared_values and not routine.forward_shared:
        return {}
    version = tuple(p.root.version for p in signature.binding)
    known = signature.cache.get(routine)
    if known is None or known[0] != version:
        frame = Frame(routine, arena, 1)
        for v, value in enumerate(routine.program.values):
            if value.kind == "slot":
                frame.arrays[v] = signature.binding[value.index].data[None]
        forward = routine.forward_shared
        if forward:
            source = shared_values(forward[0], signature, arena)
            for v, index in forward[1]:
                frame.arrays[v] = source[index]
        for step in routine.shared:
            step(frame)
        found = {v: frame.arrays[v] for v in routine.shared_values}
        if forward:
            found.update((v, frame.arrays[v]) for v, _ in forward[1])
        known = signature.cache[routine] = (version, found)
    return known[1]
