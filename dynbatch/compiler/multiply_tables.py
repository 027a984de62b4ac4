"""Products with the rows of small tables: the whole table is multiplied once, and the rows of the result are looked up.

``W * E[i]`` is row ``i`` of a table with the rows ``W * e``, which depends on parameters alone: it is computed once a
parameter version, and a batch only looks up. That pays where a table has few rows, and where parameters do not change,
as when a model is used; so it is for forward passes without a gradient.
"""

from __future__ import annotations

from dynbatch.compiler.fuse_matmul import is_weight_product
from dynbatch.compiler.ir import Program
from dynbatch.compiler.rewrite import Rewriter
from dynbatch.ops.indexing import lookup
from dynbatch.ops.linear import table_product

MOST_ROWS = 1024
"""Of a table that is multiplied as a whole: so much that a few minibatches look up as many rows."""


def multiply_tables(program: Program) -> Program:
    """The Program with such products looked up; unchanged where there are none."""
    if not any(_is_looked_up(program, v) for v in range(len(program.values))):
        return program
    rewriter = Rewriter(program)
    for v, value in enumerate(program.values):
        if not _is_looked_up(program, v):
            rewriter.copy(v)
            continue
        weight, row = value.args
        table, index = program.values[row].args
        products = rewriter.emit(table_product, rewriter.new[weight], rewriter.new[table])
        rewriter.new[v] = rewriter.emit(lookup, products, rewriter.new[index])
    return rewriter.result()


def _is_looked_up(program: Program, v: int) -> bool:
    """Whether value ``v`` is the product of a shared matrix with a vector that is looked up in a parameter."""
    if not is_weight_product(program, v):
        return False
    row = program.values[program.values[v].args[1]]
    return row.op is lookup and program.values[row.args[0]].kind == "table"
