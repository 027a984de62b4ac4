"""Generated CUDA kernels against the NumPy references of the ops that they were made from; see kernel_families.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from dynbatch.compiler.fuse_elementwise import Region
from dynbatch.compiler.ir import ROW, Program
from dynbatch.cuda import representative
from dynbatch.cuda.codegen import KernelSource, generate
from tests.compiler.small_programs import inputs, programs
from tests.cuda.device import SEEDS, Device, needs_compiler
from tests.kernel_families import (
    DTYPES,
    FAMILIES,
    Family,
    Known,
    Memory,
    check,
    check_draws,
    check_rows_are_independent,
    check_widths_share_a_text,
    extreme_inputs,
    lists,
    matrix_softmaxes,
    normalizations,
    random_inputs,
    reductions,
    softmaxes,
    two_lists,
)

pytestmark = needs_compiler

WIDTHS = [1, 2, 7, 8, 9, 33, 300]


def run_kernels(
    program: Program, known: Known, dtype: str, scattered: bool, seed: int = 0, stored: tuple[int, ...] = ()
) -> list[Any]:
    """Every value of a Program, those of regions by kernels."""
    device = Device(dtype, seed)

    def kernel(memory: Memory, region: Region) -> KernelSource:
        source = generate(program, region, dtype)
        over_elements = source.domain > ROW
        integers, arrays = memory.operands(source, (known["ptr", 1].size - 1,) if over_elements else ())
        integers += memory.results(source)
        count = memory.arrays[source.outputs[0]].shape[0]
        if source.scratch:
            integers.append(memory.top)
            assert memory.top + count * source.scratch <= memory.mem.size
        sizes = [np.int32(size) for size in source.sizes]
        handle = device.kernels.generated(source.text)
        device.run(handle, source.launch(count), memory.mem, count, *sizes, *map(int, integers), *arrays)
        return source

    memory = Memory(program, known, dtype, scattered)
    memory.run(kernel, stored)
    return memory.arrays


def run_together(program: Program, known: Known, dtype: str) -> list[Any]:
    """`run_kernels` of operands that follow each other."""
    return run_kernels(program, known, dtype, scattered=False)


def check_kernels(
    make: Callable[[Family], tuple[int, ...]],
    dtype: str,
    width: int,
    scattered: bool,
    known: Callable[[Program], Known],
    seed: int = 0,
) -> None:
    b = Family(dtype, width)
    program = b.finish(make(b), name=make.__name__)
    given = known(program)
    check(run_kernels(program, given, dtype, scattered, seed), program, given, dtype, width)


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", FAMILIES)
def test_kernels_equal_the_references(make: Any, dtype: str, scattered: bool) -> None:
    for width in WIDTHS:
        for rows in (1, 5):
            check_kernels(make, dtype, width, scattered, lambda p, r=rows, w=width: random_inputs(p, r, w))  # type: ignore[misc]


def test_kernels_of_cells() -> None:
    """Those of the report: of what models are made of, and of the gradients."""
    for _, program, stored in representative.programs():
        stored = tuple(v for v in stored if program.values[v].op is not None)
        known = random_inputs(program, 5, representative.SIZE)
        for scattered in (False, True):
            found = run_kernels(program, known, "float32", scattered, stored=stored)
            check(found, program, known, "float32", representative.SIZE, stored)


@settings(max_examples=15, deadline=None)
@given(programs())
def test_kernels_of_random_programs(program: Program) -> None:
    """Slices, concatenations and products among what kernels compute, lists, and values that all rows share."""
    known = inputs(program)
    check(run_kernels(program, known, "float64", scattered=True, seed=1), program, known, "float64", 3)


@pytest.mark.parametrize("seed", SEEDS[1:])
@pytest.mark.parametrize("make", FAMILIES)
def test_threads_may_run_in_any_order(make: Any, seed: int) -> None:
    for width in (7, 300):
        check_kernels(make, "float32", width, True, lambda p, w=width: random_inputs(p, 9, w), seed)  # type: ignore[misc]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [m for m in FAMILIES if m.__name__ not in ("matrices", "draws")])
def test_kernels_keep_nan_and_infinity(make: Any, dtype: str) -> None:
    """Rows in which one extreme value meets ordinary ones, and rows of that value alone.

    The mean of eight equal numbers is that number in every order of additions.
    """
    check_kernels(make, dtype, 8, True, lambda program: extreme_inputs(program, 8))


@pytest.mark.parametrize("make", [softmaxes, reductions, normalizations, matrix_softmaxes, lists, two_lists])
def test_a_row_depends_on_nothing_but_itself(make: Any) -> None:
    """Neither on the number of rows, nor on where it lies, nor on the order of threads."""

    def elsewhere(program: Program, known: Known, dtype: str) -> list[Any]:
        return run_kernels(program, known, dtype, scattered=True, seed=1)

    for width in (33, 300):
        check_rows_are_independent(make, width, run_together, elsewhere)


@pytest.mark.parametrize("make", [softmaxes, reductions, normalizations, matrix_softmaxes])
def test_no_rows(make: Any) -> None:
    b = Family("float32", 7)
    program = b.finish(make(b))
    found = run_kernels(program, random_inputs(program, 0, 7), "float32", scattered=True)
    assert all(found[v].shape[0] == 0 for v in program.outputs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_draws_are_the_same_numbers(dtype: str) -> None:
    check_draws(dtype, run_together)


def test_one_kernel_serves_all_widths() -> None:
    check_widths_share_a_text(generate)
