"""Manual batch elements, as DyNet has them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dynbatch.errors import ShapeError, user_line
from dynbatch.functions.arguments import payload_index
from dynbatch.functions.lists import esum
from dynbatch.graph import Expression, handle, state
from dynbatch.ops.record import (
    as_expression,
)


def sum_batches(x: Any) -> Expression:
    """Sum over the batch elements."""
    x = as_expression(x)
    return esum([handle(x.graph, (vid,), x.type) for vid in x.vids])


def pick_batch_elem(x: Any, i: int) -> Expression:
    """Batch element ``i``."""
    x = as_expression(x)
    return handle(x.graph, (x.vids[payload_index("pick_batch_elem", i, len(x.vids), "the batch")],), x.type)


def pick_batch_elems(x: Any, indices: Iterable[int]) -> Expression:
    """Several batch elements, as a batch."""
    x = as_expression(x)
    chosen = [x.vids[payload_index("pick_batch_elems", i, len(x.vids), "the batch")] for i in indices]
    if not chosen:
        raise ShapeError(f"{user_line()}: pick_batch_elems: the list of indices is empty")
    return handle(x.graph, chosen, x.type)


def concatenate_to_batch(exprs: Iterable[Any]) -> Expression:
    """Expressions of one shape as the batch elements of one."""
    operands = [as_expression(e) for e in exprs]
    if not operands:
        raise ShapeError(f"{user_line()}: concatenate_to_batch: the list is empty")
    if any(o.type is not operands[0].type for o in operands):
        shapes = ", ".join(str(o.type.shape) for o in operands)
        raise ShapeError(f"{user_line()}: concatenate_to_batch: shapes differ: {shapes}")
    return handle(state.graph, [vid for o in operands for vid in o.vids], operands[0].type)
