"""Who multiplies a weight with vectors that are scattered: cuBLAS from a gathered copy, or a kernel that gathers.

Which is faster depends on shape, number of rows and device; it is measured when a shape is met first, kept as
`dynbatch.cpu.profile` says, and part of checkpoints. ``DYNBATCH_CUDA_PRODUCT`` decides instead where it is ``cublas``
or ``gather``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from dynbatch.cpu import profile
from dynbatch.cuda import launches
from dynbatch.cuda.job import NULL, DeviceJob, Rows
from dynbatch.cuda.sources import Kernels
from dynbatch.errors import ConfigurationError

_CHOICES = ("auto", "cublas", "gather")
_TIMES = 20
"""Products behind each other in one measurement, so that launching does not decide."""


def multiply_gathered(
    job: DeviceJob, x: Rows, weight: int, count: int, inner: int, width: int, transposed: bool, place: int, stride: int
) -> None:
    """Append ``out[r] = x[r] @ weight`` for rows that are found through their places.

    Arguments:
        x: the vectors, of ``inner`` elements.
        weight: address of the matrix, ``inner`` rows of ``width``, or where it is transposed, the other way round.
        count: number of rows, at least 1.
        place, stride: where the results go.
    """
    if choose(job.kernels, count, inner, width, transposed) == "gather":
        name, launch = launches.gather_product(count, width)
        job.launch(
            name, launch, np.int64(count), np.int64(place), np.int64(stride), *x, np.uint64(weight), np.int32(inner),
            np.int32(width), np.int32(transposed),
        )  # fmt: skip
        return
    start = job.arena.scratch(count * inner)
    job.gathered += count * inner
    job.copy(x, count, inner, start, inner)
    item, lead = job.arena.itemsize, inner if transposed else width
    job.multiply(
        -1, False, transposed, count, width, inner, 1.0, start * item, inner, weight, lead, 0.0, place * item, stride
    )


def choose(kernels: Kernels, count: int, inner: int, width: int, transposed: bool) -> str:
    """``cublas`` or ``gather``.

    Raises:
        ConfigurationError: ``DYNBATCH_CUDA_PRODUCT`` is neither of them, nor ``auto``.
    """
    wanted = os.environ.get("DYNBATCH_CUDA_PRODUCT") or "auto"
    if wanted not in _CHOICES:
        raise ConfigurationError(f"DYNBATCH_CUDA_PRODUCT={wanted!r}: choose one of {', '.join(_CHOICES)}")
    if wanted != "auto":
        return wanted
    rows = 1 << (count - 1).bit_length()  # measured for powers of two, from which others do not differ by much
    key = (count.bit_length(), rows, inner, width, transposed)
    known = kernels.choices.get(key)
    if known is None:
        shape = f"{kernels.dtype} {rows} x {inner} x {width}{' transposed' if transposed else ''}"
        candidates = {
            name: _Timed(kernels, name, rows, inner, width, transposed).prepare for name in ("cublas", "gather")
        }
        known = profile.answer(f"gathered product on {kernels.driver.properties.name}: {shape}", candidates)
        kernels.choices[key] = known
    return known


class _Timed:
    """One way to multiply, to be timed on rows in memory of its own."""

    def __init__(self, kernels: Kernels, name: str, rows: int, inner: int, width: int, transposed: bool) -> None:
        self._kernels, self._name = kernels, name
        self._rows, self._inner, self._width, self._transposed = rows, inner, width, transposed
        self._memory: list[int] = []

    def __del__(self) -> None:
        for address in self._memory:
            self._kernels.driver.discard(address)

    def prepare(self) -> Callable[[], None]:
        """A function that multiplies some times, and waits."""
        driver, item = self._kernels.driver, np.dtype(self._kernels.dtype).itemsize
        rows, inner, width = self._rows, self._inner, self._width
        sizes = (rows * inner * item, rows * inner * item, inner * width * item, rows * width * item, rows * 8)
        self._memory = [driver.allocate(size) for size in sizes]
        for address, size in zip(self._memory, sizes):
            driver.fill(address, 0, size)
        x, gathered, weight, out, offsets = self._memory
        driver.upload(offsets, np.random.default_rng(0).permutation(rows) * inner)
        vector = launches.vector(self._kernels.dtype)
        steps: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        if self._name == "gather":
            name, launch = launches.gather_product(rows, width)
            args: tuple[Any, ...] = (
                NULL, np.int64(rows), np.int64(out // item), np.int64(width), np.uint64(x), np.uint64(offsets),
                np.int64(0), np.int64(0), np.uint64(weight), np.int32(inner), np.int32(width),
                np.int32(self._transposed),
            )  # fmt: skip
            steps.append((driver.launch, (self._kernels.fixed(name), launch.grid, launch.block, 0, args)))
        else:
            launch = launches.teams(rows, inner, vector)
            args = (
                NULL, np.int64(rows), np.int32(inner), np.int64(gathered // item), np.int64(inner), np.uint64(x),
                np.uint64(offsets), np.int64(0),
            )  # fmt: skip
            steps.append((driver.launch, (self._kernels.fixed("gather"), launch.grid, launch.block, 0, args)))
            lead = inner if self._transposed else width
            steps.append(
                (driver.gemm, (
                    self._kernels.dtype, False, self._transposed, rows, width, inner, 1.0, gathered, inner, weight,
                    lead, 0.0, out, width,
                ))
            )  # fmt: skip

        def run() -> None:
            for _ in range(_TIMES):
                for function, given in steps:
                    function(*given)
            driver.synchronize()

        return run
