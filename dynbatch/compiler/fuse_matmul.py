"""Horizontal fusion: products that share their inputs become one product over stacked matrices.

``b + W1 x + W2 h`` for several gates over the same ``x`` and ``h`` becomes one product of the stacked matrices with
``x`` and ``h`` put one after the other; the gates are slices of its result. The stacking depends on parameters alone,
so it runs once a parameter version, not once a batch.
"""

from __future__ import annotations

from typing import NamedTuple

from dynbatch.compiler.ir import SHARED, Program
from dynbatch.compiler.rewrite import Rewriter
from dynbatch.ops.elementwise import add
from dynbatch.ops.linear import matmul
from dynbatch.ops.shape import concatenate, pick_range


class _Sum(NamedTuple):
    """A sum of products with shared matrices, and of other terms."""

    root: int
    factors: tuple[tuple[int, int], ...]  # (matrix, input), in order of the inputs
    rest: tuple[int, ...]

    @property
    def inputs(self) -> tuple[int, ...]:
        return tuple(x for _, x in self.factors)


def fuse_matmul(program: Program) -> Program:
    """The Program with products over the same inputs stacked; unchanged where there is nothing to stack."""
    groups: dict[tuple[object, ...], list[_Sum]] = {}
    for found in _sums(program):
        key = (program.values[found.root].domain, found.inputs)
        groups.setdefault(key, []).append(found)
    stacked = [g for g in groups.values() if len(g) > 1 or len(g[0].inputs) > 1]
    if not stacked:
        return program
    group_of = {s.root: g for g in stacked for s in g}
    rewriter = Rewriter(program)
    parts: dict[int, int] = {}
    shared = [v for v, x in enumerate(program.values) if x.domain == SHARED]
    for v in shared:  # first, since a stack needs the matrices of all its products
        rewriter.copy(v)
    for v in range(len(program.values)):
        if v not in group_of:
            rewriter.copy(v)
            continue
        group = group_of[v]
        if v not in parts:
            parts.update(_stack(rewriter, group))
        result = parts[v]
        for term in next(s for s in group if s.root == v).rest:
            result = rewriter.emit(add, result, rewriter.new[term])
        rewriter.new[v] = result
    return rewriter.result()


def _stack(rewriter: Rewriter, group: list[_Sum]) -> dict[int, int]:
    """Emit one product for the group; the value that holds each sum's products."""
    new = rewriter.new
    inputs = [new[x] for x in group[0].inputs]
    x = inputs[0] if len(inputs) == 1 else rewriter.emit(concatenate, *inputs, dim=0)
    blocks = []
    for found in group:
        matrices = [new[w] for w, _ in found.factors]
        blocks.append(matrices[0] if len(matrices) == 1 else rewriter.emit(concatenate, *matrices, dim=1))
    stack = blocks[0] if len(blocks) == 1 else rewriter.emit(concatenate, *blocks, dim=0)
    product = rewriter.emit(matmul, stack, x, vector=True)
    if len(group) == 1:
        return {group[0].root: product}
    result: dict[int, int] = {}
    start = 0
    for found, block in zip(group, blocks):
        rows = rewriter.type(block).shape[0]
        result[found.root] = rewriter.emit(pick_range, product, start=start, stop=start + rows, dim=0)
        start += rows
    return result


def is_weight_product(program: Program, v: int) -> bool:
    """Whether value ``v`` is the product of a shared matrix with a vector that is not shared."""
    value = program.values[v]
    if value.op is not matmul or dict(value.attrs).get("ta") or dict(value.attrs).get("tb"):
        return False
    matrix, x = (program.values[a] for a in value.args)
    vector = len(x.type.shape) == 1 and len(matrix.type.shape) == 2  # type: ignore[union-attr]
    return vector and matrix.domain == SHARED and x.domain != SHARED


def _sums(program: Program) -> list[_Sum]:
    """The largest sums with products of a shared matrix and a vector, each product used only there."""
    values = program.values
    uses = [0] * len(values)
    for value in values:
        for a in value.args:
            uses[a] += 1
    for v in (*program.outputs, *(r[2] for r in program.results)):
        uses[v] += 1

    inside: set[int] = set()
    found = []
    for root in range(len(values) - 1, -1, -1):
        if (
            root in inside
            or values[root].domain == SHARED
            or not (values[root].op is add or is_weight_product(program, root))
        ):
            continue
        products, rest, stack = [], [], [root]
        while stack:
            v = stack.pop()
            value = values[v]
            same = value.type is values[root].type and value.domain == values[root].domain
            if same and is_weight_product(program, v) and (uses[v] == 1 or v == root):
                products.append(v)
            elif same and value.op is add and (uses[v] == 1 or v == root):
                stack += value.args[::-1]
            else:
                rest.append(v)
                continue
            inside.add(v)
        if products:
            factors = sorted(((values[p].args[0], values[p].args[1]) for p in products), key=lambda f: f[1])
            if len({x for _, x in factors}) == len(factors):
                found.append(_Sum(root, tuple(factors), tuple(rest)))
    return found[::-1]
