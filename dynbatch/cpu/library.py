"""What generated steps call and do not contain: compiled once for each precision, and called by address.

numba compiles what a function calls again with the function itself. A step is small beside the gathers and products
that it calls, so that this would be most of the time that compiling it takes.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import carray  # type: ignore[attr-defined]

from dynbatch.cpu import gather, products, team
from dynbatch.cpu.jit import c_function
from dynbatch.cpu.native import FAR


def _gather(mem, offsets, rows, column, width, start, stride):
    gather.gather(carray(mem, FAR), carray(offsets, rows), column, width, start, stride)


def _gather_columns(mem, offsets, rows, columns, width, start, stride):
    gather.gather_columns(carray(mem, FAR), carray(offsets, rows), columns, width, start, stride)


def _gather_from(data, offsets, rows, width, mem, start):
    gather.gather_from(carray(data, FAR), carray(offsets, rows), width, carray(mem, FAR), start)


def _lookup_rows(table, indices, rows, width, mem, start, stride):
    gather.lookup_rows(carray(table, FAR), carray(indices, rows), width, carray(mem, FAR), start, stride)


def _copy_rows(mem, source, source_stride, rows, width, start, stride):
    gather.copy_rows(carray(mem, FAR), source, source_stride, rows, width, start, stride)


def _sum_edges(mem, first, rows, output, ptr, edges, edge_location, width, start):
    return gather.sum_edges(
        carray(mem, FAR), carray(first, rows), output, carray(ptr, FAR), carray(edges, FAR),
        carray(edge_location, FAR), width, start,
    )  # fmt: skip


def _multiply(mem, x, x_stride, rows, factor, out, out_stride):
    products.multiply(carray(mem, FAR), x, x_stride, rows, carray(factor, products.FIELDS), out, out_stride)


def _run_rows(team_address, function, job, size):
    team.run_rows(team_address, function, job, size)


_INTEGERS = "CPointer(int64)"
FUNCTIONS: dict[str, tuple[Any, str]] = {
    "gather": (_gather, f"void(X, {_INTEGERS}, int64, int64, int64, int64, int64)"),
    "gather_columns": (_gather_columns, f"void(X, {_INTEGERS}, int64, int64, int64, int64, int64)"),
    "gather_from": (_gather_from, f"void(X, {_INTEGERS}, int64, int64, X, int64)"),
    "lookup_rows": (_lookup_rows, f"void(X, {_INTEGERS}, int64, int64, X, int64, int64)"),
    "copy_rows": (_copy_rows, "void(X, int64, int64, int64, int64, int64, int64)"),
    "sum_edges": (
        _sum_edges, f"int64(X, {_INTEGERS}, int64, int64, {_INTEGERS}, {_INTEGERS}, {_INTEGERS}, int64, int64)",
    ),
    "multiply": (_multiply, f"void(X, int64, int64, int64, {_INTEGERS}, int64, int64)"),
    "run_rows": (_run_rows, "void(int64, int64, int64, int64)"),
}  # fmt: skip
"""By name, what is compiled, and its signature where ``X`` is a pointer to elements. It is the function of that name of
`dynbatch.cpu.gather`, `dynbatch.cpu.products` or `dynbatch.cpu.team`, with an array given by its address and, where the
function asks how long it is, its size."""


def address(name: str, dtype: str) -> int:
    """Where a function lies, for ``float32`` or ``float64``; compiled when it is first asked for."""
    return int(_compiled(name, dtype).address)


@functools.cache
def _compiled(name: str, dtype: str) -> Any:
    function, signature = FUNCTIONS[name]
    return c_function(function, signature.replace("X", f"CPointer({dtype})"), error_model="numpy", boundscheck=False)
