"""What a driver promises, of the emulator, of CuPy's driver on a stand-in for CuPy, and of a GPU where there is one."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fake_cupy import STREAM, WORKSPACE, CUDARuntimeError, DirectCublas, FakeCupy

import dynbatch as dy
from dynbatch.cuda import cupy_driver, devices
from dynbatch.errors import CompileError, ConfigurationError, DeviceError, OutOfMemoryError
from tests import cuda_emulator

if not cuda_emulator.available():
    pytest.skip("the emulator needs g++", allow_module_level=True)

CHECKOUT = Path(__file__).resolve().parents[2]
SOURCE = r"""
extern "C" __global__ void scale(float* x, long long n, float factor) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) x[i] *= factor;
}
extern "C" __global__ void every_type(int i, long long l, float f, double d, double* out) {
  out[0] = i, out[1] = (double)l, out[2] = f, out[3] = d;
}
extern "C" __global__ void reversed(float* x, int n) {
  extern __shared__ float s[];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = s[n - 1 - threadIdx.x];
}
"""


@pytest.fixture
def fake(monkeypatch):
    """CuPy, replaced."""
    cupy = FakeCupy()
    monkeypatch.setattr(cupy_driver, "_cupy", lambda: cupy)
    monkeypatch.setattr(cupy_driver, "WORKSPACE", WORKSPACE)
    monkeypatch.setattr(cupy_driver, "Cublas", lambda version: version == 13 and DirectCublas(cupy))
    return cupy


def gpus() -> int:
    try:
        return cupy_driver.count()
    except DeviceError:
        return 0


@pytest.fixture(params=["emulator", "fake cupy", *["gpu"] * min(gpus(), 1)])
def device(request):
    if request.param == "emulator":
        return cuda_emulator.driver(0)
    if request.param == "gpu":
        return cupy_driver.driver(0)
    request.getfixturevalue("fake")
    return cupy_driver.driver(1)


def on_device(device, array):
    address = device.allocate(array.nbytes)
    device.upload(address, array)
    return address


def from_device(device, address, shape, dtype):
    out = np.empty(shape, dtype)
    device.download(address, out)
    return out


def scale(device, address, n, factor):
    kernel = device.module(SOURCE).kernel("scale")
    arguments = [np.uint64(address), np.int64(n), np.float32(factor)]
    device.launch(kernel, (-(-n // 64), 1, 1), (64, 1, 1), 0, arguments)


# ---- Memory


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "uint8"])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (5, 3), (300, 41)])
def test_what_goes_up_comes_down(device, dtype, shape):
    array = np.random.default_rng(0).integers(0, 200, shape).astype(dtype)
    address = on_device(device, array)
    assert address % 256 == 0
    np.testing.assert_array_equal(from_device(device, address, shape, dtype), array)


def test_addresses_are_counted_in_bytes(device):
    address = on_device(device, np.arange(10, dtype=np.float32))
    device.upload(address + 8, np.array([-1, -2], np.float32))
    device.fill(address + 20, 0, 8)
    assert from_device(device, address, 10, np.float32).tolist() == [0, 1, -1, -2, 4, 0, 0, 7, 8, 9]
    assert from_device(device, address + 28, 2, np.float32).tolist() == [7, 8]


def test_an_array_may_change_once_it_was_uploaded(device):
    array = np.ones(1000)
    address = on_device(device, array)
    array[:] = 2
    assert (from_device(device, address, 1000, float) == 1).all()


def test_only_contiguous_arrays_are_copied(device):
    address = device.allocate(1000)
    for call in (device.upload, device.download):
        with pytest.raises(ValueError, match=r"C-contiguous.*\(5, 10\)"):
            call(address, np.zeros((10, 5)).T)


def test_the_pool_counts(device):
    before = device.pool_usage().used
    first, second = device.allocate(1000), device.allocate(0)
    assert first != second
    used = device.pool_usage()
    assert 1000 <= used.used - before <= 4096 and used.held >= used.used
    device.free(first)
    device.free(second)
    device.trim_pool()
    assert device.pool_usage().used == before


def test_out_of_memory_says_what_was_wanted_and_what_there_is(device):
    device.allocate(4096)
    with pytest.raises(OutOfMemoryError, match=rf"{1 << 60} bytes wanted on .*; (the|its) pool holds \d{{4,}} bytes"):
        device.allocate(1 << 60)
    assert device.allocate(16)


def test_red_zones_are_memory_again_afterwards(device):
    address = device.allocate(1024)
    device.poison(address + 512, 64)
    device.unpoison(address + 512, 64)
    device.upload(address, np.arange(256, dtype=np.float32))
    assert from_device(device, address, 256, np.float32).sum() == 255 * 128


# ---- Kernels


@pytest.mark.parametrize("n", [1, 63, 64, 1000])
def test_launch(device, n):
    x = np.arange(n, dtype=np.float32)
    address = on_device(device, x)
    scale(device, address, n, 3)
    np.testing.assert_array_equal(from_device(device, address, n, np.float32), 3 * x)


def test_arguments_of_every_type(device):
    values = [np.int32(-(2**31)), np.int64(2**53), np.float32(0.1), np.float64(0.1)]
    address = device.allocate(32)
    kernel = device.module(SOURCE).kernel("every_type")
    device.launch(kernel, (1, 1, 1), (1, 1, 1), 0, [*values, np.uint64(address)])
    assert from_device(device, address, 4, float).tolist() == [float(v) for v in values]


def test_launch_with_dynamic_shared_memory(device):
    address = on_device(device, np.arange(50, dtype=np.float32))
    kernel = device.module(SOURCE).kernel("reversed")
    device.launch(kernel, (1, 1, 1), (50, 1, 1), 200, [np.uint64(address), np.int32(50)])
    assert from_device(device, address, 50, np.float32).tolist() == list(range(50))[::-1]


def test_faults_of_modules(device):
    with pytest.raises(CompileError, match="undeclared_name"):
        device.module('extern "C" __global__ void f(float* x) { x[0] = undeclared_name; }')
    with pytest.raises(KeyError, match=r"absent"):
        device.module(SOURCE).kernel("absent")


# ---- Products


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (5, 3, 4), (1, 7, 3), (8, 1, 2), (33, 17, 65)])
@pytest.mark.parametrize("slack", [0, 3])
def test_gemm(device, dtype, trans_a, trans_b, m, n, k, slack):
    rng = np.random.default_rng(0)
    a = rng.normal(size=((k, m) if trans_a else (m, k))).astype(dtype)
    b = rng.normal(size=((n, k) if trans_b else (k, n))).astype(dtype)
    c = rng.normal(size=(m, n)).astype(dtype)
    padded = [np.pad(x, ((0, 0), (0, slack)), constant_values=np.nan) for x in (a, b, c)]
    pa, pb, pc = (on_device(device, x) for x in padded)
    lda, ldb, ldc = (x.shape[1] for x in padded)
    product = (a.T if trans_a else a).astype(float) @ (b.T if trans_b else b)
    device.gemm(dtype, trans_a, trans_b, m, n, k, 0.5, pa, lda, pb, ldb, 2.0, pc, ldc)
    out = from_device(device, pc, padded[2].shape, dtype)
    tolerance = {"rtol": 1e-5 if dtype == "float32" else 1e-13, "atol": 1e-4 if dtype == "float32" else 1e-12}
    np.testing.assert_allclose(out[:, :n], 0.5 * product + 2 * c, **tolerance)
    assert np.isnan(out[:, n:]).all()
    device.upload(pc, np.full_like(padded[2], np.nan))
    device.gemm(dtype, trans_a, trans_b, m, n, k, 1.0, pa, lda, pb, ldb, 0.0, pc, ldc)  # C is not read
    np.testing.assert_allclose(from_device(device, pc, padded[2].shape, dtype)[:, :n], product, **tolerance)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("shared", [None, "a", "b"])
@pytest.mark.parametrize("count", [1, 6])
def test_gemm_strided_batched(device, dtype, trans_a, trans_b, shared, count):
    m, n, k = 4, 5, 3
    rng = np.random.default_rng(0)
    a = rng.normal(size=(count, *((k, m) if trans_a else (m, k)))).astype(dtype)
    b = rng.normal(size=(count, *((n, k) if trans_b else (k, n)))).astype(dtype)
    pa, pb, pc = on_device(device, a), on_device(device, b), device.allocate(count * (m * n + 7) * a.itemsize)
    device.fill(pc, 0xFF, count * (m * n + 7) * a.itemsize)
    strides = 0 if shared == "a" else m * k, 0 if shared == "b" else k * n
    a, b = (a[:1] if shared == "a" else a), (b[:1] if shared == "b" else b)
    device.gemm_strided_batched(
        dtype, trans_a, trans_b, m, n, k, 2.0, pa, m if trans_a else k, strides[0], pb, k if trans_b else n, strides[1],
        0.0, pc, n, m * n + 7, count,
    )  # fmt: skip
    out = from_device(device, pc, (count, m * n + 7), dtype)
    wanted = 2 * (a.swapaxes(1, 2) if trans_a else a).astype(float) @ (b.swapaxes(1, 2) if trans_b else b)
    np.testing.assert_allclose(out[:, : m * n].reshape(count, m, n), wanted, rtol=1e-4, atol=1e-5)
    assert np.isnan(out[:, m * n :]).all()


# ---- Events and graphs


def test_events_measure_time(device):
    address = on_device(device, np.ones(64, np.float32))
    start = device.record_event()
    scale(device, address, 64, 1)
    end = device.record_event()
    device.synchronize()
    assert 0 < device.elapsed(start, end) < 60


def test_a_graph_runs_again_what_was_recorded(device):
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    address, out = on_device(device, x), device.allocate(36)
    kernel = device.module(SOURCE).kernel("scale")
    device.begin_capture()
    device.fill(out, 0xFF, 36)
    device.launch(kernel, (1, 1, 1), (64, 1, 1), 0, [np.uint64(address), np.int64(12), np.float32(2)])
    device.gemm("float32", False, True, 3, 3, 4, 1.0, address, 4, address, 4, 0.0, out, 3)
    device.gemm_strided_batched("float32", False, True, 3, 3, 4, 1.0, address, 4, 0, address, 4, 0, 0.0, out, 3, 9, 1)
    graph = device.end_capture()
    np.testing.assert_array_equal(from_device(device, address, (3, 4), np.float32), x)  # only recorded so far
    for _ in range(3):
        device.launch_graph(graph)
        x = 2 * x
        np.testing.assert_array_equal(from_device(device, out, (3, 3), np.float32), x @ x.T)
    device.upload(address, np.ones((3, 4), np.float32))
    device.launch_graph(graph)
    assert (from_device(device, out, (3, 3), np.float32) == 16).all()


# ---- What the emulator refuses beyond that


def test_another_library_launches_by_the_driver(device):
    calls = []
    device.launch_with("mine", lambda *given: calls.append(given), "a", 1)
    assert [rest for _, _, *rest in calls] == [["a", 1]]


def test_cupys_driver_lends_its_device_and_stream(fake):
    calls = []
    launcher = lambda *given: calls.append((*given, list(fake.current)))  # noqa: E731
    cupy_driver.driver(1).launch_with("mine", launcher)
    assert calls == [(1, STREAM, ["device 1", "stream"])]


def test_the_emulator_captures_and_watches_what_another_library_launches():
    device = cuda_emulator.driver(0)
    calls = []
    device.begin_capture()
    device.launch_with("mine", lambda *given: calls.append(given))
    graph = device.end_capture()
    assert calls == []
    device.launch_graph(graph)
    device.launch_graph(graph)
    assert calls == [(0, 0), (0, 0)]
    address = device.allocate(8)
    with pytest.raises(DeviceError, match="kernel mine wrote out of bounds"):
        device.launch_with("mine", lambda *given: ctypes.memset(address + 8, 1, 8))


def test_the_emulator_copies_and_multiplies_within_allocations_only():
    device = cuda_emulator.driver(0)
    address = device.allocate(100)
    device.poison(address + 40, 20)
    calls = [
        lambda: device.upload(address + 92, np.zeros(3, np.float32)),
        lambda: device.download(address - 4, np.zeros(3, np.float32)),
        lambda: device.fill(address + 101, 0, 1),
        lambda: device.fill(address + 59, 0, 1),
        lambda: device.upload(address, np.zeros(11, np.float32)),
        lambda: device.gemm("float32", False, False, 2, 1, 1, 1.0, address, 10, address, 1, 0.0, address + 80, 1),
        lambda: device.gemm("float32", False, False, 1, 1, 1, 1.0, address, 1, address, 1, 0.0, address + 200, 1),
    ]
    for call in calls:
        with pytest.raises(DeviceError, match="illegal address"):
            call()
    device.upload(address, np.zeros(10, np.float32))
    device.gemm("float32", False, False, 2, 1, 1, 1.0, address, 8, address, 1, 0.0, address + 80, 1)
    with pytest.raises(DeviceError, match="misaligned"):
        device.gemm("float32", False, False, 1, 1, 1, 1.0, address + 2, 1, address, 1, 0.0, address + 80, 1)
    with pytest.raises(DeviceError, match="leading dimension of 2"):
        device.gemm("float32", False, False, 1, 1, 3, 1.0, address, 2, address, 1, 0.0, address + 80, 1)
    device.free(address)
    with pytest.raises(DeviceError, match="no allocation"):
        device.free(address)
    with pytest.raises(DeviceError, match="illegal address"):
        device.fill(address, 0, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([np.uint64(0), np.int64(1)], "kernel scale takes 3 arguments, not 2"),
        ([np.uint64(0), np.int32(1), np.float32(1)], "argument 2 of kernel scale is a 32-bit.*its parameter a 64-bit"),
        ([np.uint64(0), np.int64(1), np.float64(1)], "argument 3 of kernel scale is a double, its parameter a float"),
        ([np.int64(0), np.int64(1), np.float32(1)], "argument 1 of kernel scale is a 64-bit.*its parameter an address"),
        ([0, np.int64(1), np.float32(1)], "argument 1 of kernel scale, 0, is of none of LAUNCH_TYPES"),
    ],
)
def test_the_emulator_checks_arguments(arguments, message):
    device = cuda_emulator.driver(0)
    with pytest.raises(DeviceError, match=message):
        device.launch(device.module(SOURCE).kernel("scale"), (1, 1, 1), (1, 1, 1), 0, arguments)


@pytest.mark.parametrize(
    ("grid", "block", "shared"),
    [
        ((0, 1, 1), (1, 1, 1), 0),
        ((1, 1, 1), (32, 0, 1), 0),
        ((1, 65536, 1), (1, 1, 1), 0),
        ((1, 1, 1), (1025, 1, 1), 0),
        ((1, 1, 1), (32, 33, 1), 0),
        ((1, 1, 1), (1, 1, 65), 0),
        ((1, 1, 1), (1, 1, 1), 49153),
    ],
)
def test_the_emulator_checks_launches_as_a_gpu_does(grid, block, shared):
    device = cuda_emulator.driver(0)
    arguments = [np.uint64(device.allocate(4)), np.int64(0), np.float32(1)]
    with pytest.raises(DeviceError, match="kernel scale"):
        device.launch(device.module(SOURCE).kernel("scale"), grid, block, shared, arguments)


def test_the_emulator_allows_nothing_else_while_a_graph_is_captured():
    device = cuda_emulator.driver(0)
    address = device.allocate(4)
    device.begin_capture()
    for call in (
        lambda: device.allocate(4),
        lambda: device.free(address),
        lambda: device.upload(address, np.zeros(1, np.float32)),
        lambda: device.download(address, np.zeros(1, np.float32)),
        device.synchronize,
        device.begin_capture,
    ):
        with pytest.raises(DeviceError, match="while a graph is captured"):
            call()
    assert device.end_capture() == []
    with pytest.raises(DeviceError, match="without begin_capture"):
        device.end_capture()


# ---- CuPy's driver


def test_properties(fake):
    properties = cupy_driver.driver(1).properties
    assert properties.name == "Fake GPU" and properties.capability == (8, 6)
    assert (properties.memory, properties.multiprocessors, properties.shared_memory) == (1 << 30, 7, 101376)


def test_more_than_48_kib_of_shared_memory_are_asked_for(fake):
    device = cupy_driver.driver(1)
    kernel = device.module(SOURCE).kernel("scale")
    arguments = [np.uint64(device.allocate(4)), np.int64(1), np.float32(1)]
    device.launch(kernel, (1, 1, 1), (1, 1, 1), 60000, arguments)
    device.launch(kernel, (1, 1, 1), (1, 1, 1), 50000, arguments)


def test_a_fault_shows_at_the_next_wait_and_under_debug_with_its_kernel(fake):
    device = cupy_driver.driver(1)
    address = on_device(device, np.ones(4, np.float32))
    fault = CUDARuntimeError(700, "cudaErrorIllegalAddress: an illegal memory access was encountered")
    fake.fault = fault
    scale(device, address, 4, 2)
    with pytest.raises(DeviceError, match=r"^synchronize on Fake GPU: cudaErrorIllegalAddress.*init\(debug=True\)"):
        device.synchronize()
    dy.init(debug=True)
    fake.fault = fault
    with pytest.raises(DeviceError, match=r"^kernel scale on Fake GPU: cudaErrorIllegalAddress.*encountered$"):
        scale(device, address, 4, 2)
    device.begin_capture()
    scale(device, address, 4, 2)  # not waited for
    device.end_capture()


@pytest.mark.parametrize(
    ("status", "version", "message"),
    [
        (35, 0, "no CUDA driver: install NVIDIA's"),
        (35, 12040, r"too old: it knows CUDA 12.4, and CuPy uses CUDA 13.2.*dynbatch\[cuda12\]"),
        (999, 13000, "CUDA cannot be used: from the driver"),
    ],
)
def test_a_driver_that_cannot_be_used(fake, status, version, message):
    fake.cuda.runtime.status, fake.cuda.runtime.driver_version = status, version
    with pytest.raises(DeviceError, match=message):
        cupy_driver.driver(0)


def test_no_such_gpu(fake):
    with pytest.raises(DeviceError, match="no GPU 2: the CUDA driver finds 2"):
        cupy_driver.driver(2)
    fake.cuda.runtime.status = 100
    with pytest.raises(DeviceError, match="no GPU 0: the CUDA driver finds 0"):
        cupy_driver.driver(0)


def test_without_cupy_the_extra_is_named(monkeypatch):
    cupy_driver._cupy.cache_clear()
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceError, match=r'"cuda" needs CuPy.*pip install "dynbatch\[cuda13\]".*\[cuda12\]'):
        cupy_driver.driver(0)


# ---- Devices


@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.setenv("DYNBATCH_CUDA_DRIVER", "tests.cuda_emulator")
    devices._driver.cache_clear()
    yield
    devices._driver.cache_clear()


def test_devices_are_listed(emulated):
    assert [(d.name, d.product) for d in dy.devices()] == [
        ("cpu", "NumPy and numba"), ("cuda:0", "emulator 0"), ("cuda:1", "emulator 1")
    ]  # fmt: skip
    assert dy.devices()[1].memory == 64 << 30


def test_a_device_has_one_driver(emulated):
    assert devices.driver("cuda") is devices.driver("cuda:0") is not devices.driver("cuda:1")
    assert devices.driver("cuda:1").properties.name == "emulator 1"


def test_without_a_gpu_there_is_the_cpu(monkeypatch):
    monkeypatch.delenv("DYNBATCH_CUDA_DRIVER", raising=False)
    monkeypatch.setattr(cupy_driver, "count", no_gpus)
    assert [d.name for d in dy.devices()] == ["cpu"]


def no_gpus():
    raise DeviceError("there is none")


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cpu"])
def test_unknown_devices(name):
    with pytest.raises(ConfigurationError, match=f"unknown device '{name}'"):
        devices.driver(name)


def test_a_driver_that_cannot_be_imported(monkeypatch):
    monkeypatch.setenv("DYNBATCH_CUDA_DRIVER", "no.such.module")
    with pytest.raises(ConfigurationError, match=r"DYNBATCH_CUDA_DRIVER='no\.such\.module'"):
        devices.driver("cuda:17")


def test_importing_needs_neither_cupy_nor_a_compiler():
    program = "import sys, tests.cuda_emulator, dynbatch, dynbatch.cuda.cupy_driver; print('cupy' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=CHECKOUT, env=os.environ | {"PATH": ""}, capture_output=True, text=True
    )
    assert done.stdout == "False\n", done.stderr


def test_a_session_makes_device_and_stream_current_once(fake):
    """For all calls inside, also behind one that fails."""
    driver = cupy_driver.driver(1)
    seen = []

    def fail(*_):
        raise CUDARuntimeError(700, "an illegal memory access")

    with driver.session():
        driver.launch_with("one", lambda *_: seen.append(list(fake.current)))
        with pytest.raises(DeviceError, match="kernel two"):
            driver.launch_with("two", fail)
        driver.launch_with("three", lambda *_: seen.append(list(fake.current)))
    assert seen == [["device 1", "stream"]] * 2 and not fake.current
