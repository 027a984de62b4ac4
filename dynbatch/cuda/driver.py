"""What the CUDA backend asks of a device: memory, modules, launches, products, events and graphs; nothing more.

There are two implementations: `dynbatch.cuda.cupy_driver` for GPUs, and the tests' emulator, which runs the same
kernels on the CPU. Nothing else in this package knows CuPy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

LAUNCH_TYPES = (np.int32, np.int64, np.float32, np.float64, np.uint64)
"""The types of launch arguments, of which ``np.uint64`` is an address; a kernel's parameter must be of the same."""


@dataclass(frozen=True)
class Properties:
    """What a device is.

    Attributes:
        name: of the product.
        capability: compute capability, as (9, 0).
        memory: in bytes.
        multiprocessors: how many.
        shared_memory: the most bytes of it that a block can have, static and dynamic together.
    """

    name: str
    capability: tuple[int, int]
    memory: int
    multiprocessors: int
    shared_memory: int


@dataclass(frozen=True)
class PoolUsage:
    """Bytes of device memory: in use by allocations, and held by the pool (in use or kept for the next ones)."""

    used: int
    held: int


class Driver(ABC):
    """One device. What is asked of it happens in that order, on one stream, while Python goes on.

    An address is an integer: what `allocate` returned, plus an offset in bytes. Calls that wait for the device are
    `download`, `synchronize` and `elapsed`; they also raise the errors of what ran before them.

    Attributes:
        properties: of the device.
        red_zone: how many bytes a pool should leave free between two tensors, and `poison`; 0 for none.

    Raises:
        DeviceError: a launch that the device refuses, or a fault while a kernel ran.
    """

    properties: Properties
    red_zone: int = 0

    def __init__(self) -> None:
        self._discarded: deque[int] = deque()

    def session(self) -> AbstractContextManager[Any]:
        """Many calls from this thread behind each other: within, each costs less."""
        return nullcontext()

    def discard(self, address: int) -> None:
        """Free an allocation with the next `free_discarded`: for finalizers, which run at any moment."""
        self._discarded.append(address)

    def free_discarded(self) -> None:
        """Give back what was discarded; before a plan, or memory of parameters, is asked for."""
        while self._discarded:
            self.free(self._discarded.popleft())

    @abstractmethod
    def allocate(self, nbytes: int) -> int:
        """Address of that much memory, a multiple of 256; what it holds is undefined.

        Raises:
            OutOfMemoryError: says how much was wanted, what the pool holds and what the device has.
        """

    @abstractmethod
    def free(self, address: int) -> None:
        """Give an allocation back to the pool, which may hand it out to whatever is asked for next."""

    @abstractmethod
    def pool_usage(self) -> PoolUsage:
        """How much memory is allocated."""

    @abstractmethod
    def trim_pool(self) -> None:
        """Return what the pool keeps for later allocations to the system."""

    @abstractmethod
    def poison(self, address: int, nbytes: int) -> None:
        """Nothing may read or write these bytes until `unpoison`; only the emulator watches over it."""

    @abstractmethod
    def unpoison(self, address: int, nbytes: int) -> None:
        """These bytes are memory again; what they hold is undefined."""

    @abstractmethod
    def upload(self, address: int, array: np.ndarray) -> None:
        """Copy a C-contiguous array to the device; it may be changed once this returns."""

    @abstractmethod
    def download(self, address: int, out: np.ndarray) -> None:
        """Copy from the device into a C-contiguous array, after everything that was asked for before."""

    @abstractmethod
    def fill(self, address: int, byte: int, nbytes: int) -> None:
        """Set each byte."""

    @abstractmethod
    def module(self, source: str) -> Module:
        """Compile CUDA C, or take it from a cache.

        Raises:
            CompileError: with the compiler's messages.
        """

    @abstractmethod
    def launch(
        self, kernel: Any, grid: tuple[int, int, int], block: tuple[int, int, int], shared: int, args: Sequence[Any]
    ) -> None:
        """Run a kernel.

        Arguments:
            kernel: from `Module.kernel`.
            grid, block: blocks in the grid and threads in a block, by x, y and z.
            shared: bytes of dynamic shared memory.
            args: NumPy scalars of `LAUNCH_TYPES`.
        """

    @abstractmethod
    def launch_with(self, name: str, launcher: Callable[..., None], *args: Any) -> None:
        """Have another library launch a kernel on this stream.

        Arguments:
            name: of the kernel, for errors.
            launcher: it is called with the index of the device, the handle of the stream, and ``args``.
        """

    @abstractmethod
    def gemm(
        self, dtype: str, trans_a: bool, trans_b: bool, m: int, n: int, k: int,
        alpha: float, a: int, lda: int, b: int, ldb: int, beta: float, c: int, ldc: int,
    ) -> None:  # fmt: skip
        """``C = alpha op(A) op(B) + beta C``, all row-major, with C of shape (m, n) and an inner dimension of k.

        Arguments:
            dtype: ``"float32"`` or ``"float64"``.
            trans_a, trans_b: whether A lies as (k, m) and B as (n, k), instead of (m, k) and (k, n).
            a, b, c: addresses.
            lda, ldb, ldc: elements from one row, as it lies, to the next.
            alpha, beta: where beta is 0, C is not read.
        """

    @abstractmethod
    def gemm_strided_batched(
        self, dtype: str, trans_a: bool, trans_b: bool, m: int, n: int, k: int,
        alpha: float, a: int, lda: int, stride_a: int, b: int, ldb: int, stride_b: int,
        beta: float, c: int, ldc: int, stride_c: int, count: int,
    ) -> None:  # fmt: skip
        """`gemm` for ``count`` triples of matrices, whose beginnings are the strides apart, in elements.

        A stride of 0 takes the same A or B every time.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything that was asked for has been done."""

    @abstractmethod
    def record_event(self) -> Any:
        """A mark behind what was asked for so far."""

    @abstractmethod
    def elapsed(self, start: Any, end: Any) -> float:
        """Seconds between two events, once both have been reached."""

    @abstractmethod
    def begin_capture(self) -> None:
        """From here on launches, `fill` and both products are recorded instead of run; nothing else is allowed."""

    @abstractmethod
    def end_capture(self) -> Any:
        """The graph of what was recorded: the same kernels, with the same arguments and addresses."""

    @abstractmethod
    def launch_graph(self, graph: Any) -> None:
        """Run what was recorded."""


class Module(ABC):
    """Compiled CUDA C."""

    @abstractmethod
    def kernel(self, name: str) -> Any:
        """An ``extern "C" __global__`` function, for `Driver.launch`.

        Raises:
            KeyError: there is none of this name.
        """


def check_contiguous(array: np.ndarray) -> None:
    """What is copied as it lies must be C-contiguous.

    Raises:
        ValueError: it is not.
    """
    if not array.flags.c_contiguous:
        raise ValueError(
            f"only C-contiguous arrays are copied, not one of shape {array.shape}, strides {array.strides}"
        )
