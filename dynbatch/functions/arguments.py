"""What users give to ops: checked, and turned into operands and payload."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dynbatch.errors import ShapeError, user_line
from dynbatch.graph import Operand
from dynbatch.ops.record import (
    Lanes,
    Op,
    checked_index,
)

Dim = int | Sequence[int]


def is_number(x: Any) -> bool:
    """Whether ``x`` is a number, or stands for one in a trace."""
    return not isinstance(x, Operand) and (hasattr(x, "__float__") or getattr(x, "is_payload", False))


def dims_of(name: str, dim: Dim) -> tuple[int, ...]:
    """A shape as a tuple; raises `ShapeError` unless all dimensions are positive."""
    dims = (int(dim),) if hasattr(dim, "__index__") else tuple(int(d) for d in dim)
    dims = dims or (1,)
    if any(d <= 0 for d in dims):
        raise ShapeError(f"{user_line()}: {name}: dimensions must be positive, not {dims}")
    return dims


def payload_index(name: str, index: Any, size: int, what: str) -> Any:
    """A payload index, checked; negative ones count from the end. In a trace it is checked at each call."""
    if getattr(index, "is_payload", False):
        index.tracer.bounds.append((index.tracer.values[index.value_id].index, size, name, what))
        return index
    return checked_index(name, index, size, what)


def payload_indices(name: str, indices: Iterable[Any], size: int, what: str) -> Lanes:
    """An index for each batch element, checked."""
    checked = Lanes(payload_index(name, i, size, what) for i in indices)
    if not checked:
        raise ShapeError(f"{user_line()}: {name}: the list of indices is empty")
    return checked


def simple_op(primitive: Any, name: str | None = None, **attrs: Any) -> Op:
    """An op that is one primitive."""
    return Op(name or primitive.name, lambda t, *values: t.emit(primitive, *values, **attrs))
