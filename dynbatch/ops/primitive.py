"""What a primitive op is: type rule, NumPy reference and gradient in one declaration.

Arrays have the domain (rows, list elements, or one) as their leading axis and each value in storage order
behind it: a matrix of shape ``(m, n)`` is ``(rows, n, m)``. Elementwise ops are given as a formula, from which
come the NumPy code, the gradient, and the generated kernels.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

import numpy as np

from dynbatch.errors import ShapeError
from dynbatch.types import Type, type_of

if TYPE_CHECKING:
    from dynbatch.compiler.ir import Builder

Array = np.ndarray


class Primitive:
    """Base of all primitive ops; one instance each.

    Attributes:
        name: for people, and part of nothing else.
        reduces: ``"segments"`` where a node's list elements become one value, ``"rows"`` where the whole batch
            becomes one, else "".
        expands: whether a node's value is repeated for each of its list elements.
        view: whether the result is the operand's memory looked at differently, so that recomputing it is free.
        writes_out: whether ``numpy`` takes ``out=`` and writes there.
        is_block: whether generated kernels compute it as it is; other ops may be composed of such (`lower`).
        checks_in_debug: whether ``numpy`` refuses some operands under ``debug``, which kernels do not.
    """

    name = ""
    reduces = ""
    expands = False
    view = False
    writes_out = False
    is_block = False
    checks_in_debug = False

    def infer(self, *types: Any, **attrs: Any) -> Type | None:
        """The result's type from the operands' types; raises `ShapeError`."""
        raise NotImplementedError

    def numpy(self, *arrays: Array, **attrs: Any) -> Array:
        """The batched reference."""
        raise NotImplementedError

    def vjp(self, b: Builder, args: tuple[int, ...], out: int, dout: int, **attrs: Any) -> list[int | None]:
        """Gradients of the operands, emitted into ``b``, given that of the result."""
        return [None] * len(args)

    def lower(self, b: Builder, args: tuple[int, ...], **attrs: Any) -> int | None:
        """The result composed of ops that kernels compute, emitted into ``b``; None where there is no such form."""
        return None

    def __repr__(self) -> str:
        return f"<op {self.name}>"


def broadcast_shape(name: str, *types: Type) -> tuple[int, ...]:
    """DyNet's broadcasting: shapes are aligned at the left, dimensions of one stretch."""
    rank = max(len(t.shape) for t in types)
    result = []
    for axis in range(rank):
        sizes = {t.shape[axis] for t in types if axis < len(t.shape)} - {1}
        if len(sizes) > 1:
            raise ShapeError(f"{name}: shapes {' and '.join(str(t.shape) for t in types)} do not broadcast")
        result.append(sizes.pop() if sizes else 1)
    return tuple(result)


def align(arrays: tuple[Array, ...]) -> list[Array]:
    """Insert axes behind the leading one until all arrays have one rank (left-aligned in the user's shapes)."""
    rank = max(a.ndim for a in arrays)
    return [a if a.ndim == rank else a.reshape((a.shape[0],) + (1,) * (rank - a.ndim) + a.shape[1:]) for a in arrays]


def _erf(x: Array) -> Array:
    from dynbatch.cpu.special import erf

    return erf(x)


def _logistic(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))  # not by way of tanh, which is zero below -17


def _inverse_root(x: Array) -> Array:
    return 1 / np.sqrt(x)


FUNCTIONS: dict[str, Any] = {
    "tanh": np.tanh,
    "exp": np.exp,
    "log": np.log,
    "log1p": np.log1p,
    "expm1": np.expm1,
    "sqrt": np.sqrt,
    "inverse_root": _inverse_root,
    "abs": np.abs,
    "sign": np.sign,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "where": np.where,
    "logistic": _logistic,
    "erf": _erf,
    "power": np.power,
    "inf": np.inf,
}
"""The functions that a formula may use, and infinity; each backend has its own of the same names."""


class Elementwise(Primitive):
    """An op on each element, given by a formula in its operands ``x``, ``y``, ``z`` and ``w``.

    Arguments:
        name: the op's name.
        formula: the result, e.g. ``"x * tanh(y)"``.
        grads: for each operand the gradient, in the operands, ``out`` and ``dy``; None where there is none.
    """

    is_block = True

    def __init__(self, name: str, formula: str, *grads: str | None) -> None:
        self.name = name
        self.formula = formula
        self.operands = list("xyzw"[: len(grads)])
        code = f"lambda {', '.join(self.operands)}: {formula}"
        self._function = eval(compile(code, f"<op {name}>", "eval"), dict(FUNCTIONS))
        self._grads = [self._gradient(n, g) for n, g in zip(self.operands, grads)]

    def _gradient(self, operand: str, grad: str | None) -> tuple[Elementwise, list[str]] | str | None:
        if grad is None or grad == "dy":
            return grad
        tree = ast.parse(grad, mode="eval")
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        used = [n for n in (*self.operands, "out", "dy") if n in names]
        renamed = dict(zip(used, "xyzw"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id in renamed:
                node.id = renamed[node.id]
        derived = Elementwise.__new__(Elementwise)
        derived.name = f"{self.name}_d{operand}"
        derived.formula = ast.unparse(tree)
        derived.operands = list(renamed.values())
        code = f"lambda {', '.join(derived.operands)}: {derived.formula}"
        derived._function = eval(compile(code, f"<op {derived.name}>", "eval"), dict(FUNCTIONS))
        derived._grads = [None] * len(used)
        return derived, used

    def infer(self, *types: Type) -> Type:
        first = types[0]
        if all(t is first for t in types):
            return first
        return type_of(broadcast_shape(self.name, *types), first.dtype)

    def numpy(self, *arrays: Array) -> Array:  # type: ignore[override]
        first = arrays[0].ndim
        if any(a.ndim != first for a in arrays):
            arrays = tuple(align(arrays))
        with np.errstate(all="ignore"):
            return self._function(*arrays)

    def vjp(self, b: Builder, args: tuple[int, ...], out: int, dout: int) -> list[int | None]:  # type: ignore[override]
        from dynbatch.ops.reduction import sum_to

        by_name = dict(zip(self.operands, args)) | {"out": out, "dy": dout}
        result: list[int | None] = []
        for arg, gradient in zip(args, self._grads):
            if gradient is None:
                result.append(None)
                continue
            if isinstance(gradient, str):
                grad = dout
            else:
                op, used = gradient
                grad = b.emit(op, *(by_name[n] for n in used))
            shape = b.type(arg).shape
            result.append(grad if b.type(grad).shape == shape else b.emit(sum_to, grad, shape=shape))
        return result


class Indexed(Primitive):
    """An op whose elements follow from their place, and from at most one number a row: kernels need no array for it.

    Attributes:
        formula: for kernels; the operand is ``x``, the place in storage order ``i``, the number of elements ``size``,
            the place along the dimension of attribute ``dim`` is ``along``, and attributes have their names.
    """

    formula = ""
    is_block = True
