"""Concatenation, reshaping and indexing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dynbatch.errors import IndexRangeError, ShapeError, user_line
from dynbatch.functions.arguments import Dim, dims_of, payload_index, payload_indices
from dynbatch.graph import Expression
from dynbatch.ops import indexing, shape
from dynbatch.ops.record import (
    Op,
    as_operand,
)

_concatenate: dict[int, Op] = {}  # by dimension
_reshape = Op("reshape", lambda t, x, dims: t.emit(shape.reshape, x, shape=dims))
_pick = Op("pick", lambda t, x, index, dim: t.emit(indexing.pick, x, index, dim=dim))
_pick_range = Op(
    "pick_range", lambda t, x, start, stop, dim: t.emit(shape.pick_range, x, start=start, stop=stop, dim=dim)
)
_select = Op("select", lambda t, x, *rest: t.emit(indexing.select, x, *rest[:-1], dim=rest[-1]))


def concatenate(exprs: Iterable[Any], d: int = 0) -> Expression:
    """Expressions one after the other along dimension ``d``; the other dimensions must agree."""
    operands = list(exprs)
    if not operands:
        raise ShapeError(f"{user_line()}: concatenate: the list is empty")
    op = _concatenate.get(d)
    if op is None:
        op = _concatenate[d] = Op("concatenate", lambda t, *values: t.emit(shape.concatenate, *values, dim=int(d)))
    return op.binary(*operands) if len(operands) == 2 else op.several(operands)


def concatenate_cols(exprs: Iterable[Any]) -> Expression:
    """Expressions side by side: vectors become the columns of a matrix."""
    operands = list(exprs)
    if not operands:
        raise ShapeError(f"{user_line()}: concatenate_cols: the list is empty")
    return concatenate(operands, 1)


def reshape(x: Any, d: Dim) -> Expression:
    """The same elements in another shape, in column-major order."""
    return _reshape((as_operand(x),), static=(dims_of("reshape", d),))


def pick(x: Any, index: Any = 0, dim: int = 0) -> Expression:
    """The element (of a vector) or slice at ``index`` along a dimension, which disappears.

    The index is payload, so that different indices batch; a list gives each batch element its own.

    Raises:
        IndexRangeError: outside of the dimension.
    """
    x = as_operand(x)
    if isinstance(index, Iterable):
        return pick_batch(x, index, dim)
    if not 0 <= dim < len(x.type.shape):
        raise ShapeError(f"{user_line()}: pick: dimension {dim} of shape {x.type.shape} does not exist")
    return _pick((x,), (payload_index("pick", index, x.type.shape[dim], f"dimension {dim}"),), (), (dim,))


def pick_batch(x: Any, indices: Iterable[int], dim: int = 0) -> Expression:
    """`pick` with an index for each batch element."""
    x = as_operand(x)
    if not 0 <= dim < len(x.type.shape):
        raise ShapeError(f"{user_line()}: pick_batch: dimension {dim} of shape {x.type.shape} does not exist")
    return _pick.lanes(
        (x,), (payload_indices("pick_batch", indices, x.type.shape[dim], f"dimension {dim}"),), (), (dim,)
    )


def pick_range(x: Any, start: int, stop: int, d: int = 0) -> Expression:
    """Elements ``start`` to ``stop`` (exclusive) along dimension ``d``; part of the structure, not payload."""
    return _pick_range((as_operand(x),), static=(int(start), int(stop), int(d)))


def select_rows(x: Any, rows: Iterable[int]) -> Expression:
    """The given rows of a matrix (or elements of a vector), in the given order; the indices are payload."""
    return _select_along("select_rows", x, rows, 0)


def select_cols(x: Any, cols: Iterable[int]) -> Expression:
    """The given columns of a matrix, in the given order; the indices are payload."""
    return _select_along("select_cols", x, cols, 1)


def _select_along(name: str, x: Any, indices: Iterable[int], dim: int) -> Expression:
    x = as_operand(x)
    if dim >= len(x.type.shape):
        raise ShapeError(f"{user_line()}: {name}: shape {x.type.shape} has no dimension {dim}")
    checked = tuple(payload_index(name, i, x.type.shape[dim], f"dimension {dim}") for i in indices)
    if not checked:
        raise ShapeError(f"{user_line()}: {name}: the list of indices is empty")
    return _select((x,), checked, (), (dim,))


def get_item(x: Any, index: Any) -> Expression:
    """``x[index]`` along the first dimension: an int picks, a slice gives a range, a list selects."""
    if isinstance(index, slice):
        size = x.type.shape[0]
        if any(getattr(i, "is_payload", False) for i in (index.start, index.stop, index.step)):
            raise TypeError(f"{user_line()}: the bounds of a slice are structure; declare them static in the cell")
        start, stop, step = index.indices(size)
        if step != 1:
            return select_rows(x, range(start, stop, step))
        if stop <= start:
            raise IndexRangeError(f"{user_line()}: the slice {start}:{stop} of shape {x.type.shape} is empty")
        return pick_range(x, start, stop)
    if isinstance(index, (list, range)) or (hasattr(index, "ndim") and index.ndim == 1):
        return select_rows(x, index)
    if isinstance(index, tuple):
        raise TypeError(f"{user_line()}: index one dimension at a time; pick(x, i, dim) takes another dimension")
    return pick(x, index)
