"""A stand-in for CuPy where there is no GPU: as much of it as `CupyDriver` calls, on the host's memory.

It checks what can be checked there: that calls come with CuPy's arguments, on the driver's device and stream. Products
are column-major as cuBLAS's are. Kernels are run by the emulator.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np

from tests.cuda_emulator import Emulator
from tests.cuda_emulator.memory import view

DEVICES = 2
STREAM = 77  # its address
WORKSPACE = 4096  # bytes, of products that are captured


class CUDARuntimeError(RuntimeError):
    def __init__(self, status, text):
        super().__init__(text)
        self.status = status


class CUDADriverError(RuntimeError):
    pass


class CUBLASError(RuntimeError):
    pass


class FakeCupy:
    """The module ``cupy``.

    Attributes:
        fault: raised by the next launch that is waited for, if it is set.
        limit: bytes that the pool can have.
        current: (device, stream) within whose `with` blocks calls are.
    """

    def __init__(self, limit=1 << 20):
        self.emulator = Emulator(0)
        self.fault = None
        self.limit = limit
        self.current = []
        self.captured = None
        self.prepared = set()  # what the cuBLAS handle has been given
        self.cuda = SimpleNamespace(
            runtime=Runtime(self),
            driver=SimpleNamespace(CUDADriverError=CUDADriverError),
            compiler=SimpleNamespace(CompileException=type("CompileException", (Exception,), {})),
            nvrtc=SimpleNamespace(NVRTCError=type("NVRTCError", (RuntimeError,), {})),
            cublas=Cublas(self),
            Device=lambda index: Entered(self, f"device {index}", id=index, cublas_handle=99),
            Stream=lambda non_blocking: Stream(self, non_blocking),
            MemoryPool=lambda: Pool(self),
        )

    def RawModule(self, code, options):
        assert options == ("--std=c++17",)
        return RawModule(self, code)

    def check_current(self, stream=STREAM):
        assert self.current == ["device 1", "stream"] and stream == STREAM

    def do(self, call):
        """Now, or when the graph is launched."""
        self.check_current()
        if self.captured is None:
            call()
        else:
            self.captured.append(call)


class Entered(SimpleNamespace):
    def __init__(self, cupy, what, **attributes):
        super().__init__(**attributes)
        self._cupy, self._what = cupy, what

    def __enter__(self):
        self._cupy.current.append(self._what)
        return self

    def __exit__(self, *_):
        assert self._cupy.current.pop() == self._what


class Stream(Entered):
    def __init__(self, cupy, non_blocking):
        assert non_blocking and cupy.current == ["device 1"]
        super().__init__(cupy, "stream", ptr=STREAM)

    def synchronize(self):
        self._cupy.check_current()
        if self._cupy.fault:
            fault, self._cupy.fault = self._cupy.fault, None
            raise fault

    def record(self):
        self._cupy.check_current()
        return SimpleNamespace(ptr=self._cupy.cuda.runtime.mark(), synchronize=self.synchronize)

    def begin_capture(self, mode):
        assert mode == 2
        self._cupy.captured = []

    def is_capturing(self):
        return self._cupy.captured is not None

    def end_capture(self):
        calls, self._cupy.captured = self._cupy.captured, None

        def launch(stream):
            self._cupy.check_current(stream.ptr)
            for call in calls:
                call()

        return SimpleNamespace(launch=launch)


class Runtime:
    CUDARuntimeError = CUDARuntimeError
    memcpyHostToDevice, memcpyDeviceToHost = 1, 2
    streamCaptureModeRelaxed = 2

    def __init__(self, cupy):
        self._cupy = cupy
        self._marks = 0
        self.status = 0
        self.driver_version = 13000

    def getDeviceCount(self):
        if self.status:
            raise CUDARuntimeError(self.status, "from the driver")
        return DEVICES

    def driverGetVersion(self):
        return self.driver_version

    def runtimeGetVersion(self):
        return 13020

    def getDeviceProperties(self, index):
        shared = {"sharedMemPerBlockOptin": 101376, "multiProcessorCount": 7, "totalGlobalMem": 1 << 30}
        return {"name": b"Fake GPU", "major": 8, "minor": 6, **shared}

    def memcpyAsync(self, to, of, nbytes, kind, stream):
        self._cupy.check_current(stream)
        assert kind in (1, 2) and self._cupy.captured is None
        ctypes.memmove(to, of, nbytes)

    def memsetAsync(self, address, byte, nbytes, stream):
        assert stream == STREAM
        self._cupy.do(lambda: ctypes.memset(address, byte, nbytes))

    def mark(self):
        self._marks += 1
        return self._marks

    def eventElapsedTime(self, start, end):
        return 250.0 * (end - start)  # milliseconds


class Cublas:
    """CuPy's: it calls nothing while a stream is captured."""

    CUBLASError = CUBLASError
    CUBLAS_OP_N, CUBLAS_OP_T = 0, 1

    def __init__(self, cupy):
        self._cupy = cupy

    def setStream(self, handle, stream):
        self._allow()
        assert (handle, stream) == (99, STREAM)
        self._cupy.prepared = {"stream"}

    def _allow(self):
        if self._cupy.captured is not None:
            raise NotImplementedError("calling cuBLAS API during stream capture is currently unsupported")

    def sgemm(self, *arguments):
        self._multiply(np.float32, *arguments)

    def dgemm(self, *arguments):
        self._multiply(np.float64, *arguments)

    def sgemmStridedBatched(self, *arguments):
        self._multiply_batched(np.float32, *arguments)

    def dgemmStridedBatched(self, *arguments):
        self._multiply_batched(np.float64, *arguments)

    def _multiply(self, dtype, handle, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):
        self._multiply_batched(dtype, handle, ta, tb, m, n, k, alpha, a, lda, 0, b, ldb, 0, beta, c, ldc, 0, 1)

    def _multiply_batched(
        self, dtype, handle, ta, tb, m, n, k, alpha, a, lda, step_a, b, ldb, step_b, beta, c, ldc, step_c, count
    ):
        assert handle == 99
        self._allow()
        item = np.dtype(dtype).itemsize
        alpha, beta = (view(scalar, (1,), dtype)[0] for scalar in (alpha, beta))

        def matrices(address, rows, columns, leading, step):
            assert leading >= max(1, rows)
            return view(address, (count, rows, columns), dtype, (step * item, item, leading * item))

        def call():
            x = matrices(a, *((k, m) if ta else (m, k)), lda, step_a)
            y = matrices(b, *((n, k) if tb else (k, n)), ldb, step_b)
            out = matrices(c, m, n, ldc, step_c)
            product = alpha * ((x.swapaxes(1, 2) if ta else x) @ (y.swapaxes(1, 2) if tb else y))
            out[...] = product if beta == 0 else product + beta * out

        self._cupy.do(call)


class DirectCublas(Cublas):
    """`dynbatch.cuda.cublas.Cublas`."""

    def set_workspace(self, handle, address, nbytes):
        assert handle == 99 and address % 256 == 0 and nbytes == WORKSPACE and self._cupy.captured is None
        self._cupy.prepared.add("workspace")

    def _allow(self):
        assert self._cupy.captured is not None and self._cupy.prepared == {"stream", "workspace"}


class Pool:
    """A pool that keeps what was freed, as CuPy's does."""

    def __init__(self, cupy):
        self._cupy = cupy
        self._used, self._held = 0, 0

    def malloc(self, nbytes):
        self._cupy.check_current()
        size = -(-nbytes // 512) * 512
        if self._used + size > self._cupy.limit:
            raise MemoryError("from the pool")
        self._used += size
        self._held = max(self._held, self._used)
        return Allocation(self, self._cupy.emulator.allocate(size), size)

    def release(self, size):
        self._used -= size

    def used_bytes(self):
        return self._used

    def total_bytes(self):
        return self._held

    def free_all_blocks(self):
        self._held = self._used


class Allocation:
    def __init__(self, pool, address, size):
        self._pool, self._size, self.ptr = pool, size, address

    def __del__(self):
        self._pool.release(self._size)


class RawModule:
    def __init__(self, cupy, code):
        self._cupy, self._code = cupy, code

    def compile(self):
        self._cupy.check_current()
        try:
            self._module = self._cupy.emulator.module(self._code)
        except ValueError as error:
            raise self._cupy.cuda.compiler.CompileException(str(error)) from error

    def get_function(self, name):
        return RawKernel(self._cupy, self._module, name)


class RawKernel:
    """Whether the function exists shows when something is asked of it, as with CuPy's."""

    def __init__(self, cupy, module, name):
        self._cupy, self._module, self._name = cupy, module, name
        self._limit = 48 << 10

    @property
    def max_dynamic_shared_size_bytes(self):
        self._kernel()
        return self._limit

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, nbytes):
        self._limit = nbytes

    def _kernel(self):
        try:
            return self._module.kernel(self._name)
        except KeyError:
            raise CUDADriverError("CUDA_ERROR_NOT_FOUND: named symbol not found") from None

    def __call__(self, grid, block, args, *, shared_mem):
        assert isinstance(grid, tuple) and isinstance(block, tuple) and isinstance(args, tuple)
        if shared_mem > self._limit:
            raise CUDADriverError("CUDA_ERROR_INVALID_VALUE: invalid argument")
        run = shared_mem if shared_mem <= 48 << 10 else 0
        self._cupy.do(lambda: self._cupy.emulator.launch(self._kernel(), grid, block, run, args))
