"""Interned types: the shape and dtype of one instance's value, without a batch dimension.

Two types with the same shape and dtype are the same object, so that a type can be a dictionary key
that costs one pointer comparison. Values are stored column-major, as in DyNet: in NumPy terms an
instance of shape ``(m, n)`` is a C-ordered array of shape ``(n, m)``, which makes a reshape free, keeps
columns contiguous, and turns DyNet's left-aligned broadcasting into NumPy's.
"""

from __future__ import annotations

import math

import numpy as np


class Type:
    """Shape and dtype of one instance's value; made by `type_of`, compared by identity.

    Attributes:
        shape: the user's shape, at least one dimension; a scalar is ``(1,)``.
        dtype: ``float32`` or ``float64``.
        size: number of elements.
        storage: the shape of the C-ordered array that holds one value: ``shape`` reversed.
    """

    __slots__ = ("dtype", "shape", "size", "storage")

    shape: tuple[int, ...]
    dtype: np.dtype
    size: int
    storage: tuple[int, ...]

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.shape = shape
        self.dtype = dtype
        self.size = math.prod(shape)
        self.storage = shape[::-1]

    def __repr__(self) -> str:
        return f"{self.dtype.name}{list(self.shape)}"

    def __reduce__(self) -> tuple[object, ...]:
        return type_of, (self.shape, self.dtype)


_interned: dict[tuple[tuple[int, ...], np.dtype], Type] = {}


def type_of(shape: int | tuple[int, ...], dtype: object = "float32") -> Type:
    """The one `Type` with this shape and dtype.

    Arguments:
        shape: an int or a tuple of positive ints; ``()`` means a scalar and becomes ``(1,)``.
        dtype: anything that NumPy takes for float32 or float64.

    Raises:
        ValueError: a dimension is not a positive int, or the dtype is not a float32 or float64.
    """
    if isinstance(shape, (int, np.integer)):
        shape = (int(shape),)
    key = (tuple(shape), np.dtype(dtype))  # type: ignore[call-overload]
    found = _interned.get(key)
    if found is None:
        dims = tuple(int(d) for d in key[0]) or (1,)
        if any(d <= 0 for d in dims):
            raise ValueError(f"a shape needs positive dimensions, not {key[0]}")
        if key[1].name not in ("float32", "float64"):
            raise ValueError(f"dtype must be float32 or float64, not {key[1].name}")
        found = _interned.setdefault((dims, key[1]), Type(dims, key[1]))
        _interned[key] = found
    return found
