"""Ops that make expressions of numbers: inputs, constants, parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynbatch.compiler.trace import Tracer
from dynbatch.errors import DynbatchError, ShapeError, user_line
from dynbatch.functions.arguments import Dim, dims_of
from dynbatch.graph import Expression, state
from dynbatch.ops import elementwise as ew
from dynbatch.ops import shape
from dynbatch.ops.record import (
    Op,
    described,
    record_rows,
)
from dynbatch.types import type_of

_scalar_input = Op("scalarInput", lambda t, x: t.emit(shape.reshape, x, shape=(1,)))
_constant = Op("constant", lambda t, value, dims: t.emit(ew.broadcast_to, value, shape=dims))
_zeros = Op("zeros", lambda t, dims: t.constant(0.0, dims))
_ones = Op("ones", lambda t, dims: t.constant(1.0, dims))
_data_signatures: dict[Any, Any] = {}


def scalarInput(s: float) -> Expression:
    """A number as a scalar expression; it is payload, so that different numbers batch."""
    return _scalar_input((), (), (s,))


def inputVector(v: Sequence[float]) -> Expression:
    """A vector given by the user.

    Arguments:
        v: floats, or a one-dimensional array; copied.
    """
    return inputTensor(v)


def inputTensor(arr: Any, batched: bool = False, device: str = "") -> Expression:
    """An array given by the user, copied.

    Arguments:
        arr: anything that NumPy takes for an array.
        batched: the last dimension counts batch elements.
        device: ignored; for DyNet's signature.
    """
    import numpy as np

    if state.tracer is not None:
        raise described(DynbatchError("make inputs outside of the cell and pass them as arguments"), "inputTensor", ())
    graph = state.graph
    try:
        values = np.asarray(arr, dtype=graph.dtype)
    except (TypeError, ValueError) as error:
        raise ShapeError(f"{user_line()}: inputTensor: not an array of numbers: {error}") from None
    if batched and values.ndim == 0:
        raise ShapeError(f"{user_line()}: inputTensor: a batched input needs a last dimension for the batch")
    lanes = values.shape[-1] if batched else 1
    dims = dims_of("inputTensor", values.shape[:-1] if batched else values.shape)
    t = type_of(dims, graph.dtype)
    signature = _data_signatures.get(t)
    if signature is None:
        tracer = Tracer("input", graph.dtype)
        signature = _data_signatures[t] = tracer.signature((tracer.new_data(t),))
    start = len(graph.data)
    graph.data.frombytes(values.T.tobytes())  # storage order: the user's array, reversed
    return record_rows(signature, (range(start, start + lanes * t.size, t.size),), (), lanes)


def zeros(dim: Dim) -> Expression:
    """Zeros of the given shape."""
    return _zeros((), static=(dims_of("zeros", dim),))


def ones(dim: Dim) -> Expression:
    """Ones of the given shape."""
    return _ones((), static=(dims_of("ones", dim),))


def constant(dim: Dim, val: float) -> Expression:
    """One number everywhere in the given shape; the number is payload."""
    return _constant((), (), (val,), (dims_of("constant", dim),))


def parameter(p: Any, update: bool = True) -> Any:
    """The parameter for use in ops. Parameters can be used directly; this is DyNet's name for it.

    Arguments:
        p: a parameter.
        update: False gives a view of it that receives no gradient.
    """
    if not getattr(p, "is_parameter", False) or p.is_lookup:
        raise TypeError(f"{user_line()}: parameter: expected a Parameter, not {type(p).__name__}")
    return p if update else p.constant


def const_parameter(p: Any) -> Any:
    """The parameter as a constant: it receives no gradient from where this is used."""
    return parameter(p, update=False)
