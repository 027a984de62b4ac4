"""Rows of lookup parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dynbatch.errors import user_line
from dynbatch.functions.arguments import payload_index, payload_indices, simple_op
from dynbatch.graph import Expression, state
from dynbatch.ops import indexing

_lookup = simple_op(indexing.lookup)


def lookup(p: Any, index: int = 0, update: bool = True) -> Expression:
    """Row ``index`` of a lookup parameter.

    Arguments:
        p: a `LookupParameter`.
        index: 0 to size - 1; negative ones count from the end. Payload: different rows batch.
        update: False: the rows receive no gradient from here.

    Raises:
        IndexRangeError: names the index, the size and the parameter.
    """
    if not getattr(p, "is_lookup", False):
        raise TypeError(f"{user_line()}: lookup: expected a LookupParameter, not {type(p).__name__}")
    if not update:
        p = p.constant
    if type(index) is not int or not 0 <= index < p.size:
        index = payload_index("lookup", index, p.size, f"lookup parameter {p.name}")
    if state.tracer is not None:
        return _lookup.trace((p,), (index,))
    return _row(p, index)


def _row(p: Any, index: int) -> Expression:
    """Record the look-up of a row that is there."""
    signature = p.lookup_signature
    if signature is None:
        signature = p.lookup_signature = _lookup.find((p,), 1, 0)
    graph = state.graph
    at = graph.begin(signature, 1)
    graph.words.at[at] = index
    return graph.end(at + 1, signature.type)


def lookup_batch(p: Any, indices: Iterable[int], update: bool = True) -> Expression:
    """Rows of a lookup parameter as batch elements; see `lookup`."""
    if not getattr(p, "is_lookup", False):
        raise TypeError(f"{user_line()}: lookup_batch: expected a LookupParameter, not {type(p).__name__}")
    if not update:
        p = p.constant
    return _lookup.lanes((p,), (payload_indices("lookup_batch", indices, p.size, f"lookup parameter {p.name}"),))
