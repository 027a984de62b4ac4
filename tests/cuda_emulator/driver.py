"""The emulator's `Driver`: addresses are those of the host, and everything has been done when a call returns."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dynbatch.cuda.driver import LAUNCH_TYPES, Driver, Module, PoolUsage, Properties, check_contiguous
from dynbatch.errors import ConfigurationError, DeviceError
from tests.cuda_emulator import build
from tests.cuda_emulator.memory import Memory, view

_MOST_THREADS, _MOST_LAYERS = 1024, 64  # of a block; its z
_MOST_BLOCKS = (2**31 - 1, 65535, 65535)
_SHARED = 48 << 10  # bytes that every GPU has
_LETTERS = dict(zip(LAUNCH_TYPES, "ilfdp"))
_FORMATS = {"i": "i4x", "l": "q", "f": "f4x", "d": "d", "p": "Q"}  # eight bytes each
_NAMES = {"i": "a 32-bit integer", "l": "a 64-bit integer", "f": "a float", "d": "a double", "p": "an address"}

_one_launch = threading.Lock()  # the runtime knows no more


class _Description(ctypes.Structure):
    """`emulator::Kernel` in runtime.h."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("types", ctypes.c_char_p),
        ("call", ctypes.c_void_p),
        ("most_threads", ctypes.c_int),
        ("shared", ctypes.c_void_p),
        ("shared_end", ctypes.c_void_p),
    )


class EmulatedKernel:
    """A kernel, and the memory through which its arguments go."""

    def __init__(self, name: str, description: _Description) -> None:
        self.name = name
        self.description = description
        self._types = description.types.decode()
        self._struct = struct.Struct("=" + "".join(_FORMATS.get(t, "8x") for t in self._types))
        size = 8 * len(self._types)
        self._values = ctypes.create_string_buffer(size + 1)
        first = ctypes.addressof(self._values)
        self._pointers = (ctypes.c_void_p * (len(self._types) + 1))(*range(first, first + size, 8))

    def check(self, args: Sequence[Any]) -> None:
        """Each argument must be of its parameter's type; a GPU would take its bytes for whatever it expects.

        Raises:
            DeviceError: one is not, or their number differs.
        """
        if len(args) != len(self._types):
            raise DeviceError(f"kernel {self.name} takes {len(self._types)} arguments, not {len(args)}")
        for n, (arg, wanted) in enumerate(zip(args, self._types), start=1):
            given = _LETTERS.get(type(arg))
            if given is None:
                raise DeviceError(f"argument {n} of kernel {self.name}, {arg!r}, is of none of LAUNCH_TYPES")
            if given != wanted:
                parameter = _NAMES.get(wanted, "of a type that no argument has")
                raise DeviceError(f"argument {n} of kernel {self.name} is {_NAMES[given]}, its parameter {parameter}")

    def pack(self, args: Sequence[Any]) -> Any:
        """The values in memory of the kernel's own, as an array of their addresses."""
        self._struct.pack_into(self._values, 0, *args)
        return self._pointers


class EmulatedModule(Module):
    """A library that g++ made."""

    def __init__(self, source: str) -> None:
        self._library = build.module(source)

    def kernel(self, name: str) -> EmulatedKernel:
        """See `Module.kernel`."""
        try:
            _ = self._library[name]  # exported under this name by `extern "C"` only
            description = _Description.in_dll(self._library, f"emulator_kernel_{name}")
        except (AttributeError, ValueError):
            raise KeyError(f'the module has no extern "C" __global__ function {name!r}') from None
        return EmulatedKernel(name, description)


class Emulator(Driver):
    """See `Driver`.

    Attributes:
        seed: of the order in which blocks and threads run, another one in each launch; 0 is the natural order.
    """

    red_zone = 64

    def __init__(self, index: int) -> None:
        super().__init__()
        self.properties = Properties(f"emulator {index}", (7, 5), 64 << 30, 1, _SHARED)
        self.seed = _seed()
        self._memory = Memory(self.properties.memory)
        self._launches = 0
        self._recorded: list[Callable[[], None]] | None = None
        self._message = ctypes.create_string_buffer(1000)

    def allocate(self, nbytes: int) -> int:
        """See `Driver.allocate`."""
        self._not_captured("allocate")
        return self._memory.allocate(nbytes)

    def free(self, address: int) -> None:
        """See `Driver.free`."""
        self._not_captured("free")
        self._memory.free(address)

    def pool_usage(self) -> PoolUsage:
        """See `Driver.pool_usage`; nothing is kept."""
        return PoolUsage(self._memory.used, self._memory.used)

    def trim_pool(self) -> None:
        """See `Driver.trim_pool`; nothing is kept."""

    def poison(self, address: int, nbytes: int) -> None:
        """See `Driver.poison`."""
        self._memory.check("poison", address, nbytes)
        self._memory.poison(address, nbytes)

    def unpoison(self, address: int, nbytes: int) -> None:
        """See `Driver.unpoison`."""
        self._memory.unpoison(address, nbytes)

    def upload(self, address: int, array: np.ndarray) -> None:
        """See `Driver.upload`."""
        self._not_captured("upload")
        check_contiguous(array)
        self._memory.check("upload", address, array.nbytes)
        view(address, array.shape, array.dtype)[...] = array

    def download(self, address: int, out: np.ndarray) -> None:
        """See `Driver.download`."""
        self._not_captured("download")
        check_contiguous(out)
        self._memory.check("download", address, out.nbytes)
        out[...] = view(address, out.shape, out.dtype)

    def fill(self, address: int, byte: int, nbytes: int) -> None:
        """See `Driver.fill`."""
        self._memory.check("fill", address, nbytes)
        self._do(lambda: view(address, (nbytes,), np.uint8).fill(byte))

    def module(self, source: str) -> EmulatedModule:
        """See `Driver.module`."""
        return EmulatedModule(source)

    def launch(
        self,
        kernel: EmulatedKernel,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared: int,
        args: Sequence[Any],
    ) -> None:
        """See `Driver.launch`."""
        if min(*grid, *block) < 1 or any(g > most for g, most in zip(grid, _MOST_BLOCKS)):
            raise DeviceError(f"kernel {kernel.name}: no grid is of {grid} blocks of {block} threads")
        threads = block[0] * block[1] * block[2]
        if threads > min(_MOST_THREADS, kernel.description.most_threads) or block[2] > _MOST_LAYERS:
            most = kernel.description.most_threads
            raise DeviceError(f"kernel {kernel.name}: a block of {block} threads, where {most} are the most")
        if shared > self.properties.shared_memory:  # how much a kernel's own arrays take is the compile report's matter
            raise DeviceError(f"kernel {kernel.name}: {shared} bytes of shared memory, where {_SHARED} are the most")
        kernel.check(args)
        self._do(lambda: self._run(kernel, grid, block, shared, args))

    def _run(self, kernel: EmulatedKernel, grid: Any, block: Any, shared: int, args: Sequence[Any]) -> None:
        self._launches += 1
        seed = (self.seed << 32) + self._launches if self.seed else 0
        three = ctypes.c_uint * 3
        with _one_launch:
            failed = build.runtime().emulator_launch(
                ctypes.addressof(kernel.description), kernel.pack(args), three(*grid), three(*block), shared, seed,
                self._message, len(self._message),
            )  # fmt: skip
        if failed:
            raise DeviceError(self._message.value.decode())
        damaged = self._memory.damaged()
        if damaged is not None:
            raise DeviceError(f"kernel {kernel.name} wrote out of bounds, to a zone that begins at {damaged:#x}")

    def launch_with(self, name: str, launcher: Callable[..., None], *args: Any) -> None:
        """See `Driver.launch_with`."""

        def launch() -> None:
            launcher(0, 0, *args)
            damaged = self._memory.damaged()
            if damaged is not None:
                raise DeviceError(f"kernel {name} wrote out of bounds, to a zone that begins at {damaged:#x}")

        self._do(launch)

    def gemm(
        self, dtype: str, trans_a: bool, trans_b: bool, m: int, n: int, k: int,
        alpha: float, a: int, lda: int, b: int, ldb: int, beta: float, c: int, ldc: int,
    ) -> None:  # fmt: skip
        """See `Driver.gemm`."""
        self.gemm_strided_batched(
            dtype, trans_a, trans_b, m, n, k, alpha, a, lda, 0, b, ldb, 0, beta, c, ldc, 0, 1
        )  # fmt: skip

    def gemm_strided_batched(
        self, dtype: str, trans_a: bool, trans_b: bool, m: int, n: int, k: int,
        alpha: float, a: int, lda: int, stride_a: int, b: int, ldb: int, stride_b: int,
        beta: float, c: int, ldc: int, stride_c: int, count: int,
    ) -> None:  # fmt: skip
        """See `Driver.gemm_strided_batched`."""
        left = self._matrices("A", dtype, a, count, stride_a, (k, m) if trans_a else (m, k), lda)
        right = self._matrices("B", dtype, b, count, stride_b, (n, k) if trans_b else (k, n), ldb)
        out = self._matrices("C", dtype, c, count, stride_c, (m, n), ldc)
        left = left.swapaxes(1, 2) if trans_a else left
        right = right.swapaxes(1, 2) if trans_b else right

        def multiply() -> None:
            product = np.matmul(left, right) * np.dtype(dtype).type(alpha)
            out[...] = product if beta == 0 else product + out * np.dtype(dtype).type(beta)

        self._do(multiply)

    def _matrices(
        self, name: str, dtype: str, address: int, count: int, stride: int, shape: tuple[int, int], leading: int
    ) -> np.ndarray:
        """Operands of a product, as one array; rows must lie in memory that may be touched."""
        if leading < max(1, shape[1]):
            raise DeviceError(f"a product with a leading dimension of {leading} for {name} of {shape}")
        item = np.dtype(dtype).itemsize
        if address % item:
            raise DeviceError(f"a product with {name} at the misaligned address {address:#x}")
        for matrix in range(count if stride else min(count, 1)):
            for row in range(shape[0]):
                begin = address + (matrix * stride + row * leading) * item
                self._memory.check(f"product's {name}", begin, shape[1] * item)
        return view(address, (count, *shape), dtype, (stride * item, leading * item, item))

    def synchronize(self) -> None:
        """See `Driver.synchronize`."""
        self._not_captured("synchronize")

    def record_event(self) -> float:
        """See `Driver.record_event`: the time."""
        self._not_captured("record_event")
        return time.perf_counter()

    def elapsed(self, start: float, end: float) -> float:
        """See `Driver.elapsed`."""
        return end - start

    def begin_capture(self) -> None:
        """See `Driver.begin_capture`."""
        self._not_captured("begin_capture")
        self._recorded = []

    def end_capture(self) -> list[Callable[[], None]]:
        """See `Driver.end_capture`."""
        if self._recorded is None:
            raise DeviceError("end_capture without begin_capture")
        graph, self._recorded = self._recorded, None
        return graph

    def launch_graph(self, graph: list[Callable[[], None]]) -> None:
        """See `Driver.launch_graph`."""
        self._not_captured("launch_graph")
        for call in graph:
            call()

    def _do(self, call: Callable[[], None]) -> None:
        if self._recorded is None:
            call()
        else:
            self._recorded.append(call)

    def _not_captured(self, what: str) -> None:
        if self._recorded is not None:
            raise DeviceError(f"{what} while a graph is captured")


def _seed() -> int:
    text = os.environ.get("DYNBATCH_EMULATOR_SEED") or "0"
    if not text.isdecimal():
        raise ConfigurationError(f"DYNBATCH_EMULATOR_SEED={text!r} is no number")
    return int(text)
