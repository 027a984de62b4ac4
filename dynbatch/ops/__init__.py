"""The public ops, under DyNet's names.

Each function checks what the user gave, so that errors are raised on the user's line, and records a call of its `Op`.
Shapes are DyNet's: column-major, a vector has one dimension, a scalar is ``(1,)``; broadcasting is aligned at the
left, so that a vector is added to each column. Every op also works inside a cell, on manually batched expressions,
and batches automatically across instances.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from dynbatch.compiler.trace import Tracer
from dynbatch.errors import DynbatchError, IndexRangeError, ShapeError, user_line
from dynbatch.graph import Expression, Operand, handle, state
from dynbatch.ops import elementwise as ew
from dynbatch.ops import indexing, linear, normalization, random, reduction, segment, shape
from dynbatch.ops import softmax as softmaxes
from dynbatch.ops.record import (
    Lanes,
    Op,
    as_expression,
    as_operand,
    checked_index,
    described,
    lane_count,
    record_rows,
    spread,
)
from dynbatch.types import type_of

__all__ = [
    "abs",
    "affine_transform",
    "argmax",
    "average",
    "binary_log_loss",
    "bmax",
    "bmin",
    "cdiv",
    "cmult",
    "concatenate",
    "concatenate_cols",
    "concatenate_to_batch",
    "const_parameter",
    "constant",
    "dot_product",
    "dropout",
    "elu",
    "emax",
    "esum",
    "exp",
    "flip_gradient",
    "gelu",
    "hinge",
    "hinge_batch",
    "huber_distance",
    "inputTensor",
    "inputVector",
    "l1_distance",
    "layer_norm",
    "log",
    "log_sigmoid",
    "log_softmax",
    "logistic",
    "logsumexp",
    "lookup",
    "lookup_batch",
    "max_dim",
    "mean_dim",
    "mean_elems",
    "nobackprop",
    "noise",
    "ones",
    "parameter",
    "pick",
    "pick_batch",
    "pick_batch_elem",
    "pick_batch_elems",
    "pick_range",
    "pickneglogsoftmax",
    "pickneglogsoftmax_batch",
    "pow",
    "random_bernoulli",
    "random_gumbel",
    "random_normal",
    "random_uniform",
    "rectify",
    "reshape",
    "scalarInput",
    "scale_gradient",
    "select_cols",
    "select_rows",
    "silu",
    "softmax",
    "softsign",
    "sqrt",
    "square",
    "squared_distance",
    "squared_norm",
    "sum_batches",
    "sum_dim",
    "sum_elems",
    "tanh",
    "transpose",
    "zeros",
]

Dim = int | Sequence[int]


# ---- operands and payload -------------------------------------------------------------------------------------------


def _is_number(x: Any) -> bool:
    """Whether ``x`` is a number, or stands for one in a trace."""
    return not isinstance(x, Operand) and (hasattr(x, "__float__") or getattr(x, "is_payload", False))


def _dims(name: str, dim: Dim) -> tuple[int, ...]:
    dims = (int(dim),) if hasattr(dim, "__index__") else tuple(int(d) for d in dim)
    dims = dims or (1,)
    if any(d <= 0 for d in dims):
        raise ShapeError(f"{user_line()}: {name}: dimensions must be positive, not {dims}")
    return dims


def _index(name: str, index: Any, size: int, what: str) -> Any:
    """A payload index, checked; negative ones count from the end. In a trace it is checked at each call."""
    if getattr(index, "is_payload", False):
        index.tracer.bounds.append((index.tracer.values[index.value_id].index, size, name, what))
        return index
    return checked_index(name, index, size, what)


def _indices(name: str, indices: Iterable[Any], size: int, what: str) -> Lanes:
    checked = Lanes(_index(name, i, size, what) for i in indices)
    if not checked:
        raise ShapeError(f"{user_line()}: {name}: the list of indices is empty")
    return checked


def _pair(name: str, x: Any, y: Any) -> tuple[Any, Any]:
    if not isinstance(x, Operand) or not isinstance(y, Operand):
        wrong = y if isinstance(x, Operand) else x
        raise TypeError(f"{user_line()}: {name}: expected an Expression or a parameter, not {type(wrong).__name__}")
    return x, y


def _simple(primitive: Any, name: str | None = None, **attrs: Any) -> Op:
    """An op that is one primitive."""
    return Op(name or primitive.name, lambda t, *values: t.emit(primitive, *values, **attrs))


# ---- inputs ---------------------------------------------------------------------------------------------------------

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
    dims = _dims("inputTensor", values.shape[:-1] if batched else values.shape)
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
    return _zeros((), static=(_dims("zeros", dim),))


def ones(dim: Dim) -> Expression:
    """Ones of the given shape."""
    return _ones((), static=(_dims("ones", dim),))


def constant(dim: Dim, val: float) -> Expression:
    """One number everywhere in the given shape; the number is payload."""
    return _constant((), (), (val,), (_dims("constant", dim),))


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


# ---- lookup ---------------------------------------------------------------------------------------------------------

_lookup = _simple(indexing.lookup)


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
        index = _index("lookup", index, p.size, f"lookup parameter {p.name}")
    if state.tracer is not None:
        return _lookup.trace((p,), (index,))
    signature = p.lookup_signature
    if signature is None:
        signature = p.lookup_signature = _lookup.find((p,), 1, 0)
    graph = state.graph
    place = signature.place
    graph.stream.extend((place[1] if place[0] == graph.serial else graph.touch(signature), index))
    vid = graph.values
    graph.values = vid + 1
    return Expression(graph, vid, signature.type)


def lookup_batch(p: Any, indices: Iterable[int], update: bool = True) -> Expression:
    """Rows of a lookup parameter as batch elements; see `lookup`."""
    if not getattr(p, "is_lookup", False):
        raise TypeError(f"{user_line()}: lookup_batch: expected a LookupParameter, not {type(p).__name__}")
    if not update:
        p = p.constant
    return _lookup.lanes((p,), (_indices("lookup_batch", indices, p.size, f"lookup parameter {p.name}"),))


# ---- arithmetic -----------------------------------------------------------------------------------------------------

_add, _subtract, _cmult, _cdiv, _pow = (_simple(p) for p in (ew.add, ew.subtract, ew.cmult, ew.cdiv, ew.power))
_rsubtract = Op("subtract", lambda t, x, number: t.emit(ew.subtract, number, x))
_rdivide = Op("divide", lambda t, x, number: t.emit(ew.cdiv, number, x))
_times_matrix = Op("matrix product", lambda t, a, b: _emit_matmul(t, a, b))


def _emit_matmul(t: Tracer, a: int, b: int) -> int:
    return t.emit(linear.matmul, a, b, vector=len(t.type(b).shape) == 1)


def plus(x: Any, y: Any) -> Expression:
    """``x + y``, either of which may be a number."""
    if isinstance(y, Operand):
        return _add.binary(x, y)
    return _add((x,), (), (_number("+", y),))


def minus(x: Any, y: Any) -> Expression:
    """``x - y``, either of which may be a number."""
    if not isinstance(y, Operand):
        return _subtract((x,), (), (_number("-", y),))
    if not isinstance(x, Operand):
        return _rsubtract((y,), (), (_number("-", x),))
    return _subtract.binary(x, y)


def times(x: Any, y: Any) -> Expression:
    """``x * y``: the matrix product of two expressions, or scaling by a number."""
    if isinstance(y, Operand):
        return _times_matrix.binary(x, y)
    return _cmult((x,), (), (_number("*", y),))


def matrix_product(x: Any, y: Any) -> Expression:
    """``x @ y``: the matrix product."""
    return _times_matrix.binary(*_pair("@", x, y))


def divide(x: Any, y: Any) -> Expression:
    """``x / y``: elementwise, either of which may be a number."""
    if not isinstance(y, Operand):
        return _cdiv((x,), (), (_number("/", y),))
    if not isinstance(x, Operand):
        return _rdivide((y,), (), (_number("/", x),))
    return _cdiv.binary(x, y)


def _number(name: str, x: Any) -> Any:
    if not _is_number(x):
        raise TypeError(
            f"{user_line()}: {name}: expected an Expression, a parameter or a number, not {type(x).__name__}"
        )
    return x


def cmult(x: Any, y: Any) -> Expression:
    """Elementwise product, broadcasting."""
    return _cmult.binary(*_pair("cmult", x, y))


def cdiv(x: Any, y: Any) -> Expression:
    """Elementwise quotient, broadcasting."""
    return _cdiv.binary(*_pair("cdiv", x, y))


def pow(x: Any, y: Any) -> Expression:
    """``x`` to the power ``y`` (a number or a scalar expression), elementwise."""
    if isinstance(y, Operand):
        return _pow.binary(x, y)
    return _pow((as_operand(x),), (), (_number("pow", y),))


def bmax(x: Any, y: Any) -> Expression:
    """Elementwise maximum of two expressions."""
    return _bmax.binary(*_pair("bmax", x, y))


def bmin(x: Any, y: Any) -> Expression:
    """Elementwise minimum of two expressions."""
    return _bmin.binary(*_pair("bmin", x, y))


_bmax, _bmin = _simple(ew.bmax), _simple(ew.bmin)
_unary = {
    p.name: _simple(p)
    for p in (
        ew.negate, ew.exp, ew.log, ew.sqrt, ew.square, ew.absolute, ew.tanh, ew.logistic, ew.rectify, ew.gelu,
        ew.softsign, ew.log_sigmoid, ew.stop_gradient, ew.flip_gradient,
    )
}  # fmt: skip
_negate, _exp, _log, _sqrt = _unary["negate"], _unary["exp"], _unary["log"], _unary["sqrt"]
_square, _absolute, _tanh, _logistic = _unary["square"], _unary["abs"], _unary["tanh"], _unary["logistic"]
_rectify, _gelu, _softsign = _unary["rectify"], _unary["gelu"], _unary["softsign"]
_log_sigmoid, _nobackprop, _flip_gradient = _unary["log_sigmoid"], _unary["nobackprop"], _unary["flip_gradient"]
_elu, _silu, _scale_gradient = _simple(ew.elu), _simple(ew.silu), _simple(ew.scale_gradient)


def negate(x: Any) -> Expression:
    """``-x``."""
    return _negate.unary(x)


def exp(x: Any) -> Expression:
    """Exponential, elementwise."""
    return _exp.unary(x)


def log(x: Any) -> Expression:
    """Natural logarithm, elementwise."""
    return _log.unary(x)


def sqrt(x: Any) -> Expression:
    """Square root, elementwise."""
    return _sqrt.unary(x)


def square(x: Any) -> Expression:
    """Square, elementwise."""
    return _square.unary(x)


def abs(x: Any) -> Expression:
    """Absolute value, elementwise."""
    return _absolute.unary(x)


def tanh(x: Any) -> Expression:
    """Hyperbolic tangent, elementwise."""
    return _tanh.unary(x)


def logistic(x: Any) -> Expression:
    """The logistic function ``1 / (1 + exp(-x))``, elementwise."""
    return _logistic.unary(x)


def rectify(x: Any) -> Expression:
    """``max(x, 0)``, elementwise."""
    return _rectify.unary(x)


def elu(x: Any, alpha: float = 1.0) -> Expression:
    """``x`` where positive, else ``alpha * (exp(x) - 1)`` (Clevert, Unterthiner and Hochreiter 2016)."""
    return _elu((as_operand(x),), (), (alpha,))


def silu(x: Any, beta: float = 1.0) -> Expression:
    """``x * logistic(beta * x)`` (Elfwing, Uchibe and Doya 2018)."""
    return _silu((as_operand(x),), (), (beta,))


def gelu(x: Any) -> Expression:
    """``x`` times the normal distribution function of ``x``, exactly (Hendrycks and Gimpel 2016)."""
    return _gelu.unary(x)


def softsign(x: Any) -> Expression:
    """``x / (1 + |x|)``, elementwise."""
    return _softsign.unary(x)


def log_sigmoid(x: Any) -> Expression:
    """Logarithm of the logistic function, without overflow."""
    return _log_sigmoid.unary(x)


def nobackprop(x: Any) -> Expression:
    """``x`` as a constant: no gradient passes."""
    return _nobackprop.unary(x)


def flip_gradient(x: Any) -> Expression:
    """``x``; its gradient changes sign (Ganin and Lempitsky 2015)."""
    return _flip_gradient.unary(x)


def scale_gradient(x: Any, lambd: float = 1.0) -> Expression:
    """``x``; its gradient is multiplied by ``lambd``."""
    return _scale_gradient((as_operand(x),), (), (lambd,))


# ---- products -------------------------------------------------------------------------------------------------------

_transpose = _simple(linear.transpose)
_dot_product = Op("dot_product", lambda t, x, y: _emit_dot(t, x, y))


def _emit_dot(t: Tracer, x: int, y: int) -> int:
    if t.type(x).shape != t.type(y).shape:
        raise ShapeError(f"dot_product: shapes {t.type(x).shape} and {t.type(y).shape} differ")
    return t.emit(reduction.sum_to, t.emit(ew.cmult, x, y), shape=(1,))


def _emit_affine(t: Tracer, bias: int, *factors: int) -> int:
    total = bias
    for w, x in zip(factors[::2], factors[1::2]):
        product = _emit_matmul(t, w, x)
        if _product_mismatch(t.type(bias).shape, t.type(product).shape):
            raise ShapeError(
                f"affine_transform: bias of shape {t.type(bias).shape} does not fit the product of shapes "
                f"{t.type(w).shape} and {t.type(x).shape}"
            )
        total = t.emit(ew.add, total, product)
    return total


def _product_mismatch(bias: tuple[int, ...], product: tuple[int, ...]) -> bool:
    """Whether a bias cannot be added to each column of a product."""
    return len(bias) > len(product) or any(b not in (1, p) for b, p in zip(bias, product))


_affine = Op("affine_transform", _emit_affine)


def affine_transform(exprs: Sequence[Any]) -> Expression:
    """``b + W1 * x1 + W2 * x2 + ...`` of the list ``[b, W1, x1, W2, x2, ...]``; the bias is added to each column."""
    if len(exprs) % 2 == 0:
        raise ShapeError(f"{user_line()}: affine_transform: expected [b, W1, x1, ...], an odd number, not {len(exprs)}")
    graph = state.graph
    if graph is not None and getattr(exprs[0], "is_parameter", False):
        # the fast path, for a bias that is a parameter: what most nodes of a model without cells are
        inputs = [e for e in exprs if e.__class__ is Expression]
        if inputs and all(e.graph is graph for e in inputs):
            table = exprs[0].table
            key = (_affine, *[getattr(e, "key", e) for e in exprs])
            signature = table.get(key)
            if signature is None:
                operands = [as_operand(e) for e in exprs]
                if sum([o.is_parameter for o in operands]) + len(inputs) == len(operands):
                    signature = table[key] = _affine.find(operands, 0, 0)
            if signature is not None:
                place = signature.place
                index = place[1] if place[0] == graph.serial else graph.touch(signature)
                graph.stream.extend((index, *[e.vid for e in inputs]))
                graph.values += 1
                return Expression(graph, graph.values - 1, signature.type)
    return _affine([as_operand(e) for e in exprs])


def transpose(x: Any) -> Expression:
    """The transposed matrix; a vector becomes one row."""
    return _transpose.unary(x)


def dot_product(x: Any, y: Any) -> Expression:
    """Inner product of two expressions of one shape, a scalar."""
    return _dot_product.binary(*_pair("dot_product", x, y))


# ---- reductions of lists --------------------------------------------------------------------------------------------


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
    graph.stream.extend((graph.touch(signature), len(operands)))
    graph.stream.extend([o.vid for o in operands])
    graph.values += 1
    return Expression(graph, graph.values - 1, signature.type)


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


# ---- reductions of one value ----------------------------------------------------------------------------------------


def _emit_sum_dim(t: Tracer, x: int, dims: tuple[int, ...], mean: bool) -> int:
    for d in dims:
        shape.check_dim("mean_dim" if mean else "sum_dim", t.type(x), d)
    source = t.type(x).shape
    kept = tuple(1 if d in dims else n for d, n in enumerate(source))
    total = t.emit(reduction.sum_to, x, shape=kept)
    left = tuple(n for d, n in enumerate(source) if d not in dims) or (1,)
    total = t.emit(shape.reshape, total, shape=left)
    if mean:
        total = t.emit(ew.cmult, total, t.constant(1.0 / math.prod(source[d] for d in dims)))
    return total


def _emit_mean(t: Tracer, x: int) -> int:
    return t.emit(ew.cmult, t.emit(reduction.sum_to, x, shape=(1,)), t.constant(1.0 / t.type(x).size))


_sum_elems = Op("sum_elems", lambda t, x: t.emit(reduction.sum_to, x, shape=(1,)))
_mean_elems = Op("mean_elems", _emit_mean)
_sum_dim = Op("sum_dim", lambda t, x, dims: _emit_sum_dim(t, x, dims, False))
_mean_dim = Op("mean_dim", lambda t, x, dims: _emit_sum_dim(t, x, dims, True))
_max_dim = Op("max_dim", lambda t, x, dim: t.emit(reduction.max_dim, x, dim=dim))
_argmax = Op(
    "argmax", lambda t, x, dim, straight: t.emit(reduction.one_hot_argmax, x, dim=dim, straight_through=straight)
)
_squared_norm = Op("squared_norm", lambda t, x: _sum_of(t, t.emit(ew.square, x)))
_squared_distance = Op(
    "squared_distance", lambda t, x, y: _sum_of(t, t.emit(ew.square, _difference(t, "squared_distance", x, y)))
)
_l1_distance = Op("l1_distance", lambda t, x, y: _sum_of(t, t.emit(ew.absolute, _difference(t, "l1_distance", x, y))))
_huber_distance = Op(
    "huber_distance", lambda t, x, y, c: _sum_of(t, t.emit(ew.huber, _difference(t, "huber_distance", x, y), c))
)
_binary_log_loss = Op("binary_log_loss", lambda t, x, y: _sum_of(t, t.emit(ew.binary_cross_entropy, x, y)))


def _sum_of(t: Tracer, x: int) -> int:
    return t.emit(reduction.sum_to, x, shape=(1,))


def _difference(t: Tracer, name: str, x: int, y: int) -> int:
    if t.type(x).shape != t.type(y).shape:
        raise ShapeError(f"{name}: shapes {t.type(x).shape} and {t.type(y).shape} differ")
    return t.emit(ew.subtract, x, y)


def sum_elems(x: Any) -> Expression:
    """Sum of all elements, a scalar."""
    return _sum_elems.unary(x)


def mean_elems(x: Any) -> Expression:
    """Mean of all elements, a scalar."""
    return _mean_elems.unary(x)


def _dim_list(d: Dim) -> tuple[int, ...]:
    return tuple(sorted({int(d)} if hasattr(d, "__index__") else {int(i) for i in d}))


def sum_dim(x: Any, d: Dim, b: bool = False) -> Expression:
    """Sum along the dimensions ``d``, which disappear; ``b`` also sums over the batch elements."""
    dims = _dim_list(d)
    result = _sum_dim((as_operand(x),), static=(dims,)) if dims else as_expression(x)
    return sum_batches(result) if b else result


def mean_dim(x: Any, d: Dim, b: bool = False, n: int = 0) -> Expression:
    """Mean along the dimensions ``d``, which disappear; ``b`` also over the batch elements.

    Arguments:
        x: any expression.
        d: a dimension or a list of them.
        b: whether to average over the batch elements too.
        n: divide by this instead of by the number of elements; 0 for that number.
    """
    dims = _dim_list(d)
    x = as_expression(x)
    lanes = x.dim()[1] if b else 1
    count = n or math.prod(x.type.shape[i] for i in dims if i < len(x.type.shape)) * lanes
    return sum_dim(x, dims, b) * (1.0 / count) if n or b else _mean_dim((x,), static=(dims,))


def max_dim(x: Any, d: int = 0) -> Expression:
    """Maximum along a dimension, which disappears; the gradient goes to the first maximum."""
    return _max_dim((as_operand(x),), static=(int(d),))


def argmax(x: Any, gradient_mode: str = "zero_gradient", d: int = 0) -> Expression:
    """One at the (first) maximum along dimension ``d``, else zero.

    Arguments:
        x: any expression.
        gradient_mode: ``"zero_gradient"``, or ``"straight_through_gradient"`` to pass gradients unchanged.
        d: the dimension.
    """
    modes = {"zero_gradient": False, "straight_through_gradient": True}
    if gradient_mode not in modes:
        raise ValueError(f"{user_line()}: argmax: gradient_mode must be one of {', '.join(modes)}")
    return _argmax((as_operand(x),), static=(int(d), modes[gradient_mode]))


def squared_norm(x: Any) -> Expression:
    """Sum of squares, a scalar."""
    return _squared_norm.unary(x)


def squared_distance(x: Any, y: Any) -> Expression:
    """Sum of squared differences, a scalar."""
    return _squared_distance.binary(*_pair("squared_distance", x, y))


def l1_distance(x: Any, y: Any) -> Expression:
    """Sum of absolute differences, a scalar."""
    return _l1_distance.binary(*_pair("l1_distance", x, y))


def huber_distance(x: Any, y: Any, c: float = 1.345) -> Expression:
    """Sum of Huber's function: ``d * d / 2`` where the difference ``d`` is below ``c``, else ``c * (|d| - c / 2)``."""
    return _huber_distance([as_operand(o) for o in _pair("huber_distance", x, y)], (), (c,))


def binary_log_loss(x: Any, y: Any) -> Expression:
    """``-sum(y log(x) + (1 - y) log(1 - x))``, a scalar; ``0 log 0`` is zero."""
    return _binary_log_loss.binary(*_pair("binary_log_loss", x, y))


# ---- softmax family -------------------------------------------------------------------------------------------------


def _emit_hinge(t: Tracer, x: int, index: int, margin: int) -> int:
    if len(t.type(x).shape) != 1:
        raise ShapeError(f"hinge: expected a vector of scores, not shape {t.type(x).shape}")
    chosen = t.emit(indexing.pick, x, index, dim=0)
    losses = t.emit(ew.rectify, t.emit(ew.add, t.emit(ew.subtract, x, chosen), margin))
    return t.emit(ew.subtract, _sum_of(t, losses), t.emit(ew.rectify, margin))  # the term of the index itself


_softmax = Op("softmax", lambda t, x, dim: t.emit(softmaxes.softmax, x, dim=dim))
_log_softmax = Op("log_softmax", lambda t, x, dim: t.emit(softmaxes.log_softmax, x, dim=dim))
_pickneglogsoftmax = _simple(softmaxes.pick_neg_log_softmax)
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
        mask[[_index("log_softmax", i, x.type.shape[0], "the scores") for i in restrict]] = 0
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
    return _pickneglogsoftmax((x,), (_index("pickneglogsoftmax", index, x.type.shape[0], "the scores"),))


def pickneglogsoftmax_batch(x: Any, indices: Iterable[int]) -> Expression:
    """`pickneglogsoftmax` with an index for each batch element."""
    x = as_operand(x)
    return _pickneglogsoftmax.lanes((x,), (_indices("pickneglogsoftmax", indices, x.type.shape[0], "the scores"),))


def hinge(x: Any, index: int, m: float = 1.0) -> Expression:
    """Sum over the other entries ``k`` of ``max(0, m - x[index] + x[k])``, a scalar."""
    x = as_operand(x)
    if isinstance(index, Iterable):
        return hinge_batch(x, index, m)
    return _hinge((x,), (_index("hinge", index, x.type.shape[0], "the scores"),), (m,))


def hinge_batch(x: Any, indices: Iterable[int], m: float = 1.0) -> Expression:
    """`hinge` with an index for each batch element."""
    x = as_operand(x)
    return _hinge.lanes((x,), (_indices("hinge", indices, x.type.shape[0], "the scores"),), (m,))


# ---- shapes and indexing --------------------------------------------------------------------------------------------

_concatenate = Op("concatenate", lambda t, *values: t.emit(shape.concatenate, *values[:-1], dim=values[-1]))
_reshape = Op("reshape", lambda t, x, dims: t.emit(shape.reshape, x, shape=dims))
_pick = Op("pick", lambda t, x, index, dim: t.emit(indexing.pick, x, index, dim=dim))
_pick_range = Op(
    "pick_range", lambda t, x, start, stop, dim: t.emit(shape.pick_range, x, start=start, stop=stop, dim=dim)
)
_select = Op("select", lambda t, x, *rest: t.emit(indexing.select, x, *rest[:-1], dim=rest[-1]))


def concatenate(exprs: Iterable[Any], d: int = 0) -> Expression:
    """Expressions one after the other along dimension ``d``; the other dimensions must agree."""
    operands = [as_operand(e) for e in exprs]
    if not operands:
        raise ShapeError(f"{user_line()}: concatenate: the list is empty")
    return _concatenate(operands, static=(int(d),))


def concatenate_cols(exprs: Iterable[Any]) -> Expression:
    """Expressions side by side: vectors become the columns of a matrix."""
    operands = [as_operand(e) for e in exprs]
    if not operands:
        raise ShapeError(f"{user_line()}: concatenate_cols: the list is empty")
    return _concatenate(operands, static=(1,))


def reshape(x: Any, d: Dim) -> Expression:
    """The same elements in another shape, in column-major order."""
    return _reshape((as_operand(x),), static=(_dims("reshape", d),))


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
    return _pick((x,), (_index("pick", index, x.type.shape[dim], f"dimension {dim}"),), (), (dim,))


def pick_batch(x: Any, indices: Iterable[int], dim: int = 0) -> Expression:
    """`pick` with an index for each batch element."""
    x = as_operand(x)
    if not 0 <= dim < len(x.type.shape):
        raise ShapeError(f"{user_line()}: pick_batch: dimension {dim} of shape {x.type.shape} does not exist")
    return _pick.lanes((x,), (_indices("pick_batch", indices, x.type.shape[dim], f"dimension {dim}"),), (), (dim,))


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
    checked = tuple(_index(name, i, x.type.shape[dim], f"dimension {dim}") for i in indices)
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


# ---- normalization, random numbers ----------------------------------------------------------------------------------


def _emit_layer_norm(t: Tracer, x: int, gain: int, bias: int) -> int:
    normalized = t.emit(normalization.normalize, x, eps=1e-12)
    return t.emit(ew.add, t.emit(ew.cmult, normalized, gain), bias)


def _draw(primitive: Any, t: Tracer, dims: tuple[int, ...], like: int | None = None) -> int:
    return t.emit(primitive, t.random_key(like), shape=dims, salt=t.salt(), dtype=t.dtype)


def _emit_affine_draw(primitive: Any, t: Tracer, low: int, scale: int, dims: tuple[int, ...]) -> int:
    return t.emit(ew.add, t.emit(ew.cmult, _draw(primitive, t, dims), scale), low)


def _emit_dropout(t: Tracer, x: int, rate: int) -> int:
    kept = t.emit(ew.subtract, t.constant(1.0), rate)
    mask = t.emit(ew.less, _draw(random.uniform, t, t.type(x).shape, x), kept)
    return t.emit(ew.cmult, x, t.emit(ew.cdiv, mask, kept))


def _emit_bernoulli(t: Tracer, p: int, scale: int, dims: tuple[int, ...]) -> int:
    return t.emit(ew.cmult, t.emit(ew.less, _draw(random.uniform, t, dims), p), scale)


def _emit_gumbel(t: Tracer, mu: int, beta: int, dims: tuple[int, ...]) -> int:
    return t.emit(ew.add, t.emit(ew.cmult, t.emit(ew.gumbel, _draw(random.uniform, t, dims)), beta), mu)


_layer_norm = Op("layer_norm", _emit_layer_norm)
_random_normal = Op("random_normal", lambda t, m, s, dims: _emit_affine_draw(random.normal, t, m, s, dims))
_random_uniform = Op("random_uniform", lambda t, m, s, dims: _emit_affine_draw(random.uniform, t, m, s, dims))
_random_bernoulli = Op("random_bernoulli", _emit_bernoulli)
_random_gumbel = Op("random_gumbel", _emit_gumbel)
_dropout = Op("dropout", _emit_dropout)
_noise = Op(
    "noise",
    lambda t, x, s: t.emit(ew.add, x, t.emit(ew.cmult, _draw(random.normal, t, t.type(x).shape, x), s)),
)


def layer_norm(x: Any, g: Any, b: Any) -> Expression:
    """``g * (x - mean) / deviation + b`` over the first dimension (Ba, Kiros and Hinton 2016), for each column.

    The variance is that of the elements (divided by their number), with 1e-12 added.
    """
    return _layer_norm([as_operand(o) for o in (x, g, b)])


def random_normal(dim: Dim, mean: float = 0.0, stddev: float = 1.0) -> Expression:
    """Normally distributed numbers, drawn for each node (see `init` for the seed)."""
    return _random_normal((), (), (mean, stddev), (_dims("random_normal", dim),))


def random_uniform(dim: Dim, left: float = 0.0, right: float = 1.0) -> Expression:
    """Uniformly distributed numbers between ``left`` and ``right``."""
    return _random_uniform((), (), (left, right - left), (_dims("random_uniform", dim),))


def random_bernoulli(dim: Dim, p: float, scale: float = 1.0) -> Expression:
    """``scale`` with probability ``p``, else zero."""
    return _random_bernoulli((), (), (p, scale), (_dims("random_bernoulli", dim),))


def random_gumbel(dim: Dim, mu: float = 0.0, beta: float = 1.0) -> Expression:
    """Numbers from the Gumbel distribution."""
    return _random_gumbel((), (), (mu, beta), (_dims("random_gumbel", dim),))


def dropout(x: Any, p: float) -> Expression:
    """Each element is zero with probability ``p``, else divided by ``1 - p``; the rate is payload."""
    if not getattr(p, "is_payload", False) and not 0 <= p < 1:
        raise ValueError(f"{user_line()}: dropout: the rate must be at least 0 and below 1, not {p}")
    return _dropout((as_operand(x),), (), (p,))


def noise(x: Any, std: float) -> Expression:
    """``x`` plus normal noise with deviation ``std``."""
    return _noise((as_operand(x),), (), (std,))


# ---- batch elements -------------------------------------------------------------------------------------------------


def sum_batches(x: Any) -> Expression:
    """Sum over the batch elements."""
    x = as_expression(x)
    return esum([handle(x.graph, (vid,), x.type) for vid in x.vids])


def pick_batch_elem(x: Any, i: int) -> Expression:
    """Batch element ``i``."""
    x = as_expression(x)
    return handle(x.graph, (x.vids[_index("pick_batch_elem", i, len(x.vids), "the batch")],), x.type)


def pick_batch_elems(x: Any, indices: Iterable[int]) -> Expression:
    """Several batch elements, as a batch."""
    x = as_expression(x)
    chosen = [x.vids[_index("pick_batch_elems", i, len(x.vids), "the batch")] for i in indices]
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
