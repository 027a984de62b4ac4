"""Generated kernels, called as they are, against the NumPy references of the ops that they were made from.

Each is compiled once a dtype and serves all widths. Width one is a scalar, and so has kernels of its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dynbatch.compiler.fuse_elementwise import Region, fuse_elementwise
from dynbatch.compiler.ir import Program
from dynbatch.cpu import kernels
from dynbatch.cpu.codegen import KernelSource, generate
from dynbatch.ops import segment, shape
from tests.kernel_families import (
    DTYPES,
    FAMILIES,
    ROWS,
    WIDTHS,
    Family,
    Known,
    Memory,
    check,
    check_draws,
    check_rows_are_independent,
    check_widths_share_a_text,
    extreme_inputs,
    lists,
    matrix_maxima,
    matrix_softmaxes,
    normalizations,
    random_inputs,
    reductions,
    softmaxes,
    two_lists,
)


def call(text: str, mem: np.ndarray, rows: int, *args: Any) -> None:
    """Call a kernel, as compiled steps do: its rows are one chunk of a job."""
    job = [mem.ctypes.data, rows, rows]
    for arg in args:
        job += [arg.ctypes.data, arg.size] if isinstance(arg, np.ndarray) else [arg]
    kernels.load(text)["kernel"].ctypes((ctypes.c_int64 * len(job))(*job), 0)


def run_kernels(program: Program, known: Known, dtype: str, scattered: bool) -> list[Any]:
    """Every value of a Program, those of regions by kernels."""

    def kernel(memory: Memory, region: Region) -> KernelSource:
        source = generate(program, region, dtype)
        integers, arrays = memory.operands(source)
        numbers = [*integers, *memory.results(source)]
        whole = source.domain == region.domain
        count = memory.arrays[source.outputs[0]].shape[0] if whole else known["ptr", 1].size - 1
        call(source.text, memory.mem, count, *source.sizes, *numbers, *arrays)
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
@pytest.mark.parametrize(
    "make", [softmaxes, reductions, normalizations, matrix_maxima, matrix_softmaxes, lists, two_lists]
)
def test_kernels_keep_nan_and_infinity(make: Any, dtype: str) -> None:
    """Rows in which one extreme value meets ordinary ones, and rows of that value alone."""
    check_kernels(make, dtype, 7, extreme_inputs)


def run_together(program: Program, known: Known, dtype: str) -> list[Any]:
    """`run_kernels` of operands that follow each other."""
    return run_kernels(program, known, dtype, scattered=False)


def test_a_row_does_not_depend_on_the_number_of_rows() -> None:
    for make in (softmaxes, normalizations, lists):
        check_rows_are_independent(make, 33, run_together, run_together)


@pytest.mark.parametrize("dtype", DTYPES)
def test_draws_are_the_same_numbers(dtype: str) -> None:
    check_draws(dtype, run_together)


def test_one_kernel_serves_all_widths() -> None:
    check_widths_share_a_text(generate)
