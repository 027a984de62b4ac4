"""Ops of kernels that users bring: what runs them on the CPU, and their gradient. `dynbatch.custom_op` makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dynbatch.compiler.ir import Builder
from dynbatch.errors import CustomOpError, user_line
from dynbatch.ops.primitive import Array, Primitive
from dynbatch.ops.shape import pick_range, reshape
from dynbatch.types import Type, type_of

Kernel = Callable[..., Any]


class Custom(Primitive):
    """An op whose value is computed by a kernel that a user brought; one instance for each call of `custom_op`.

    Attributes:
        forward: ``forward(*operands, out)``.
        cuda_forward: the same on a GPU; None if there is none.
        threads: of a block for each row, on a GPU; None for one thread a row.
        gradient: the op of the operands' gradients.
    """

    writes_out = True

    def __init__(
        self,
        name: str,
        forward: Kernel,
        backward: Kernel | None,
        cuda_forward: Any,
        cuda_backward: Any,
        threads: int | None,
    ) -> None:
        self.name = name
        self.forward = forward
        self.cuda_forward = cuda_forward
        self.threads = threads
        self.gradient = CustomGradient(name, backward, cuda_backward, threads)

    def infer(self, *types: Type, shape: tuple[int, ...]) -> Type:
        return type_of(shape, types[0].dtype)

    def numpy(self, *arrays: Array, shape: tuple[int, ...], out: Array | None = None) -> Array:  # type: ignore[override]
        rows = max(a.shape[0] for a in arrays)
        written = target(out, (rows, *shape[::-1]), arrays[0].dtype)
        if rows:
            self.forward(*(as_rows(a, rows) for a in arrays), written)
        return delivered(written, out)

    def vjp(self, b: Builder, args: tuple[int, ...], out: int, dout: int, **attrs: Any) -> list[int | None]:
        together = b.emit(self.gradient, dout, out, *args)
        if len(args) == 1:
            return [together]
        found: list[int | None] = []
        start = 0
        for a in args:
            of = b.type(a)
            part = b.emit(pick_range, together, start=start, stop=start + of.size, dim=0)
            found.append(b.emit(reshape, part, shape=of.shape))
            start += of.size
        return found


class CustomGradient(Primitive):
    """The gradients of a `Custom` op's operands: of a single one as it is, of several as one vector, end to end.

    Its operands are the gradient of the result, the result, and the op's operands.

    Attributes:
        backward: ``backward(dout, out, *operands, *grads)``; None if there is none.
        cuda_backward: the same on a GPU.
        threads: as of the op.
    """

    writes_out = True

    def __init__(self, op_name: str, backward: Kernel | None, cuda_backward: Any, threads: int | None) -> None:
        self.name = f"{op_name} gradient"
        self.op_name = op_name
        self.backward = backward
        self.cuda_backward = cuda_backward
        self.threads = threads

    def infer(self, dout: Type, result: Type, *operands: Type) -> Type:
        return operands[0] if len(operands) == 1 else type_of((sum(t.size for t in operands),), dout.dtype)

    def numpy(self, dout: Array, result: Array, *operands: Array, out: Array | None = None) -> Array:  # type: ignore[override]
        read = (dout, result, *operands)
        rows = max(a.shape[0] for a in read)
        single = len(operands) == 1
        grads = [target(out if single else None, (rows, *x.shape[1:]), x.dtype) for x in operands]
        if rows:
            (self.backward or self._nothing)(*(as_rows(a, rows) for a in read), *grads)
        if single:
            return delivered(grads[0], out)
        return np.concatenate([g.reshape(rows, -1) for g in grads], axis=1, out=out)

    def _nothing(self, dout: Array, result: Array, *arrays: Array) -> None:
        """In place of a backward: no gradient of no gradient, which is all that comes from behind `nobackprop`."""
        if dout.any():
            raise CustomOpError(
                f"{user_line()}: {self.op_name} has no gradient, and one is needed here: give custom_op() a backward, "
                f"or let no gradient pass with nobackprop()"
            )
        for grad in arrays[len(arrays) // 2 :]:
            grad.fill(0)


def as_rows(array: Array, rows: int) -> Array:
    """An operand as kernels get it: C-contiguous, or one row that is seen ``rows`` times."""
    array = np.require(array, None, ["C", "W"])
    if array.shape[0] == rows:
        return array
    return np.lib.stride_tricks.as_strided(array, (rows, *array.shape[1:]), (0, *array.strides[1:]))


def target(out: Array | None, shape: tuple[int, ...], dtype: Any) -> Array:
    """Where a kernel writes: ``out`` itself where it is contiguous."""
    return out if out is not None and out.flags.c_contiguous else np.empty(shape, dtype)


def delivered(written: Array, out: Array | None) -> Array:
    """What was written, in ``out`` if there is one."""
    if out is None or out is written:
        return written
    out[...] = written
    return out
