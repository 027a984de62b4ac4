"""The softmax family and losses over scores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dynbatch.compiler.trace import Tracer
from dynbatch.errors import ShapeError
from dynbatch.functions.arguments import payload_index, payload_indices, simple_op
from dynbatch.functions.inputs import inputTensor
from dynbatch.functions.reductions import emit_sum
from dynbatch.graph import Expression
from dynbatch.ops import elementwise as ew
from dynbatch.ops import indexing
from dynbatch.ops import softmax as softmaxes
from dynbatch.ops.record import (
    Op,
    as_operand,
)


def _emit_hinge(t: Tracer, x: int, index: int, margin: int) -> int:
    if len(t.type(x).shape) != 1:
        raise ShapeError(f"hinge: expected a vector of scores, not shape {t.type(x).shape}")
    chosen = t.emit(indexing.pick, x, index, dim=0)
    losses = t.emit(ew.rectify, t.emit(ew.add, t.emit(ew.subtract, x, chosen), margin))
    return t.emit(ew.subtract, emit_sum(t, losses), t.emit(ew.rectify, margin))  # the term of the index itself


_softmax = Op("softmax", lambda t, x, dim: t.emit(softmaxes.softmax, x, dim=dim))
_log_softmax = Op("log_softmax", lambda t, x, dim: t.emit(softmaxes.log_softmax, x, dim=dim))
_pickneglogsoftmax = simple_op(softmaxes.pick_neg_log_softmax)
_hinge = Op("hinge", _emit_hinge)


def softmax(x: Any, d: int = 0) -> Expression:
    """Softmax along dimension ``d`` (of each column, by default). Entries of minus infinity become zero.

    A fully masked softmax is all zeros; in debug mode it is a `ValidityError`.
    """
    return _softmax((as_operand(x),), static=(int(d),))


def log_softmax(x: Any, restrict: Sequence[int] | None = None, d: int = 0) -> Expression:
    """Logarithm of the softmax along dimension ``d``. Entries of minus infinity stay so.

    Arguments:
        x: scores.
        restrict: indices (along the first dimension) that take part; the others become minus infinity.
        d: the dimension.
    """
    x = as_operand(x)
    if restrict is not None:
        import numpy as np

        mask = np.full(x.type.shape, -np.inf)
        mask[[payload_index("log_softmax", i, x.type.shape[0], "the scores") for i in restrict]] = 0
        x = x + inputTensor(mask)
    return _log_softmax((x,), static=(int(d),))


def pickneglogsoftmax(x: Any, index: int) -> Expression:
    """``-log softmax(x)[index]`` of a vector of scores, the index being payload.

    For a manually batched ``x``, a list of indices gives each element its own.

    Raises:
        IndexRangeError: the index is outside of the scores.
    """
    if type(x) is Expression and type(index) is int and len(x.key.shape) == 1 and 0 <= index < x.key.shape[0]:
        return _pickneglogsoftmax((x,), (index,))
    x = as_operand(x)
    if isinstance(index, Iterable):
        return pickneglogsoftmax_batch(x, index)
    return _pickneglogsoftmax((x,), (payload_index("pickneglogsoftmax", index, x.type.shape[0], "the scores"),))


def pickneglogsoftmax_batch(x: Any, indices: Iterable[int]) -> Expression:
    """`pickneglogsoftmax` with an index for each batch element."""
    x = as_operand(x)
    return _pickneglogsoftmax.lanes(
        (x,), (payload_indices("pickneglogsoftmax", indices, x.type.shape[0], "the scores"),)
    )


def hinge(x: Any, index: int, m: float = 1.0) -> Expression:
    """Sum over the other entries ``k`` of ``max(0, m - x[index] + x[k])``, a scalar."""
    x = as_operand(x)
    if isinstance(index, Iterable):
        return hinge_batch(x, index, m)
    return _hinge((x,), (payload_index("hinge", index, x.type.shape[0], "the scores"),), (m,))


def hinge_batch(x: Any, indices: Iterable[int], m: float = 1.0) -> Expression:
    """`hinge` with an index for each batch element."""
    x = as_operand(x)
    return _hinge.lanes((x,), (payload_indices("hinge", indices, x.type.shape[0], "the scores"),), (m,))
