"""Generated kernels, called as they are, against the NumPy references of the ops that they were made from.

Each is compiled once a dtype and serves all widths. Width one is a scalar, and so has kernels of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dynbatch.compiler.fuse_elementwise import Region, fuse_elementwise
from dynbatch.compiler.ir import Program
from dynbatch.cpu import kernels
from dynbatch.cpu.codegen import KernelSource, generate
from dynbatch.ops import random, segment, shape
from tests.kernel_families import (
    DTYPES,
    FAMILIES,
    ROWS,
    WIDTHS,
    Family,
    Known,
    Memory,
    check,
    extreme_inputs,
    first_rows,
    lists,
    matrix_maxima,
    matrix_softmaxes,
    normalizations,
    random_inputs,
    reductions,
    references,
    softmaxes,
)


def call(text: str, *args: Any) -> None:
    """Call a kernel, as compiled steps do."""
    step = f"""
from dynbatch.cpu.jit import jit

# kernel0 is {kernels.digest(text)}


@jit(error_model="numpy")
def step(*args):
    kernel0(*args)
"""
    kernels.load(step, {"kernel0": text})["step"](*args)


def run_kernels(program: Program, known: Known, dtype: str, scattered: bool) -> list[Any]:
    """Every value of a Program, those of regions by kernels."""

    def kernel(memory: Memory, region: Region) -> KernelSource:
        source = generate(program, region, dtype)
        integers, arrays = memory.operands(source)
        numbers = [*integers, *memory.results(source)]
        whole = source.domain == region.domain
        count = memory.arrays[source.outputs[0]].shape[0] if whole else known["ptr", 1].size - 1
        call(source.text, memory.mem, 0, count, *source.sizes, *numbers, *arrays)
        return source

    memory = Memory(program, known, dtype, scattered)
    memory.run(kernel)
    return memory.arrays


def check_kernels(
    make: Callable[[Family], tuple[int, ...]], dtype: str, width: int, known: Callable[[Program], Known]
) -> None:
    b = Family(dtype, width)
    program = b.finish(make(b), name=make.__name__)
    given = known(program)
    check(run_kernels(program, given, dtype, scattered=width % 2 == 1), program, given, dtype, width)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", FAMILIES)
def test_kernels_equal_the_references(make: Any, dtype: str) -> None:
    for width in WIDTHS:
        for rows in ROWS:
            check_kernels(make, dtype, width, lambda p, rows=rows, width=width: random_inputs(p, rows, width))  # type: ignore[misc]


@pytest.mark.parametrize("make", FAMILIES)
def test_nothing_runs_alone(make: Any) -> None:
    """Every op here has a form for kernels, but for the mask that compares list elements."""
    b = Family("float32", 7)
    program = b.finish(make(b))
    schedule = fuse_elementwise(program, (), program.outputs)
    alone = {program.values[item].op for item in schedule if not isinstance(item, Region)}
    assert alone <= {shape.reshape, segment.segment_first}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [softmaxes, reductions, normalizations, matrix_maxima, matrix_softmaxes, lists])
def test_kernels_keep_nan_and_infinity(make: Any, dtype: str) -> None:
    """Rows in which one extreme value meets ordinary ones, and rows of that value alone."""
    check_kernels(make, dtype, 7, extreme_inputs)


def test_a_row_does_not_depend_on_the_number_of_rows() -> None:
    for make in (softmaxes, normalizations, lists):
        b = Family("float32", 33)
        program = b.finish(make(b))
        known = random_inputs(program, 5, 33)
        everything = run_kernels(program, known, "float32", scattered=False)
        few = first_rows(program, known, 2)
        some = run_kernels(program, few, "float32", scattered=False)
        for v in program.outputs:
            np.testing.assert_array_equal(some[v], everything[v][: some[v].shape[0]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_draws_are_the_same_numbers(dtype: str) -> None:
    """Uniform numbers to the last bit: dropout drops the same elements in both tiers."""
    b = Family(dtype, 33)
    program = b.finish((b.emit(random.uniform, b.index, shape=(33,), salt=3, dtype=dtype),))
    known = {("int", 0): np.array([0, 1, -1, 2**62, -(2**63)])}
    found = run_kernels(program, known, dtype, scattered=False)
    np.testing.assert_array_equal(found[program.outputs[0]], references(program, known)[program.outputs[0]])


def test_one_kernel_serves_all_widths() -> None:
    texts = set()
    for width in (2, 64):
        b = Family("float32", width)
        program = b.finish(normalizations(b))
        (region,) = fuse_elementwise(program, (), program.outputs)
        texts.add(generate(program, region, "float32").text)  # type: ignore[arg-type]
    assert len(texts) == 1
