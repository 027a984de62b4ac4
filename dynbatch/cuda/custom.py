"""Kernels that users bring, by numba.cuda: how a device routine runs them (`dynbatch.custom_op`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dynbatch.errors import CustomOpError, user_line
from dynbatch.ops.custom import Custom, CustomGradient

BLOCK = 128  # threads, where each has a row

Dims = tuple[int, int, int]


class DeviceRows(NamedTuple):
    """Rows in device memory as an array, which numba takes by the CUDA array interface.

    Attributes:
        address: of the first row.
        shape: rows, and the storage of each.
        dtype: of the elements.
        stride: elements from one row to the next; 0 where all rows are the same memory. Those of a row follow each
            other.
    """

    address: int
    shape: tuple[int, ...]
    dtype: str
    stride: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        dtype = np.dtype(self.dtype)
        sizes = (self.stride, *(math.prod(self.shape[axis:]) for axis in range(2, len(self.shape) + 1)))
        return {
            "shape": self.shape,
            "typestr": dtype.str,
            "data": (self.address, False),
            "strides": tuple(size * dtype.itemsize for size in sizes),
            "version": 3,
        }


def launch(device: int, stream: int, kernel: Any, grid: Dims, block: Dims, arrays: Sequence[DeviceRows]) -> None:
    """Launch a kernel of numba's, for `Driver.launch_with`.

    In numba's simulator, device and stream are of no meaning, and addresses are those of the host.

    Arguments:
        device: index of the GPU.
        stream: its handle.
        kernel: from ``numba.cuda.jit``.
        grid, block: blocks in the grid and threads in a block, by x, y and z.
        arrays: what it is called with.
    """
    from numba import cuda
    from numba.core import config

    if config.ENABLE_CUDASIM:  # type: ignore[attr-defined]
        kernel[grid, block](*[_simulated(rows) for rows in arrays])
        return
    with cuda.gpus[device]:
        on_device = [cuda.as_cuda_array(rows, sync=False) for rows in arrays]  # type: ignore[no-untyped-call]
        kernel[grid, block, cuda.external_stream(stream)](*on_device)


def _simulated(rows: DeviceRows) -> Any:
    """As the simulator has arrays on its device; of NumPy's it would make copies first."""
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

    class Host:
        __array_interface__ = rows.__cuda_array_interface__

    return FakeCUDAArray(np.asarray(Host()))  # type: ignore[no-untyped-call]


def configuration(rows: int, threads: int | None) -> tuple[Dims, Dims]:
    """Grid and block for so many rows; ``threads`` as `dynbatch.custom_op.custom_op` takes it."""
    if threads is None:
        return (-(-rows // BLOCK), 1, 1), (BLOCK, 1, 1)
    return (rows, 1, 1), (threads, 1, 1)


def lower(routine: Any, v: int) -> None:
    """Append to a `DeviceRoutine` what computes value ``v``, whose op is a `Custom` or a `CustomGradient`.

    Raises:
        CustomOpError: the op has no kernel for GPUs.
    """
    value = routine.values[v]
    kernel, written = _kernel(value.op), [v]
    if isinstance(value.op, CustomGradient):
        written = list(value.args[2:])  # gradients have the operands' types, and lie end to end in each row
    dtype, threads, name = routine.kernels.dtype, value.op.threads, value.op.name
    storages = [routine.values[a].type.storage for a in written]
    starts = [sum(math.prod(s) for s in storages[:i]) for i in range(len(storages))]
    finds = [_find(routine, a) for a in value.args]
    stride = routine.stride[v]

    def step(job: Any) -> None:
        count = job.counts[value.domain]
        if not count:
            return
        item = job.arena.itemsize
        arrays = [find(job, count) for find in finds]
        arrays += [
            DeviceRows((job.places[v] + start) * item, (count, *storage), dtype, stride)
            for start, storage in zip(starts, storages)
        ]
        grid, block = configuration(count, threads)
        job.into.append((name, job.driver.launch_with, (name, launch, kernel, grid, block, arrays)))

    routine.add(step)


def _kernel(op: Custom | CustomGradient) -> Any:
    if isinstance(op, Custom):
        if op.cuda_forward is None:
            raise CustomOpError(f"{user_line()}: {op.name} cannot run on a GPU: give custom_op() a cuda_forward")
        return op.cuda_forward
    if op.cuda_backward is None:
        raise CustomOpError(f"{user_line()}: {op.op_name} has no gradient on a GPU: give custom_op() a cuda_backward")
    return op.cuda_backward


def _find(routine: Any, a: int) -> Callable[[Any, int], DeviceRows]:
    """How to find an operand; rows at unequal distances are copied."""
    find, size, storage = routine.rows(a), routine.size(a), routine.values[a].type.storage
    dtype = routine.kernels.dtype

    def found(job: Any, count: int) -> DeviceRows:
        rows, item = find(job), job.arena.itemsize
        if rows.follows:
            return DeviceRows(int(rows.base) + int(rows.place) * item, (count, *storage), dtype, int(rows.stride))
        place = job.arena.scratch(count * size)
        job.copy(rows, count, size, place, size)
        job.gathered += count * size
        return DeviceRows(place * item, (count, *storage), dtype, size)

    return found
