"""The emulator computes what CUDA's manual says, and sees what a GPU hides: races, divergence, stray accesses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import intrinsics
import numpy as np
import pytest

from dynbatch.errors import CompileError, ConfigurationError, DeviceError
from tests.cuda_emulator import asan, available, driver

if not available():
    pytest.skip("the emulator needs g++", allow_module_level=True)

CHECKOUT = Path(__file__).resolve().parents[2]
SEEDS = range(8)


@pytest.fixture(params=[0, 1, 2], ids="seed{}".format)
def device(request):
    """An emulator, in the natural order and in two others."""
    device = driver(0)
    device.seed = request.param
    return device


def run(device, source, name, grid, block, arrays, *scalars, shared=0):
    """Launch a kernel on copies of arrays and on scalars; the arrays as it left them."""
    addresses = [device.allocate(a.nbytes) for a in arrays]
    for address, array in zip(addresses, arrays):
        device.upload(address, array)
    arguments = [*map(np.uint64, addresses), *scalars]
    device.launch(device.module(source).kernel(name), grid, block, shared, arguments)
    results = [np.empty_like(a) for a in arrays]
    for address, result in zip(addresses, results):
        device.download(address, result)
        device.free(address)
    return results


# ---- What one thread computes


@pytest.mark.parametrize("n", range(len(intrinsics.ALL)), ids=lambda n: intrinsics.ALL[n][2])
def test_intrinsic(n):
    of, to, _, reference = intrinsics.ALL[n]
    x, y = intrinsics.operands(of)
    out = np.empty(len(x), to)
    *_, got = run(driver(0), intrinsics.source(), f"f{n}", (1, 1, 1), (len(x), 1, 1), [x, y, out])
    with np.errstate(all="ignore"):
        wanted = reference(x, y)
    if np.issubdtype(to, np.floating):
        epsilon = np.finfo(to).eps
        np.testing.assert_allclose(got, wanted, rtol=16 * epsilon, atol=4 * epsilon)
    else:
        np.testing.assert_array_equal(got, wanted)


VECTORS = r"""
extern "C" __global__ void floats(const float4* x, float2* y, int n) {
  int i = threadIdx.x; if (i >= n) return;
  float4 v = __ldg(x + i);
  y[i] = make_float2(v.x + v.y, v.z * v.w);
}
extern "C" __global__ void others(const double2* x, const int4* k, double* y, long long* sums) {
  int i = threadIdx.x;
  y[i] = x[i].x - x[i].y;
  int4 v = k[i];
  uint4 u = make_uint4(v.x, v.y, v.z, v.w);
  sums[i] = (long long)u.x + u.y + u.z + u.w;
}
extern "C" __global__ void sizes(int* out) {
  int found[] = {sizeof(float2), alignof(float2), sizeof(float3), sizeof(float4), alignof(float4), sizeof(double2),
                 alignof(double2), sizeof(int2), alignof(int4), sizeof(uchar4), alignof(longlong2)};
  for (int i = 0; i < 11; i++) out[i] = found[i];
}
"""


def test_vector_types(device):
    x = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    _, y = run(device, VECTORS, "floats", (1, 1, 1), (32, 1, 1), [x, np.empty((20, 2), np.float32)], np.int32(20))
    np.testing.assert_array_equal(y, np.stack([x[:, 0] + x[:, 1], x[:, 2] * x[:, 3]], 1))
    d, k = np.random.default_rng(0).normal(size=(20, 2)), np.arange(80, dtype=np.int32).reshape(20, 4)
    *_, y, sums = run(device, VECTORS, "others", (1, 1, 1), (20, 1, 1), [d, k, np.empty(20), np.empty(20, np.int64)])
    np.testing.assert_array_equal(y, d[:, 0] - d[:, 1])
    np.testing.assert_array_equal(sums, k.sum(1))
    (sizes,) = run(device, VECTORS, "sizes", (1, 1, 1), (1, 1, 1), [np.empty(11, np.int32)])
    assert sizes.tolist() == [8, 8, 12, 16, 16, 16, 16, 8, 16, 4, 16]


# ---- Which threads there are

INDICES = r"""
extern "C" __global__ void indices(int* out) {
  int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  int* place = out + 6 * (block * blockDim.x * blockDim.y * blockDim.z + thread);
  place[0] = blockIdx.x, place[1] = blockIdx.y, place[2] = blockIdx.z;
  place[3] = threadIdx.x, place[4] = threadIdx.y, place[5] = threadIdx.z;
}
"""


@pytest.mark.parametrize("grid", [(1, 1, 1), (7, 1, 1), (3, 2, 1), (2, 3, 4)])
@pytest.mark.parametrize("block", [(1, 1, 1), (33, 1, 1), (8, 5, 1), (2, 3, 5)])
def test_every_thread_of_a_grid_runs_once(device, grid, block):
    shape = (*grid[::-1], *block[::-1])
    (out,) = run(device, INDICES, "indices", grid, block, [np.full((*shape, 6), -1, np.int32)])
    z, y, x, tz, ty, tx = np.indices(shape)
    np.testing.assert_array_equal(out, np.stack([x, y, z, tx, ty, tz], -1))


# ---- Warps

WARPS = r"""
#define LANE (threadIdx.x & 31)
#define SHUFFLE(T, NAME) \
extern "C" __global__ void NAME(const T* x, T* out, int n, int how, int lanes, int width) { \
  int i = threadIdx.x; if (i >= n) return; \
  T v = x[i]; \
  if (how == 0) out[i] = __shfl_sync(0xffffffffu, v, lanes, width); \
  if (how == 1) out[i] = __shfl_up_sync(0xffffffffu, v, lanes, width); \
  if (how == 2) out[i] = __shfl_down_sync(0xffffffffu, v, lanes, width); \
  if (how == 3) out[i] = __shfl_xor_sync(0xffffffffu, v, lanes, width); }
SHUFFLE(int, ints)
SHUFFLE(unsigned, unsigneds)
SHUFFLE(float, floats)
SHUFFLE(double, doubles)
SHUFFLE(long long, longs)
extern "C" __global__ void votes(const int* x, unsigned* out) {
  int yes = x[threadIdx.x];
  out[4 * threadIdx.x] = __ballot_sync(0xffffffffu, yes);
  out[4 * threadIdx.x + 1] = __any_sync(0xffffffffu, yes);
  out[4 * threadIdx.x + 2] = __all_sync(0xffffffffu, yes);
  out[4 * threadIdx.x + 3] = LANE % 2 ? __ballot_sync(0xaaaaaaaau, yes) : __ballot_sync(0x55555555u, yes);
}
extern "C" __global__ void sums(const double* x, double* out, int n) {  // of each warp, half of which may be missing
  double v = threadIdx.x < n ? x[threadIdx.x] : 0.0;
  for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(0xffffffffu, v, d);
  if (LANE == 0) out[threadIdx.x / 32] = v;
}
extern "C" __global__ void halves(const int* x, int* out) {  // each half of a warp on its own, in a loop of its own
  int v = x[threadIdx.x];
  unsigned mask = LANE < 16 ? 0x0000ffffu : 0xffff0000u;
  for (int round = 0; round < (LANE < 16 ? 3 : 5); round++) v += __shfl_xor_sync(mask, v, 1, 16);
  out[threadIdx.x] = v;
}
extern "C" __global__ void through_memory(int* x) {
  for (int d = 1; d < 32; d *= 2) {
    int v = LANE >= d ? x[LANE - d] : 0;
    __syncwarp();
    x[LANE] += v;
    __syncwarp();
  }
}
"""


def shuffled(x, how, lanes, width):
    """CUDA's shuffles in NumPy; -1 or NaN, as garbage is, where a lane is read that does not exist."""
    out = np.frombuffer(b"\xff" * x.nbytes, x.dtype).copy()
    for i in range(len(x)):
        warp, lane = divmod(i, 32)
        part = lane - lane % width
        if how == 0:
            source = part + lanes % width
        elif how == 1:
            source = lane - lanes if lane - lanes >= part else lane
        elif how == 2:
            source = lane + lanes if lane + lanes < part + width else lane
        else:
            source = lane ^ lanes if (lane ^ lanes) < part + width else lane
        if 32 * warp + source < len(x):
            out[i] = x[32 * warp + source]
    return out


@pytest.mark.parametrize("kernel", ["ints", "unsigneds", "floats", "doubles", "longs"])
@pytest.mark.parametrize("how", range(4), ids=["idx", "up", "down", "xor"])
def test_shuffles(device, kernel, how):
    dtype = {"ints": "i4", "unsigneds": "u4", "floats": "f4", "doubles": "f8", "longs": "i8"}[kernel]
    for count in (1, 20, 32, 33, 80, 96):
        x = np.random.default_rng(count).integers(1, 1 << 30, count).astype(dtype)
        for lanes, width in ((0, 32), (1, 32), (5, 32), (16, 32), (31, 32), (1, 8), (3, 4), (9, 16), (1, 1)):
            scalars = map(np.int32, (count, how, lanes, width))
            _, out = run(device, WARPS, kernel, (1, 1, 1), (96, 1, 1), [x, np.zeros_like(x)], *scalars)
            np.testing.assert_array_equal(out, shuffled(x, how, lanes, width), f"{count=} {lanes=} {width=}")


@pytest.mark.parametrize("yes", [np.zeros(96), np.ones(96), np.arange(96) % 3 == 0], ids=["none", "all", "thirds"])
def test_votes(device, yes):
    yes = yes.astype(np.int32)
    _, out = run(device, WARPS, "votes", (1, 1, 1), (96, 1, 1), [yes, np.empty((96, 4), np.uint32)])
    for i in range(96):
        warp = yes[i // 32 * 32 :][:32].astype(bool)
        mask = sum(1 << lane for lane in range(32) if warp[lane])
        assert out[i].tolist() == [mask, warp.any(), warp.all(), mask & (0xAAAAAAAA if i % 2 else 0x55555555)]


@pytest.mark.parametrize("count", [1, 16, 31, 32, 50, 128])
def test_sums_of_warps(device, count):
    x = np.random.default_rng(0).integers(-1000, 1000, count).astype(float)
    threads = -(-count // 32) * 32
    _, out = run(device, WARPS, "sums", (1, 1, 1), (threads, 1, 1), [x, np.empty(threads // 32)], np.int32(count))
    assert out.tolist() == [x[w : w + 32].sum() for w in range(0, count, 32)]


def test_parts_of_a_warp_do_not_wait_for_each_other(device):
    x = np.arange(64, dtype=np.int32)
    _, out = run(device, WARPS, "halves", (1, 1, 1), (64, 1, 1), [x, np.empty_like(x)])
    wanted = x.copy()
    for lane in range(64):
        pair = x[lane] + x[lane ^ 1]
        wanted[lane] = pair * (4 if lane % 32 < 16 else 16)
    np.testing.assert_array_equal(out, wanted)


def test_a_warp_that_synchronizes_goes_through_memory(device):
    (out,) = run(device, WARPS, "through_memory", (1, 1, 1), (32, 1, 1), [np.ones(32, np.int32)])
    np.testing.assert_array_equal(out, np.arange(1, 33))


# ---- Blocks

BLOCKS = r"""
template <class T> __device__ T block_sum(T v) {
  __shared__ T parts[32];
  for (int d = 16; d; d >>= 1) v += __shfl_down_sync(0xffffffffu, v, d);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
  __syncthreads();
  v = threadIdx.x < blockDim.x / 32 ? parts[threadIdx.x] : T(0);
  if (threadIdx.x < 32)
    for (int d = 16; d; d >>= 1) v += __shfl_down_sync(0xffffffffu, v, d);
  __syncthreads();
  return v;
}
#define ROW_SUMS(T, NAME) \
extern "C" __global__ void __launch_bounds__(256) NAME(const T* x, T* out, long long width) { \
  T v = 0; \
  for (long long i = threadIdx.x; i < width; i += blockDim.x) v += x[blockIdx.x * width + i]; \
  v = block_sum(v); \
  T w = block_sum(threadIdx.x == 7 ? T(100) : T(0)); \
  if (threadIdx.x == 0) out[blockIdx.x] = v + w; }
ROW_SUMS(float, float_sums)
ROW_SUMS(double, double_sums)

extern "C" __global__ void transpose(const float* x, float* out, int rows, int columns) {
  __shared__ float tile[8][9];
  int row = blockIdx.y * 8 + threadIdx.y, column = blockIdx.x * 8 + threadIdx.x;
  if (row < rows && column < columns) tile[threadIdx.y][threadIdx.x] = x[row * columns + column];
  __syncthreads();
  row = blockIdx.x * 8 + threadIdx.y, column = blockIdx.y * 8 + threadIdx.x;
  if (row < columns && column < rows) out[row * rows + column] = tile[threadIdx.x][threadIdx.y];
}
extern "C" __global__ void reverse(float* x, int n) {
  extern __shared__ __align__(16) unsigned char memory[];
  float* s = (float*)memory;
  double* d = (double*)(memory + 4 * ((n + 1) / 2 * 2));
  s[threadIdx.x] = x[threadIdx.x], d[threadIdx.x] = 2.0 * x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = s[n - 1 - threadIdx.x] + (float)d[n - 1 - threadIdx.x];
}
extern "C" __global__ void counts(const int* x, int* out) {
  int yes = x[threadIdx.x];
  int n = __syncthreads_count(yes), all = __syncthreads_and(yes), any = __syncthreads_or(yes);
  out[threadIdx.x] = n + 1000 * all + 10000 * any;
}
extern "C" __global__ void unwritten(float* out) {  // what an earlier block wrote is gone
  __shared__ float s[4];
  extern __shared__ float d[];
  out[4 * blockIdx.x + threadIdx.x] = s[threadIdx.x] + d[threadIdx.x];
  s[threadIdx.x] = d[threadIdx.x] = 1.0f;
}
"""


@pytest.mark.parametrize(("name", "dtype"), [("float_sums", np.float32), ("double_sums", np.float64)])
@pytest.mark.parametrize("threads", [32, 64, 256])
def test_sums_of_blocks(device, name, dtype, threads):
    x = np.random.default_rng(0).integers(-50, 50, (5, 301)).astype(dtype)
    arrays = [x, np.empty(5, dtype)]
    _, out = run(device, BLOCKS, name, (5, 1, 1), (threads, 1, 1), arrays, np.int64(301))
    np.testing.assert_array_equal(out, x.sum(1) + 100)


@pytest.mark.parametrize("shape", [(1, 1), (8, 8), (7, 30), (17, 9)])
def test_static_shared_memory(device, shape):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    grid = (-(-shape[1] // 8), -(-shape[0] // 8), 1)
    arrays = [x, np.empty(shape[::-1], np.float32)]
    _, out = run(device, BLOCKS, "transpose", grid, (8, 8, 1), arrays, np.int32(shape[0]), np.int32(shape[1]))
    np.testing.assert_array_equal(out, x.T)


@pytest.mark.parametrize("n", [1, 5, 64, 1024])
def test_dynamic_shared_memory(device, n):
    x = np.arange(n, dtype=np.float32)
    (out,) = run(device, BLOCKS, "reverse", (1, 1, 1), (n, 1, 1), [x], np.int32(n), shared=12 * n + 4)
    np.testing.assert_array_equal(out, 3 * x[::-1])


@pytest.mark.parametrize("yes", [[0] * 40, [1] * 40, [0, 1] * 20])
def test_barriers_that_count(device, yes):
    _, out = run(device, BLOCKS, "counts", (1, 1, 1), (40, 1, 1), [np.array(yes, np.int32), np.empty(40, np.int32)])
    assert set(out.tolist()) == {sum(yes) + 1000 * all(yes) + 10000 * any(yes)}


def test_shared_memory_begins_as_garbage_in_each_block(device):
    (out,) = run(device, BLOCKS, "unwritten", (3, 1, 1), (4, 1, 1), [np.zeros(12, np.float32)], shared=16)
    assert np.isnan(out).all()


# ---- Atomics

ATOMICS = r"""
#define ADD(T, NAME) extern "C" __global__ void NAME(T* x) { atomicAdd(x + threadIdx.x % 3, (T)threadIdx.x); }
ADD(int, add_int)
ADD(unsigned, add_unsigned)
ADD(unsigned long long, add_long)
ADD(float, add_float)
ADD(double, add_double)
extern "C" __global__ void extremes(int* x, unsigned long long* u) {
  int v = (threadIdx.x * 7919) % 101 - 50;
  atomicMax(x, v), atomicMin(x + 1, v);
  atomicMax(u, (unsigned long long)(v + 50) << 40), atomicMin(u + 1, (unsigned long long)(v + 50) << 40);
}
extern "C" __global__ void maximum_by_cas(float* x) {  // the usual loop
  int* place = (int*)x;
  int seen = *place;
  while (__int_as_float(seen) < float(threadIdx.x)) {
    int found = atomicCAS(place, seen, __float_as_int(float(threadIdx.x)));
    if (found == seen) break;
    seen = found;
  }
}
extern "C" __global__ void others(unsigned* x, unsigned* old) {
  old[threadIdx.x] = atomicAdd(x, 1u);
  atomicOr(x + 1, 1u << threadIdx.x % 32), atomicAnd(x + 2, ~(1u << threadIdx.x % 32)), atomicXor(x + 3, threadIdx.x);
  atomicExch(x + 4, 5u), atomicInc(x + 5, 9u), atomicSub(x + 6, 2u);
}
extern "C" __global__ void last_block(const double* x, double* parts, double* out, unsigned* done) {
  parts[blockIdx.x] = x[blockIdx.x];
  __threadfence();
  if (atomicAdd(done, 1u) != gridDim.x - 1) return;
  double sum = 0;
  for (int i = 0; i < gridDim.x; i++) sum += parts[i];
  *out = sum;
}
"""


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("add_int", "i4"), ("add_unsigned", "u4"), ("add_long", "u8"), ("add_float", "f4"), ("add_double", "f8")],
)
def test_atomic_add(device, name, dtype):
    (out,) = run(device, ATOMICS, name, (2, 1, 1), (100, 1, 1), [np.zeros(3, dtype)])
    assert out.tolist() == [2 * sum(range(n, 100, 3)) for n in range(3)]


def test_other_atomics(device):
    v = np.arange(64) * 7919 % 101 - 50
    arrays = [np.array([-1000, 1000], np.int32), np.array([0, 2**63], np.uint64)]
    x, u = run(device, ATOMICS, "extremes", (1, 1, 1), (64, 1, 1), arrays)
    assert x.tolist() == [v.max(), v.min()]
    assert u.tolist() == [(int(v.max()) + 50) << 40, (int(v.min()) + 50) << 40]
    (x,) = run(device, ATOMICS, "maximum_by_cas", (1, 1, 1), (70, 1, 1), [np.array([3.5], np.float32)])
    assert x.tolist() == [69]
    start = np.array([0, 0, 2**32 - 1, 0, 0, 0, 300], np.uint32)
    x, old = run(device, ATOMICS, "others", (1, 1, 1), (64, 1, 1), [start, np.empty(64, np.uint32)])
    assert x.tolist() == [64, 2**32 - 1, 0, 0, 5, 4, 172]
    assert sorted(old.tolist()) == list(range(64))
    x = np.arange(9.0)
    *_, out, _ = run(device, ATOMICS, "last_block", (9, 1, 1), (1, 1, 1), [x, x.copy(), np.zeros(1), np.zeros(1, "u4")])
    assert out == 36


# ---- Orders

RACES = r"""
#ifdef FIRST
#define FIRST_BARRIER __syncthreads();
#else
#define FIRST_BARRIER
#endif
#ifdef SECOND
#define SECOND_BARRIER __syncthreads();
#else
#define SECOND_BARRIER
#endif
extern "C" __global__ void shift(int* x, int rounds) {  // each round, every value goes one place up
  __shared__ int s[64];
  int v = x[threadIdx.x];
  for (int round = 0; round < rounds; round++) {
    s[threadIdx.x] = v;
    FIRST_BARRIER
    v = s[(threadIdx.x + 63) % 64];
    SECOND_BARRIER
  }
  x[threadIdx.x] = v;
}
extern "C" __global__ void pass_on(int* x) {  // relies on the order of blocks, or of warps: wrong however it is done
  if (blockIdx.x > 0) x[blockIdx.x] = x[blockIdx.x - 1] + 1;
}
"""


def shifts(defines, seed):
    """Whether the values end where they should."""
    device = driver(0)
    device.seed = seed
    x = np.arange(64, dtype=np.int32)
    source = "".join(f"#define {d}\n" for d in defines) + RACES
    (out,) = run(device, source, "shift", (1, 1, 1), (64, 1, 1), [x], np.int32(3))
    return bool((out == np.roll(x, 3)).all())


def test_with_its_barriers_a_kernel_is_right_in_every_order():
    assert all(shifts(["FIRST", "SECOND"], seed) for seed in SEEDS)


@pytest.mark.parametrize("kept", ["FIRST", "SECOND"])
def test_a_missing_barrier_shows(kept):
    assert not all(shifts([kept], seed) for seed in SEEDS)


def test_a_missing_barrier_that_one_order_hides_shows_in_another():
    source = """extern "C" __global__ void broadcast(int* x) {
      __shared__ int first;
      if (threadIdx.x == 0) first = x[0];
      x[threadIdx.x] = first;
    }"""
    right = []
    for seed in SEEDS:
        device = driver(0)
        device.seed = seed
        (out,) = run(device, source, "broadcast", (1, 1, 1), (64, 1, 1), [np.arange(64, dtype=np.int32)])
        right.append(not out.any())
    assert right[0]  # thread 0 comes first in the natural order
    assert not all(right)


def test_blocks_that_rely_on_their_order_show():
    outs = []
    for seed in SEEDS:
        device = driver(0)
        device.seed = seed
        (out,) = run(device, RACES, "pass_on", (20, 1, 1), (1, 1, 1), [np.zeros(20, np.int32)])
        outs.append(tuple(out.tolist()))
    assert outs[0] == tuple(range(20))
    assert len(set(outs)) > 1


def test_an_order_can_be_repeated():
    def order(seed):
        device = driver(0)
        device.seed = seed
        source = 'extern "C" __global__ void f(int* n, int* out) { out[threadIdx.x] = atomicAdd(n, 1); }'
        arrays = [np.zeros(1, np.int32), np.empty(50, np.int32)]
        return [tuple(run(device, source, "f", (1, 1, 1), (50, 1, 1), arrays)[1].tolist()) for _ in range(2)]

    assert order(0)[0] == order(0)[1] == tuple(range(50))
    assert order(3) == order(3)
    assert len({*order(3), *order(4)}) == 4


def test_the_seed_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("DYNBATCH_EMULATOR_SEED", "7")
    assert driver(0).seed == 7
    monkeypatch.setenv("DYNBATCH_EMULATOR_SEED", "seven")
    with pytest.raises(ConfigurationError, match="DYNBATCH_EMULATOR_SEED='seven'"):
        driver(0)


# ---- Faults, each an error that names the kernel; the next launch is not affected

FAULTS = {
    "left": (
        "if (threadIdx.x < 40) __syncthreads();",
        r"kernel left, block \(., 0, 0\): divergent: 24 of 64 threads have left, and 40 .* __syncthreads in line 2",
    ),
    "two_barriers": (
        "if (threadIdx.x % 2) __syncthreads();\n else __syncthreads();",
        r"kernel two_barriers.*divergent.*__syncthreads in line . and in line .",
    ),
    "half_a_warp": (
        "if (threadIdx.x % 32 < 16) __syncwarp(); else __syncthreads();",
        r"kernel half_a_warp.*divergent",
    ),
    "two_shuffles": (
        "if (threadIdx.x % 32 < 16) x[0] = __shfl_sync(~0u, 1, 0);\n else x[0] = __shfl_sync(~0u, 1, 0);",
        r"kernel two_shuffles.*divergent: lanes of one warp .* a shuffle in line . and at a shuffle in line .",
    ),
    "other_masks": (
        "x[0] = __shfl_sync(threadIdx.x % 32 < 16 ? 0xffffffffu : 0xffff0000u, 1, 16);\n __syncthreads();",
        r"kernel other_masks.*divergent.*a shuffle in line 2 \(mask 0xffffffff\), others elsewhere",
    ),
    "not_in_mask": (
        "__syncwarp(0xfffffffeu);",
        r"kernel not_in_mask.*lane 0, is not in the mask 0xfffffffe that it passes to .*__syncwarp in line 2",
    ),
    "misaligned": (
        "float4* p = (float4*)(x + 1);\n p->x = 1.0f;",
        r"kernel misaligned.*misaligned access to address 0x\w+4 in line 3",
    ),
    "local_bounds": (
        "int a[4] = {0, 1, 2, 3};\n x[0] = a[blockDim.x - 60 + (int)threadIdx.x];",
        r"kernel local_bounds.*index \d+ out of the bounds of an array in line 3",
    ),
    "division": ("x[0] = 5 / ((int)blockDim.x - 64);", "kernel division.*integer division by zero in line 2"),
    "trap": ("if (threadIdx.x == 3) __trap();", "kernel trap.*__trap in line 2"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_name_the_kernel_and_the_line(device, name):
    body, message = FAULTS[name]
    source = f'extern "C" __global__ void {name}(int* x) {{\n {body}\n}}'
    source += '\nextern "C" __global__ void sound(int* x) { __syncthreads(); x[threadIdx.x] = 1; __syncwarp(); }'
    for _ in range(2):
        with pytest.raises(DeviceError, match=message):
            run(device, source, name, (2, 1, 1), (64, 1, 1), [np.zeros(64, np.int32)])
        (x,) = run(device, source, "sound", (1, 1, 1), (64, 1, 1), [np.zeros(64, np.int32)])
        assert x.all()


def test_threads_that_left_are_not_waited_for_within_a_warp(device):
    source = """extern "C" __global__ void f(int* x) {
      if (threadIdx.x % 3 == 0) return;
      x[threadIdx.x] = __popc(__ballot_sync(0xffffffffu, 1));
    }"""
    (x,) = run(device, source, "f", (1, 1, 1), (32, 1, 1), [np.zeros(32, np.int32)])
    assert x.tolist() == [0 if i % 3 == 0 else 21 for i in range(32)]


@pytest.mark.skipif(asan.ENABLED, reason="AddressSanitizer ends the process there, which another test looks at")
@pytest.mark.parametrize(("index", "fault"), [(24, False), (25, True), (-1, True), (25 + 15, True)])
def test_a_write_beside_a_tensor_names_the_kernel(index, fault):
    device = driver(0)
    kernel = device.module('extern "C" __global__ void stray(float* x, int i) { x[i] = 1.0f; }').kernel("stray")
    start = device.allocate(1000)
    x = start + device.red_zone
    device.poison(start, device.red_zone)
    device.poison(x + 100, device.red_zone)
    arguments = [np.uint64(x), np.int32(index)]
    if fault:
        with pytest.raises(DeviceError, match="kernel stray wrote out of bounds"):
            device.launch(kernel, (1, 1, 1), (1, 1, 1), 0, arguments)
    else:
        device.launch(kernel, (1, 1, 1), (1, 1, 1), 0, arguments)
    device.unpoison(x + 100, device.red_zone)
    device.launch(kernel, (1, 1, 1), (1, 1, 1), 0, [np.uint64(x), np.int32(25)])  # now it is memory
    device.free(start)


ASAN_PROGRAM = r"""
import sys
import numpy as np
from tests.cuda_emulator import driver

SOURCE = '''
extern "C" __global__ void reads(float* x, int i) { x[0] = x[i]; }
extern "C" __global__ void writes(float* x, int i) { x[i] = 1.0f; }
extern "C" __global__ void reads_shared(float* x, int i) {
  __shared__ float a[8]; __shared__ float b[8];
  a[threadIdx.x] = b[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  float* p = a; x[threadIdx.x] = p[i];
}
extern "C" __global__ void reads_dynamic(float* x, int i) {
  extern __shared__ float s[];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = s[i];
}
'''
d = driver(0)
module = d.module(SOURCE)
start = d.allocate(32 + d.red_zone + 32)
neighbour = start + 32 + d.red_zone
d.fill(start, 0, 32), d.fill(neighbour, 0, 32)
d.poison(start + 32, d.red_zone)


def launch(name, address, index):
    d.launch(module.kernel(name), (1, 1, 1), (8, 1, 1), 32, [np.uint64(address), np.int32(index)])


for name in ("reads", "writes", "reads_shared", "reads_dynamic"):
    launch(name, start, 7), launch(name, neighbour, 0)
print("sound", flush=True)
launch(sys.argv[1], neighbour if int(sys.argv[2]) < 0 else start, int(sys.argv[2]))
print("unnoticed")
"""


def run_with_asan(tmp_path, *arguments):
    program = tmp_path / "program.py"
    program.write_text(ASAN_PROGRAM, encoding="utf-8")
    environment = os.environ | asan.environment() | {"PYTHONPATH": str(CHECKOUT)}
    return subprocess.run([sys.executable, program, *arguments], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("kernel", "index"),
    [
        ("reads", 8),
        ("reads", -1),
        ("writes", 8),
        ("writes", -2),
        ("writes", 23),
        ("reads_shared", 8),
        ("reads_dynamic", 8),
    ],
)
def test_address_sanitizer_ends_a_stray_kernel_with_its_name(tmp_path, kernel, index):
    done = run_with_asan(tmp_path, kernel, str(index))
    assert done.stdout == "sound\n" and done.returncode != 0
    assert f"out of bounds: kernel {kernel}, block (0, 0, 0), thread (" in done.stderr
    assert ("READ" if kernel.startswith("reads") else "WRITE") + " of size 4" in done.stderr


def test_address_sanitizer_must_be_loaded_first():
    command = [sys.executable, "-c", "from tests.cuda_emulator import driver; driver(0)"]
    environment = os.environ | {"DYNBATCH_EMULATOR_ASAN": "1", "PYTHONPATH": str(CHECKOUT), "LD_PRELOAD": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode and "started with DYNBATCH_EMULATOR_ASAN=1 LD_PRELOAD=" in done.stderr


# ---- Modules


def test_lines_of_messages_are_those_of_the_source():
    with pytest.raises(CompileError, match=r"module:2:.*missing"):
        driver(0).module('extern "C" __global__ void f(float* x) {\n  x[0] = missing;\n}')


def test_kernels_in_extern_blocks_and_with_bounds_are_found():
    source = """
    #define NAME(X) kernel_##X
    constexpr int most(int n) { return n * 32; }
    extern "C" {
    __global__ void __launch_bounds__(most(2), 1) first(int* x) { x[threadIdx.x] = 1; }
    __global__ void NAME(second)(int* x) { x[threadIdx.x] = 2; }
    }
    template <class T> __global__ void never(T* x) { *x = 0; }
    __global__ void mangled(int* x) { x[0] = 3; }
    """
    device = driver(0)
    x = np.zeros(2, np.int32)
    assert run(device, source, "first", (1, 1, 1), (2, 1, 1), [x])[0].tolist() == [1, 1]
    assert run(device, source, "kernel_second", (1, 1, 1), (2, 1, 1), [x])[0].tolist() == [2, 2]
    for name in ("never", "mangled", "absent"):
        with pytest.raises(KeyError, match=name):
            device.module(source).kernel(name)
    with pytest.raises(DeviceError, match=r"kernel first: a block of .* where 64 are the most"):
        run(device, source, "first", (1, 1, 1), (65, 1, 1), [x])


def test_what_nvrtc_does_not_know_the_emulator_does_not_know_either():
    for name in ("INFINITY", "NAN", "int64_t", "FLT_MAX", "printf_"):
        with pytest.raises(CompileError):
            driver(0).module(f'extern "C" __global__ void f(double* x) {{ x[0] = (double)sizeof({name}); }}')


def test_a_kernel_may_have_the_name_of_a_function_of_c(device):
    source = 'extern "C" __global__ void drand48_r(int* x) { x[threadIdx.x] = 7; }'
    (found,) = run(device, source, "drand48_r", (1, 1, 1), (4, 1, 1), [np.zeros(4, np.int32)])
    assert found.tolist() == [7] * 4
