"""Users' kernels in numba's CUDA simulator; `test_custom_kernels.py` runs this file in a process of its own.

Addresses are those of host memory, so that the emulator's memory is the device's.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import dynbatch as dy
from dynbatch.compiler.gradient import gradient
from dynbatch.compiler.ir import ROW, SHARED
from dynbatch.compiler.trace import Tracer
from dynbatch.cuda import custom
from dynbatch.cuda.custom import DeviceRows, configuration, launch
from dynbatch.ops.custom import Custom, CustomGradient
from dynbatch.types import type_of
from tests import cuda_emulator, custom_kernels
from tests.test_custom_op import Model, numbers

ROWS = 5
SHAPES = {"gate": [(3,), (3,)], "weigh": [(2, 3), (3,)]}


def op_of(which: str, **changes: object) -> Custom:
    kernels = custom_kernels.on_gpu(which) | changes
    del kernels["types"]
    return Custom(which, **kernels)


def draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, rows: int = ROWS) -> np.ndarray:
    return rng.normal(size=(rows, *shape[::-1])).astype(dtype)


class Memory:
    """Arrays on the device: at equal distances, and with space between rows."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.kept: list[np.ndarray] = []

    def put(self, array: np.ndarray, gap: int = 0) -> DeviceRows:
        rows, *storage = array.shape
        size = array[0].size
        whole = np.full((rows, size + gap), np.nan, self.dtype)
        whole[:, :size] = array.reshape(rows, size)
        self.kept.append(whole)
        return DeviceRows(whole.ctypes.data, (ROWS, *storage), self.dtype, 0 if rows == 1 else size + gap)

    def taken(self, which: int, shape: tuple[int, ...]) -> np.ndarray:
        size = np.prod(shape[1:], dtype=int)
        assert np.isnan(self.kept[which][:, size:]).all(), "written between the rows"
        return self.kept[which][:, :size].reshape(shape)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("gap", [0, 2])
@pytest.mark.parametrize("shared", [None, 0, 1])
@pytest.mark.parametrize("which", ["gate", "weigh"])
def test_launched_by_addresses(which: str, shared: int | None, gap: int, dtype: str) -> None:
    rng = np.random.default_rng(1)
    op = op_of(which)
    operands = [draw(rng, s, dtype, 1 if i == shared else ROWS) for i, s in enumerate(SHAPES[which])]
    out = np.zeros((ROWS, SHAPES[which][0][0]), dtype)
    dout = draw(rng, out.shape[1:], dtype)
    wanted = op.numpy(*operands, shape=out.shape[1:])
    wanted_grads = op.gradient.numpy(dout, wanted, *operands)
    memory = Memory(dtype)
    read = [memory.put(x, gap) for x in operands]
    grid, block = configuration(ROWS, op.threads)
    launch(0, 0, op.cuda_forward, grid, block, [*read, memory.put(out, gap)])
    tolerance = 1e-5 if dtype == "float32" else 1e-12
    np.testing.assert_allclose(memory.taken(2, out.shape), wanted, tolerance, tolerance)
    full = [(ROWS, *x.shape[1:]) for x in operands]
    given = [memory.put(x, gap) for x in (dout, wanted)]
    grads = [memory.put(np.zeros(s, dtype), gap) for s in full]
    launch(0, 0, op.gradient.cuda_backward, grid, block, [*given, *read, *grads])
    found = [memory.taken(5 + i, s).reshape(ROWS, -1) for i, s in enumerate(full)]
    np.testing.assert_allclose(np.concatenate(found, axis=1), wanted_grads, tolerance, tolerance)


def test_a_thread_or_a_block_for_each_row() -> None:
    assert configuration(1, None) == ((1, 1, 1), (128, 1, 1))
    assert configuration(128, None) == ((1, 1, 1), (128, 1, 1))
    assert configuration(129, None) == ((2, 1, 1), (128, 1, 1))
    assert configuration(129, 64) == ((129, 1, 1), (64, 1, 1))


def test_more_rows_than_threads_in_a_block() -> None:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(2, 130, 1))
    out = np.zeros((130, 1))
    arrays = [DeviceRows(a.ctypes.data, a.shape, "float64", 1) for a in (x, y, out)]
    launch(0, 0, custom_kernels.gate_cuda_forward, *configuration(130, None), arrays)
    np.testing.assert_allclose(out, custom_kernels.gate_reference(x, y), 1e-12)


# ---- lowering --------------------------------------------------------------------------------------------------------


class Place(SimpleNamespace):
    """Where an operand's rows lie, as a device's jobs say it."""

    @property
    def follows(self) -> bool:
        return self.offsets is None


class Routine:
    """As much of a device's routine and job as lowering asks for. The operands' rows lie out of order."""

    def __init__(self, program, dtype: str, arrays: dict[int, np.ndarray]) -> None:
        self.values = program.values
        self.kernels = SimpleNamespace(dtype=dtype)
        self.stride = [v.type.size + 1 for v in self.values]
        self.driver = cuda_emulator.driver(0)
        self.item = np.dtype(dtype).itemsize
        self.steps = []
        self.add = self.steps.append
        self.into = []
        self.gathered = 0
        self.arena = SimpleNamespace(itemsize=self.item, scratch=self.scratch)
        self.counts = {ROW: ROWS, SHARED: 1}
        self.places = {}
        self.arrays = arrays

    def size(self, v: int) -> int:
        return self.values[v].type.size

    def scratch(self, elements: int) -> int:
        return self.driver.allocate(elements * self.item) // self.item

    def rows(self, v: int):
        array = self.arrays[v]
        if array.shape[0] == 1:
            address = self.driver.allocate(array.nbytes)
            self.driver.upload(address, array)
            return lambda job: Place(base=np.uint64(address), offsets=None, place=np.int64(0), stride=np.int64(0))
        return lambda job: Place(offsets=v)

    def copy(self, rows: Place, count: int, width: int, place: int, stride: int) -> None:
        self.driver.upload(place * self.item, self.arrays[rows.offsets])

    def result(self, v: int, width: int) -> np.ndarray:
        found = np.empty((ROWS, self.stride[v]), self.kernels.dtype)
        self.driver.download(self.places[v] * self.item, found)
        return found[:, :width]


def run_lowered(program, dtype: str, arrays: dict[int, np.ndarray]) -> np.ndarray:
    (v,) = [i for i, x in enumerate(program.values) if isinstance(x.op, (Custom, CustomGradient))]
    routine = Routine(program, dtype, arrays)
    routine.places[v] = routine.scratch(ROWS * routine.stride[v])
    custom.lower(routine, v)
    for step in routine.steps:
        step(routine)
    for _, function, args in routine.into:
        function(*args)
    return routine.result(v, program.values[v].type.size)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("which", ["gate", "weigh"])
def test_lowered_for_a_device(which: str, dtype: str) -> None:
    """One operand is shared, the other has its rows anywhere; the result's rows have space between them."""
    rng = np.random.default_rng(1)
    op = op_of(which)
    t = Tracer(which, dtype)
    args = [t.new_arg(type_of(s, dtype)) for s in SHAPES[which]]
    program = t.signature((t.emit(op, *args, shape=SHAPES[which][0][:1]),)).program
    arrays = {i: draw(rng, s, dtype, ROWS if i else 1) for i, s in enumerate(SHAPES[which])}
    tolerance = 1e-5 if dtype == "float32" else 1e-12
    out = op.numpy(*arrays.values(), shape=SHAPES[which][0][:1])
    np.testing.assert_allclose(run_lowered(program, dtype, arrays), out, tolerance, tolerance)
    back = gradient(program, (True, True), (), (), ())
    dout = draw(rng, out.shape[1:], dtype)
    by_kind = {("arg", 0): arrays[0], ("arg", 1): arrays[1], ("fwd", 2): out, ("dout", 0): dout}
    given = {i: by_kind[v.kind, v.index] for i, v in enumerate(back.values) if v.op is None}
    wanted = op.gradient.numpy(dout, out, *arrays.values())
    np.testing.assert_allclose(run_lowered(back, dtype, given), wanted, tolerance, tolerance)


def test_kernels_that_are_not_there() -> None:
    t = Tracer("gate", "float64")
    args = [t.new_arg(type_of(3, "float64")) for _ in range(2)]
    program = t.signature((t.emit(op_of("gate", cuda_forward=None, cuda_backward=None), *args, shape=(3,)),)).program
    routine = SimpleNamespace(values=program.values)
    with pytest.raises(dy.CustomOpError, match=r"gate cannot run on a GPU: give custom_op\(\) a cuda_forward"):
        custom.lower(routine, 2)
    back = gradient(program, (True, True), (), (), ())
    (v,) = [i for i, x in enumerate(back.values) if isinstance(x.op, CustomGradient)]
    with pytest.raises(dy.CustomOpError, match=r"gate has no gradient on a GPU: give custom_op\(\) a cuda_backward"):
        custom.lower(SimpleNamespace(values=back.values), v)


@pytest.mark.skipif(not cuda_emulator.available(), reason="the emulator needs g++")
@pytest.mark.parametrize("strategy", ["off", "agenda"])
def test_a_model_on_the_emulator(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of `test_custom_op.py`; twice, so that a plan that is used again is captured."""
    monkeypatch.setenv("DYNBATCH_CUDA_DRIVER", "tests.cuda_emulator")
    found = []
    for device in ("cpu", "cuda"):
        dy.init(device=device, dtype="float64", seed=1, autobatch=strategy)
        ops = [dy.custom_op(which, **custom_kernels.on_gpu(which)) for which in ("gate", "weigh")]
        model = Model(*ops)
        found.append([numbers(model, static) for static in (False, True, True, True)])
        dy.init(device="cpu")
    for on_cpu, on_device in zip(*found):
        for wanted, value in zip(on_cpu, on_device):
            np.testing.assert_allclose(value, wanted, 1e-9, 1e-11)
