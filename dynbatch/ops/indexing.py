"""Ops that choose by an integer payload: rows of a lookup parameter, elements, selections."""

from __future__ import annotations

from typing import Any

import numpy as np

from dynbatch.compiler.ir import Builder
from dynbatch.ops.elementwise import at_place, to_float
from dynbatch.ops.primitive import Array, Indexed, Primitive
from dynbatch.ops.shape import axis_of, check_dim
from dynbatch.types import Type, type_of


class Lookup(Primitive):
    """Row ``index`` of a lookup parameter."""

    name = "lookup"
    writes_out = True

    def infer(self, table: Type, index: None) -> Type:
        return table

    def numpy(self, table: Array, index: Array, out: Array | None = None) -> Array:  # type: ignore[override]
        # indices are checked when they are recorded; "clip" only saves NumPy's second check (and a buffer)
        return np.take(table, index, axis=0, out=out, mode="clip")

    def vjp(self, b: Builder, args: tuple[int, ...], out: int, dout: int) -> list[int | None]:  # type: ignore[override]
        return [b.emit(lookup_rows, args[1], dout), None]


class LookupRows(Primitive):
    """The gradient of `Lookup` for a batch: the pair (indices, gradients of the rows)."""

    name = "lookup_rows"
    reduces = "rows"

    def infer(self, index: None, dout: Type) -> Type:
        return dout

    def numpy(self, index: Array, dout: Array) -> Any:  # type: ignore[override]
        return index, dout


class Select(Primitive):
    """Elements at the payload indices along a dimension, in their order (repeats allowed)."""

    name = "select"

    def infer(self, x: Type, *indices: None, dim: int) -> Type:
        check_dim(self.name, x, dim)
        return type_of((*x.shape[:dim], len(indices), *x.shape[dim + 1 :]), x.dtype)

    def numpy(self, x: Array, *indices: Array, dim: int) -> Array:  # type: ignore[override]
        rows = np.arange(indices[0].shape[0])[:, None]
        if x.shape[0] == 1:
            rows = np.zeros_like(rows)
        moved = np.moveaxis(x, axis_of(x, dim), 1)
        return np.moveaxis(moved[rows, np.stack(indices, axis=1)], 1, axis_of(x, dim))

    def vjp(self, b: Builder, args: tuple[int, ...], out: int, dout: int, dim: int) -> list[int | None]:  # type: ignore[override]
        size = b.type(args[0]).shape[dim]
        return [b.emit(select_gradient, dout, *args[1:], size=size, dim=dim)] + [None] * (len(args) - 1)


class SelectGradient(Primitive):
    """The gradient of `Select`: zeros with the operand added at the indices."""

    name = "select_d"

    def infer(self, x: Type, *indices: None, size: int, dim: int) -> Type:
        return type_of((*x.shape[:dim], size, *x.shape[dim + 1 :]), x.dtype)

    def numpy(self, x: Array, *indices: Array, size: int, dim: int) -> Array:  # type: ignore[override]
        axis = axis_of(x, dim)
        shape = list(x.shape)
        shape[axis] = size
        result = np.zeros(shape, x.dtype)
        moved, source = np.moveaxis(result, axis, 1), np.moveaxis(x, axis, 1)
        rows = np.arange(x.shape[0])
        for k, index in enumerate(indices):  # a loop over the selection, not over nodes: repeats must add up
            moved[rows, index] += source[:, k]
        return result

    def lower(self, b: Builder, args: tuple[int, ...], size: int, dim: int) -> int | None:  # type: ignore[override]
        x, *indices = args
        if len(indices) > 1:
            return None
        type = b.type(x)
        shape, dtype = (*type.shape[:dim], size, *type.shape[dim + 1 :]), type.dtype.name
        index = b.emit(to_float, indices[0], dtype=dtype)
        return b.emit(at_place, b.emit(place, shape=shape, dim=dim, dtype=dtype), index, x)


class Place(Indexed):
    """The place of each element along a dimension, counted from zero; exact below 2**24."""

    name = "place"
    formula = "along"

    def infer(self, shape: tuple[int, ...], dim: int, dtype: str) -> Type:
        return type_of(shape, dtype)

    def numpy(self, shape: tuple[int, ...], dim: int, dtype: str) -> Array:  # type: ignore[override]
        along = np.arange(shape[dim], dtype=dtype).reshape(-1, *[1] * dim)
        return np.broadcast_to(along, (1, *shape[::-1]))


class Element(Primitive):
    """The element of a vector at an index, without a gradient: what `Pick` is lowered to."""

    name = "element"
    is_block = True

    def infer(self, x: Type, index: None) -> Type:
        return type_of((1,), x.dtype)

    def numpy(self, x: Array, index: Array) -> Array:  # type: ignore[override]
        return np.take_along_axis(np.broadcast_to(x, (index.size, x.shape[1])), index[:, None], axis=1)


class Pick(Primitive):
    """The element (or the slice) at one payload index along a dimension, which disappears."""

    name = "pick"

    def infer(self, x: Type, index: None, dim: int) -> Type:
        check_dim(self.name, x, dim)
        return type_of(x.shape[:dim] + x.shape[dim + 1 :], x.dtype)

    def numpy(self, x: Array, index: Array, dim: int) -> Array:  # type: ignore[override]
        moved = np.moveaxis(x, axis_of(x, dim), 1)
        rows = np.arange(index.shape[0]) if x.shape[0] != 1 else np.zeros(index.shape[0], np.int64)
        chosen = moved[rows, index]
        return chosen if chosen.ndim > 1 else chosen[:, None]

    def lower(self, b: Builder, args: tuple[int, ...], dim: int) -> int | None:  # type: ignore[override]
        return b.emit(element, *args) if len(b.type(args[0]).shape) == 1 else None

    def vjp(self, b: Builder, args: tuple[int, ...], out: int, dout: int, dim: int) -> list[int | None]:  # type: ignore[override]
        from dynbatch.ops.shape import reshape

        shape = b.type(args[0]).shape
        kept = b.emit(reshape, dout, shape=(*shape[:dim], 1, *shape[dim + 1 :]))
        return [b.emit(select_gradient, kept, args[1], size=shape[dim], dim=dim), None]


lookup = Lookup()
lookup_rows = LookupRows()
place = Place()
element = Element()
select = Select()
select_gradient = SelectGradient()
pick = Pick()
