"""`custom_op`: an op from kernels that users bring, by numba for the CPU and by numba.cuda for GPUs."""

from __future__ import annotations

import inspect
import types as python
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numba

from dynbatch.compiler.trace import Tracer
from dynbatch.config import config
from dynbatch.errors import ShapeError, user_line
from dynbatch.functions import __all__ as function_names
from dynbatch.graph import Expression
from dynbatch.kernel_check import Operands, check_kernels, operand_shape
from dynbatch.ops.custom import Custom, Kernel
from dynbatch.ops.record import Op, described
from dynbatch.types import type_of

Shape = tuple[int, ...]

_MOST_THREADS = 1024  # of a block, on every GPU


def custom_op(
    name: str,
    *,
    types: Callable[..., int | Shape],
    forward: Kernel,
    backward: Kernel | None = None,
    cuda_forward: Any = None,
    cuda_backward: Any = None,
    threads: int | None = None,
    check: Operands | Literal[False] | None = None,
) -> Callable[..., Expression]:
    """Make an op of kernels for whole batches; it batches, and has a gradient, like any other.

    ``docs/custom_op.md`` explains it with an example. All arrays have the rows of the batch as their leading axis, and
    behind it each value in storage order: a vector of shape ``(n,)`` is ``(rows, n)``, a matrix of shape ``(m, n)`` is
    ``(rows, n, m)``, a scalar is ``(rows, 1)``. Their elements are of the graph's dtype. A row must depend on the same
    row of the operands and on nothing else. Kernels write all of the arrays that they are given to write, which hold
    anything at first, and do not write the others.

    Arguments:
        name: of the op, in errors and plans. No name of dynbatch's own functions; a name can be used again.
        types: the type rule, from the operands' shapes to the result's: ``types(*shapes) -> shape``. It raises
            ValueError (or fails an assertion, or runs out of dimensions) for shapes that do not fit.
        forward: ``forward(*operands, out)`` for the CPU: a function compiled by ``numba.njit``, a Python function,
            which is compiled so, or anything else that can be called with NumPy arrays.
        backward: ``backward(dout, out, *operands, *grads)``, which writes the gradient of every operand into the
            array of its shape in ``grads``. Without it, a gradient that is asked for is an error.
        cuda_forward, cuda_backward: the same for GPUs, by ``numba.cuda.jit``. Without them the op is for CPUs only.
        threads: how a GPU runs them. None: a thread for each row, ``row = cuda.grid(1)``, in blocks of 128, so that
            some threads of the last block have no row. A number: for each row a block of as many threads,
            ``row = cuda.blockIdx.x``.
        check: operands for the check below: for each a shape, or an array (in that shape) near which values are drawn.
            False: no check, for gradients that differ from the function's on purpose.

    Returns:
        A function that takes Expressions and parameters and returns an Expression. Operands may have batch elements;
        what all rows share, such as a parameter, a kernel sees as an array whose rows are all the same memory.

    Under ``debug`` the CPU kernels are checked in float64: that gradients are those of finite differences, that rows
    do not influence each other, that everything is written that must be and nothing else. This is done at once where
    ``check`` has the operands, else at the first call, with operands of its shapes.

    Raises:
        TypeError: a kernel is not of its kind.
        ValueError: the name is taken, or ``threads`` is no number of threads.
        CustomOpError: the check found a fault, and names the op and the operand.
        ShapeError: raised by the function that is returned, for shapes that do not fit; and here, if those of
            ``check`` do not.
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"{user_line()}: custom_op: the name must be a string, not {name!r}")
    if name in function_names:
        raise ValueError(f"{user_line()}: custom_op: {name} is a function of dynbatch's own; choose another name")
    if threads is not None and not (type(threads) is int and 1 <= threads <= _MOST_THREADS):
        raise ValueError(f"{user_line()}: {name}: threads must be between 1 and {_MOST_THREADS}, not {threads!r}")
    if not callable(types):
        raise TypeError(f"{user_line()}: {name}: types must be a function of shapes, not {_kind(types)}")
    if not (check is None or check is False or isinstance(check, (list, tuple))):
        raise TypeError(f"{user_line()}: {name}: check must be a list of shapes or arrays, or False, not {check!r}")
    on_cpu = _cpu_kernel(name, "forward", forward)
    gradient_on_cpu = None if backward is None else _cpu_kernel(name, "backward", backward)
    for which, kernel in (("cuda_forward", cuda_forward), ("cuda_backward", cuda_backward)):
        if kernel is not None and not hasattr(kernel, "__getitem__"):
            raise TypeError(f"{user_line()}: {name}: {which} must be made by numba.cuda.jit, not {_kind(kernel)}")
    custom = Custom(name, on_cpu, gradient_on_cpu, cuda_forward, cuda_backward, threads)
    declaration = _Declaration(custom, types, check)
    if config.debug and declaration.operands:
        try:
            declaration.check([])
        except ShapeError as error:
            raise described(error, name, []) from None
    op = Op(name, declaration.compose)

    def call(*operands: Any) -> Expression:
        if not operands:
            raise TypeError(f"{user_line()}: {name}: expected at least one operand")
        return op.several(list(operands))

    call.__name__ = call.__qualname__ = name
    call.__doc__ = forward.__doc__
    return call


def _kind(x: Any) -> str:
    return type(x).__name__


def _cpu_kernel(name: str, which: str, kernel: Any) -> Any:
    if not callable(kernel):
        raise TypeError(f"{user_line()}: {name}: {which} must be a function, not {_kind(kernel)}")
    if isinstance(kernel, python.FunctionType):
        return numba.njit(nogil=True, error_model="numpy")(kernel)
    return kernel


class _Declaration:
    """What was declared, and whether it was checked."""

    def __init__(self, custom: Custom, rule: Callable[..., Any], check: Operands | Literal[False] | None) -> None:
        self.custom = custom
        self.rule = rule
        self.operands = check or []
        self.checked = check is False

    def compose(self, t: Tracer, *operands: int) -> int:
        """Emit the op, whose operands are values of a trace."""
        shapes = [t.type(v).shape for v in operands]
        shape = self.shape(shapes)
        if config.debug and not self.checked:
            self.check(shapes)
        return t.emit(self.custom, *operands, shape=shape)

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        """The result's shape by the type rule; raises `ShapeError`."""
        name = self.custom.name
        try:
            inspect.signature(self.rule).bind(*shapes)
        except TypeError:
            raise TypeError(f"{user_line()}: {name}: its type rule does not take {len(shapes)} operands") from None
        listed = ", ".join(map(str, shapes))
        try:
            found = self.rule(*shapes)
        except (AssertionError, IndexError, ValueError) as error:
            raise ShapeError(f"{name}: shapes {listed} do not fit: {error or 'its type rule says so'}") from error
        try:
            return type_of(found).shape
        except (TypeError, ValueError):
            raise TypeError(
                f"{user_line()}: {name}: its type rule must return a shape, not {found!r} (for shapes {listed})"
            ) from None

    def check(self, shapes: Sequence[Shape]) -> None:
        """Check the kernels, with the operands that were declared or else of these shapes."""
        operands = self.operands or shapes
        check_kernels(self.custom, operands, self.shape([operand_shape(x) for x in operands]))
        self.checked = True
