"""Products: matrix product, its reduction over a batch (a weight's gradient), transpose.

One primitive covers the shared matrix (one GEMM over the rows of the batch), the per-instance matrix (a batched
product), and their transposes; which one runs is seen from the operands' leading axes.
"""

from __future__ import annotations

import numpy as np

from dynbatch.compiler.ir import Builder
from dynbatch.cpu.products import product
from dynbatch.errors import ShapeError
from dynbatch.ops.primitive import Array, Primitive
from dynbatch.types import Type, type_of


def _matrix_shape(t: Type, transposed: bool) -> tuple[int, int]:
    rows, cols = t.shape if len(t.shape) == 2 else (t.shape[0], 1)
    return (cols, rows) if transposed else (rows, cols)


def _as_matrix(x: Array, transposed: bool) -> Array:
    """Storage of the (possibly transposed) matrix, a vector being one column."""
    if x.ndim == 2:
        x = x[:, None, :]
    return x.swapaxes(1, 2) if transposed else x


class MatMul(Primitive):
    """``a * b`` for matrices, or a matrix and a vector; ``ta`` and ``tb`` transpose them first.

    In storage order the product is ``b @ a``. ``vector`` says that the result is a vector.
    """

    name = "matmul"
    writes_out = True

    def infer(self, a: Type, b: Type, ta: bool = False, tb: bool = False, vector: bool = False) -> Type:
        for t in (a, b):
            if len(t.shape) > 2:
                raise ShapeError(f"matrix product: operands must be vectors or matrices, not {a.shape} and {b.shape}")
        (m, k), (k2, n) = _matrix_shape(a, ta), _matrix_shape(b, tb)
        if k != k2:
            hint = ""
            if len(a.shape) == 1 and len(b.shape) == 1:
                hint = "; two vectors: use cmult for the elementwise product, dot_product for the inner product"
            raise ShapeError(f"matrix product: shapes {a.shape} and {b.shape} do not fit{hint}")
        return type_of((m,) if vector else (m, n), a.dtype)

    def numpy(  # type: ignore[override]
        self, a: Array, b: Array, ta: bool = False, tb: bool = False, vector: bool = False, out: Array | None = None
    ) -> Array:
        x, m = _as_matrix(b, tb), _as_matrix(a, ta)  # (r, n, k) and (r, k, m)
        rows = max(a.shape[0], b.shape[0])
        n, k, width = x.shape[1], x.shape[2], m.shape[2]
        in_place = out is not None and (out.flags.c_contiguous or (vector and m.shape[0] == 1))
        if m.shape[0] == 1:
            result = product(x.reshape(-1, k), m[0], out=out.reshape(-1, width) if in_place else None)  # type: ignore[union-attr]
        else:
            result = np.matmul(x, m, out=out.reshape(rows, n, width) if in_place else None)  # type: ignore[union-attr]
        if in_place:
            return out  # type: ignore[return-value]
        result = result.reshape(rows, width) if vector else result.reshape(rows, n, width)
        if out is not None:
            out[...] = result
        return result

    def vjp(  # type: ignore[override]
        self,
        b: Builder,
        args: tuple[int, ...],
        out: int,
        dout: int,
        ta: bool = False,
        tb: bool = False,
        vector: bool = False,
    ) -> list[int | None]:
        left, right = args
        flat_left, flat_right = (len(b.type(v).shape) == 1 for v in args)
        if ta:
            da = b.emit(matmul, right, dout, ta=tb, tb=True, vector=flat_left)
        else:
            da = b.emit(matmul, dout, right, ta=False, tb=not tb, vector=flat_left)
        if tb:
            db = b.emit(matmul, dout, left, ta=True, tb=ta, vector=flat_right)
        else:
            db = b.emit(matmul, left, dout, ta=not ta, tb=False, vector=flat_right)
        return [da, db]


class MatMulRows(Primitive):
    """The sum over the batch of `MatMul`: one GEMM over all rows."""

    name = "matmul_rows"
    reduces = "rows"

    def infer(self, a: Type, b: Type, ta: bool = False, tb: bool = False, vector: bool = False) -> Type:
        return matmul.infer(a, b, ta, tb, vector)

    def numpy(self, a: Array, b: Array, ta: bool = False, tb: bool = False, vector: bool = False) -> Array:  # type: ignore[override]
        x, m = _as_matrix(b, tb), _as_matrix(a, ta)
        rows = max(a.shape[0], b.shape[0])
        x, m = (np.broadcast_to(v, (rows, *v.shape[1:])) if v.shape[0] != rows else v for v in (x, m))
        if x.shape[2] == 1 and m.shape[1] == 1:  # the common case, an outer product for each row: no copies
            result = product(x[:, :, 0].T, m[:, 0, :])
        else:
            left = x.transpose(1, 0, 2).reshape(x.shape[1], -1)
            result = product(left, m.reshape(-1, m.shape[2]))
        return result[None, 0] if vector else result[None]


class TableProduct(Primitive):
    """A matrix times every row of a lookup parameter, as a table; see `dynbatch.compiler.multiply_tables`."""

    name = "table_product"

    def infer(self, weight: Type, table: Type) -> Type:
        return type_of((weight.shape[0],), table.dtype)

    def numpy(self, weight: Array, table: Array) -> Array:  # type: ignore[override]
        return product(table, weight[0])


class Transpose(Primitive):
    """Swap the two dimensions of a matrix (a vector is one column)."""

    name = "transpose"

    def infer(self, x: Type) -> Type:
        if len(x.shape) > 2:
            raise ShapeError(f"transpose: expected a vector or a matrix, not shape {x.shape}")
        rows, cols = _matrix_shape(x, True)
        return type_of((rows, cols), x.dtype)

    def numpy(self, x: Array) -> Array:  # type: ignore[override]
        return _as_matrix(x, True)

    def vjp(self, b: Builder, args: tuple[int, ...], out: int, dout: int) -> list[int | None]:  # type: ignore[override]
        from dynbatch.ops.shape import reshape

        shape = b.type(args[0]).shape
        back = b.emit(transpose, dout)
        return [back if b.type(back).shape == shape else b.emit(reshape, back, shape=shape)]


matmul = MatMul()
matmul_rows = MatMulRows()
table_product = TableProduct()
transpose = Transpose()
