"""The `Driver` for GPUs, by CuPy: cuBLAS, a pool of its own, one stream, modules by NVRTC, CUDA graphs.

Written for CuPy 14 and 13.5, which are imported only when a driver is asked for.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from dynbatch.config import config
from dynbatch.cuda.cublas import WORKSPACE, Cublas
from dynbatch.cuda.driver import Driver, Module, PoolUsage, Properties, check_contiguous
from dynbatch.errors import CompileError, DeviceError, OutOfMemoryError

_OPTIONS = ("--std=c++17",)
_NO_DEVICE, _OLD_DRIVER, _ILLEGAL_ADDRESS = 100, 35, 700  # of cudaError
_EXTRAS = 'pip install "dynbatch[cuda13]", or "dynbatch[cuda12]" for a driver of the 12 series'


def count() -> int:
    """How many GPUs there are.

    Raises:
        DeviceError: CuPy is missing or cannot be loaded; there is no driver, or it is too old.
    """
    runtime = _cupy().cuda.runtime
    try:
        return int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        if error.status == _NO_DEVICE:
            return 0
        if error.status != _OLD_DRIVER:
            raise DeviceError(f"CUDA cannot be used: {error}") from error
        has, wants = int(runtime.driverGetVersion()), int(runtime.runtimeGetVersion())
        if has == 0:
            raise DeviceError('no CUDA driver: install NVIDIA\'s, or use device "cpu"') from error
        raise DeviceError(
            f"the CUDA driver is too old: it knows CUDA {_version(has)}, and CuPy uses CUDA {_version(wants)}. Update "
            f"the driver, or install CuPy for an older CUDA: {_EXTRAS}"
        ) from error


def driver(index: int) -> CupyDriver:
    """The driver of one GPU.

    Raises:
        DeviceError: there is no such GPU, or none can be used; see `count`.
    """
    found = count()
    if not 0 <= index < found:
        raise DeviceError(f"no GPU {index}: the CUDA driver finds {found}")
    return CupyDriver(index)


@functools.cache
def _cupy() -> Any:
    try:
        import cupy
        from cupy_backends.cuda.libs import cublas, nvrtc  # noqa: F401  they find CUDA's libraries, or fail
    except ModuleNotFoundError as error:
        raise DeviceError(f'device "cuda" needs CuPy, which is not installed ({error}): {_EXTRAS}') from error
    except ImportError as error:
        raise DeviceError(f"CuPy is installed and cannot be loaded: {error}. {_EXTRAS} brings what it needs") from error
    return cupy


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


class CupyKernel:
    """A kernel, and how much dynamic shared memory it may have so far."""

    def __init__(self, name: str, function: Any) -> None:
        self.name = name
        self._function = function
        self._dynamic = function.max_dynamic_shared_size_bytes

    def __call__(self, grid: Any, block: Any, shared: int, args: Sequence[Any]) -> None:
        """Launch it on the current stream."""
        if shared > self._dynamic:  # what goes beyond 48 KiB is given on request only
            self._function.max_dynamic_shared_size_bytes = self._dynamic = shared
        self._function(grid, block, tuple(args), shared_mem=shared)


class CupyModule(Module):
    """A module that NVRTC compiled for one device, or that CuPy had in its cache."""

    def __init__(self, driver: CupyDriver, raw_module: Any) -> None:
        self._driver = driver
        self._raw_module = raw_module

    def kernel(self, name: str) -> CupyKernel:
        """See `Module.kernel`."""
        try:
            with _Turn(self._driver, f"kernel {name}"):
                return CupyKernel(name, self._raw_module.get_function(name))
        except DeviceError as error:
            raise KeyError(f'the module has no extern "C" __global__ function {name!r}: {error}') from error


class CupyDriver(Driver):
    """See `Driver`. Under ``debug`` each launch is waited for, so that a fault names its kernel."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.turns = threading.local()
        cuda = _cupy().cuda
        self._compile_errors = (cuda.compiler.CompileException, cuda.nvrtc.NVRTCError)
        self._cublas = cuda.cublas
        self._capturing: Cublas | None = None
        self._direct: Cublas | None = None
        self._workspace = 0  # of products in graphs, which run one after the other
        self._runtime = cuda.runtime
        self.faults = (cuda.runtime.CUDARuntimeError, cuda.driver.CUDADriverError, cuda.cublas.CUBLASError)
        self.device = cuda.Device(index)
        with self.device:
            self.stream = cuda.Stream(non_blocking=True)
        self._pool = cuda.MemoryPool()
        self._allocations: dict[int, Any] = {}
        found = self._runtime.getDeviceProperties(index)
        self.properties = Properties(
            found["name"].decode(),
            (found["major"], found["minor"]),
            found["totalGlobalMem"],
            found["multiProcessorCount"],
            found["sharedMemPerBlockOptin"],
        )

    def session(self) -> _Turn:
        """See `Driver.session`: device and stream become the current ones once for all calls."""
        return _Turn(self, "a plan")

    def allocate(self, nbytes: int) -> int:
        """See `Driver.allocate`."""
        try:
            with _Turn(self, "allocate"):
                memory = self._pool.malloc(max(1, nbytes))
        except MemoryError as error:
            usage = self.pool_usage()
            raise OutOfMemoryError(
                f"{nbytes} bytes wanted on {self.properties.name}; the pool holds {usage.held} bytes, {usage.used} of "
                f"them in use, and the device has {self.properties.memory}"
            ) from error
        self._allocations[memory.ptr] = memory
        return int(memory.ptr)

    def free(self, address: int) -> None:
        """See `Driver.free`."""
        with _Turn(self, "free"):  # the pool hands memory back to the stream on which it was freed
            del self._allocations[address]

    def pool_usage(self) -> PoolUsage:
        """See `Driver.pool_usage`."""
        with _Turn(self, "pool_usage"):
            return PoolUsage(self._pool.used_bytes(), self._pool.total_bytes())

    def trim_pool(self) -> None:
        """See `Driver.trim_pool`."""
        with _Turn(self, "trim_pool"):
            self._pool.free_all_blocks()

    def poison(self, address: int, nbytes: int) -> None:
        """See `Driver.poison`; a GPU does not watch."""

    def unpoison(self, address: int, nbytes: int) -> None:
        """See `Driver.unpoison`."""

    def upload(self, address: int, array: np.ndarray) -> None:
        """See `Driver.upload`. CUDA copies pageable memory to memory of its own before the call returns."""
        check_contiguous(array)
        with _Turn(self, "upload"):
            self._runtime.memcpyAsync(
                address, array.ctypes.data, array.nbytes, self._runtime.memcpyHostToDevice, self.stream.ptr
            )

    def download(self, address: int, out: np.ndarray) -> None:
        """See `Driver.download`."""
        check_contiguous(out)
        with _Turn(self, "download"):
            self._runtime.memcpyAsync(
                out.ctypes.data, address, out.nbytes, self._runtime.memcpyDeviceToHost, self.stream.ptr
            )
            self.stream.synchronize()

    def fill(self, address: int, byte: int, nbytes: int) -> None:
        """See `Driver.fill`."""
        with _Turn(self, "fill"):
            self._runtime.memsetAsync(address, byte, nbytes, self.stream.ptr)

    def module(self, source: str) -> CupyModule:
        """See `Driver.module`."""
        with _Turn(self, "module"):
            module = _cupy().RawModule(code=source, options=_OPTIONS)
            try:
                module.compile()
            except self._compile_errors as error:
                raise CompileError(f"NVRTC does not compile this:\n{error}") from error
        return CupyModule(self, module)

    def launch(
        self,
        kernel: CupyKernel,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared: int,
        args: Sequence[Any],
    ) -> None:
        """See `Driver.launch`."""
        with _Turn(self, f"kernel {kernel.name}"):
            kernel(grid, block, shared, args)
            if config.debug and not self.stream.is_capturing():
                self.stream.synchronize()

    def launch_with(self, name: str, launcher: Callable[..., None], *args: Any) -> None:
        """See `Driver.launch_with`."""
        with _Turn(self, f"kernel {name}"):
            launcher(self.device.id, self.stream.ptr, *args)
            if config.debug and not self.stream.is_capturing():
                self.stream.synchronize()

    def gemm(
        self, dtype: str, trans_a: bool, trans_b: bool, m: int, n: int, k: int,
        alpha: float, a: int, lda: int, b: int, ldb: int, beta: float, c: int, ldc: int,
    ) -> None:  # fmt: skip
        """See `Driver.gemm`. To cuBLAS a row-major matrix is its transpose: it computes ``C' = op(B)' op(A)'``."""
        library = self._capturing or self._cublas
        function = library.sgemm if dtype == "float32" else library.dgemm
        scale = np.array([alpha, beta], dtype)
        with _Turn(self, "gemm"):
            function(
                self.device.cublas_handle, self._operation(trans_b), self._operation(trans_a), n, m, k,
                scale.ctypes.data, b, ldb, a, lda, scale.ctypes.data + scale.itemsize, c, ldc,
            )  # fmt: skip

    def gemm_strided_batched(
        self, dtype: str, trans_a: bool, trans_b: bool, m: int, n: int, k: int,
        alpha: float, a: int, lda: int, stride_a: int, b: int, ldb: int, stride_b: int,
        beta: float, c: int, ldc: int, stride_c: int, count: int,
    ) -> None:  # fmt: skip
        """See `Driver.gemm_strided_batched`, and `gemm`."""
        library = self._capturing or self._cublas
        function = library.sgemmStridedBatched if dtype == "float32" else library.dgemmStridedBatched
        scale = np.array([alpha, beta], dtype)
        with _Turn(self, "gemm_strided_batched"):
            function(
                self.device.cublas_handle, self._operation(trans_b), self._operation(trans_a), n, m, k,
                scale.ctypes.data, b, ldb, stride_b, a, lda, stride_a,
                scale.ctypes.data + scale.itemsize, c, ldc, stride_c, count,
            )  # fmt: skip

    def _operation(self, transposed: bool) -> int:
        return int(self._cublas.CUBLAS_OP_T if transposed else self._cublas.CUBLAS_OP_N)

    def synchronize(self) -> None:
        """See `Driver.synchronize`."""
        with _Turn(self, "synchronize"):
            self.stream.synchronize()

    def record_event(self) -> Any:
        """See `Driver.record_event`."""
        with _Turn(self, "record_event"):
            return self.stream.record()

    def elapsed(self, start: Any, end: Any) -> float:
        """See `Driver.elapsed`."""
        with _Turn(self, "elapsed"):
            end.synchronize()
            return float(self._runtime.eventElapsedTime(start.ptr, end.ptr)) / 1000

    def begin_capture(self) -> None:
        """See `Driver.begin_capture`; what products need is given to cuBLAS before.

        The mode is the one that forbids nothing: cuBLAS may have to load a kernel.
        """
        if self._direct is None:
            self._direct = Cublas(self._runtime.runtimeGetVersion() // 1000)
            self._workspace = self.allocate(WORKSPACE)
        with _Turn(self, "begin_capture"):
            handle = self.device.cublas_handle
            self._cublas.setStream(handle, self.stream.ptr)
            self._direct.set_workspace(handle, self._workspace, WORKSPACE)
            self.stream.begin_capture(self._runtime.streamCaptureModeRelaxed)
        self._capturing = self._direct

    def end_capture(self) -> Any:
        """See `Driver.end_capture`."""
        self._capturing = None
        with _Turn(self, "end_capture"):
            return self.stream.end_capture()

    def launch_graph(self, graph: Any) -> None:
        """See `Driver.launch_graph`."""
        with _Turn(self, "launch_graph"):
            graph.launch(self.stream)


class _Turn:
    """A call of CuPy: its device and stream are the current ones meanwhile, and its errors become `DeviceError`.

    Within another one of the same thread, they are so already.
    """

    __slots__ = ("_driver", "_what")

    def __init__(self, driver: CupyDriver, what: str) -> None:
        self._driver = driver
        self._what = what

    def __enter__(self) -> None:
        turns = self._driver.turns
        turns.depth = depth = getattr(turns, "depth", 0) + 1
        if depth == 1:
            self._driver.device.__enter__()
            self._driver.stream.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        turns = self._driver.turns
        turns.depth -= 1
        if not turns.depth:
            self._driver.stream.__exit__(kind, error, trace)
            self._driver.device.__exit__(kind, error, trace)
        if isinstance(error, self._driver.faults):
            hint = "" if config.debug else "; it shows at the first call that waits: init(debug=True) names the kernel"
            illegal = getattr(error, "status", None) == _ILLEGAL_ADDRESS
            raise DeviceError(
                f"{self._what} on {self._driver.properties.name}: {error}{hint if illegal else ''}"
            ) from error
