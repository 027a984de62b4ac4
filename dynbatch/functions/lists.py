"""Reductions of lists of expressions; lists of different lengths batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dynbatch.compiler.trace import Tracer
from dynbatch.errors import ShapeError, user_line
from dynbatch.graph import Expression, state
from dynbatch.ops import elementwise as ew
from dynbatch.ops import segment
from dynbatch.ops.record import (
    Op,
    as_expression,
    lane_count,
    record_rows,
    spread,
)


def _average(t: Tracer, x: int, ptr: int) -> int:
    total = t.emit(segment.segment_sum, x, ptr)
    return t.emit(ew.cdiv, total, t.emit(segment.segment_length, ptr, dtype=t.dtype))


_esum = Op("esum", lambda t, x, ptr: t.emit(segment.segment_sum, x, ptr))
_avg = Op("average", _average)
_emax = Op("emax", lambda t, x, ptr: t.emit(segment.segment_max, x, ptr))
_logsumexp = Op("logsumexp", lambda t, x, ptr: t.emit(segment.segment_logsumexp, x, ptr))


def _reduce_list(op: Op, exprs: Iterable[Any]) -> Expression:
    """One node over a list of any length; its elements are a segment of the batch."""
    operands = [e for e in exprs]  # noqa: C416  list() would ask a ragged list for its length
    if not operands:
        raise ShapeError(f"{user_line()}: {op.name}: the list is empty")
    if state.tracer is not None:
        return state.tracer.reduce_list(op, operands)
    operands = [as_expression(o) for o in operands]
    t = operands[0].type
    for position, operand in enumerate(operands):
        if operand.type is not t:
            if op is _esum:  # broadcasting, as `+` has it
                total = operands[0]
                for other in operands[1:]:
                    total = total + other
                return total
            raise ShapeError(
                f"{user_line()}: {op.name}: shapes differ: {t.shape} at position 0, "
                f"{operand.type.shape} at position {position}"
            )
    signature = op.table.get(t)
    if signature is None:
        tracer = Tracer(op.name, state.graph.dtype)
        x = tracer.new_list(t)
        signature = op.table[t] = tracer.signature((op.compose(tracer, x, tracer.ptr(tracer.values[x].domain)),))
    lanes = lane_count(op.name, operands)
    if lanes > 1:
        columns = [[len(operands)] * lanes, *(spread(o.vids, lanes) for o in operands)]
        return record_rows(signature, columns, (), lanes)
    graph = state.graph
    graph.record(signature, [len(operands), *[o.vid for o in operands]])
    return graph.add(signature.type)


def esum(exprs: Iterable[Any]) -> Expression:
    """Sum of a list of expressions; lists of different lengths batch. Different shapes broadcast as ``+`` does."""
    return _reduce_list(_esum, exprs)


def average(exprs: Iterable[Any]) -> Expression:
    """Mean of a list of expressions of one shape; lists of different lengths batch."""
    return _reduce_list(_avg, exprs)


def emax(exprs: Iterable[Any]) -> Expression:
    """Elementwise maximum of a list of expressions of one shape; lists of different lengths batch."""
    return _reduce_list(_emax, exprs)


def logsumexp(exprs: Iterable[Any]) -> Expression:
    """``log(sum(exp(...)))`` over a list of expressions of one shape, elementwise; different lengths batch."""
    return _reduce_list(_logsumexp, exprs)
