"""CUDA C of one elementwise op over values of up to four dimensions that broadcast against each other in any way.

Fused kernels have two loops and take most of what there is; this is for the rest.
"""

from __future__ import annotations

from dynbatch.cuda.codegen import formula
from dynbatch.ops.primitive import Elementwise


def broadcasting(op: Elementwise) -> str:
    """The text of the kernel, which goes behind that of ``kernels/common.cuh``; a thread computes an element.

    Its arguments are the memory, the number of rows, start and step of the result's rows, the four sizes of the
    result, and for each operand where its rows lie (``OPERAND`` in ``common.cuh``) and its four strides, which are 0
    where it stretches.
    """
    operands = "".join(f", OPERAND({x}), FOUR(integer, {x}s)" for x in op.operands)
    terms = {x: f"ROW_OF({x}, r)[place_of(i, GIVEN(n), GIVEN({x}s))]" for x in op.operands}
    return f"""extern "C" __global__ void kernel(real* mem, integer rows, integer start, integer step,
                                  FOUR(int, n){operands}) {{
    ROW_AND_ELEMENT(r, i, n0 * n1 * n2 * n3);
{"".join(f"    const real {x}_here = {term};{chr(10)}" for x, term in terms.items())}\
    mem[start + r * step + i] = {formula(op.formula, {x: f"{x}_here" for x in op.operands})};
}}
"""
