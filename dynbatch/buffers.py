"""Memory of parameters: aligned arrays, and the flat buffers that the dense parameters of a collection share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from dynbatch.config import config
from dynbatch.errors import OutOfMemoryError, ShapeError

if TYPE_CHECKING:
    from dynbatch.cuda.copies import DeviceCopy
    from dynbatch.cuda.driver import Driver
    from dynbatch.parameters import Parameter

ALIGNMENT = 64  # bytes: one cache line and one AVX-512 register; every parameter starts on a multiple


class FlatBuffers:
    """The flat buffers under one root.

    Attributes:
        device: where the parameters are used; on another one than the CPU they have copies, made when first needed.
        version: grows when a value changes.
        layout: grows when a parameter is added, frozen, thawed, or moved to another device.
    """

    def __init__(self) -> None:
        self.device = config.device
        self.dtype: np.dtype | None = None
        self.values = np.zeros(0, dtype=config.dtype)
        self.gradients: np.ndarray | None = None
        self.version = 0
        self.layout = 0
        self._reserved_values = self.values
        self._reserved_gradients: np.ndarray | None = None
        self._parameters: list[Parameter] = []
        self.values_copy: DeviceCopy | None = None
        self.gradients_copy: DeviceCopy | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For copies: without the room to grow, and what is on a device."""
        self.fetch()
        return self.__dict__ | {
            "_reserved_values": None, "_reserved_gradients": None, "values_copy": None, "gradients_copy": None,
        }  # fmt: skip

    def __setstate__(self, found: dict[str, Any]) -> None:
        self.__dict__.update(found)
        self._reserved_values = self.values = _aligned(self.values)
        if self.gradients is not None:
            self._reserved_gradients = self.gradients = _aligned(self.gradients)
        for each in self._parameters:
            if each.__dict__:  # else it is being copied too, and will look for itself then
                each.locate()

    def fix_dtype(self, dtype: np.dtype) -> None:
        """Say the dtype of all values under this root, when the first of them is made."""
        if self.dtype is None:
            self.dtype = dtype
            self.values = self._reserved_values = np.zeros(0, dtype=dtype)
        config.parameters_exist = True

    def fetch(self) -> None:
        """Bring the host's arrays up to date, which may be written to now."""
        for copy in (self.values_copy, self.gradients_copy):
            if copy is not None:
                copy.fetch()

    def leave(self) -> None:
        """Give up what is on a device, having fetched it."""
        self.fetch()
        self.values_copy = self.gradients_copy = None

    def changed(self) -> None:
        """Say that values were written on the host."""
        self.version += 1
        if self.values_copy is not None:
            self.values_copy.written()

    def values_on(self, driver: Driver) -> DeviceCopy:
        """The values on a device."""
        from dynbatch.cuda.copies import copy_for

        self.values_copy = copy_for(self.values_copy, driver, self.values)
        return self.values_copy

    def gradients_on(self, driver: Driver) -> DeviceCopy:
        """The gradients on a device."""
        from dynbatch.cuda.copies import copy_for

        self.gradients_copy = copy_for(self.gradients_copy, driver, self.allocated_gradients())
        return self.gradients_copy

    def append(self, parameter: Parameter, values: np.ndarray) -> None:
        """Give ``parameter`` the end of the buffer, and ``values``, of its shape, to start with."""
        self.leave()
        dtype = parameter.type.dtype
        self.fix_dtype(dtype)
        per_line = ALIGNMENT // dtype.itemsize
        used = len(self.values)
        size = used + -(-parameter.type.size // per_line) * per_line
        if size > len(self._reserved_values):
            # Doubled, so that adding n parameters copies O(n) values; pages never written take no memory.
            capacity = max(size, 2 * used)
            grown = aligned_zeros(capacity, dtype)
            grown_gradients = None if self.gradients is None else aligned_zeros(capacity, dtype)
            grown[:used] = self.values
            if grown_gradients is not None:
                grown_gradients[:used] = self.gradients
            self._reserved_values, self._reserved_gradients = grown, grown_gradients
            moved = [*self._parameters, parameter]
        else:
            moved = [parameter]
        parameter.offset = used
        self._parameters.append(parameter)
        self.values = self._reserved_values[:size]
        if self._reserved_gradients is not None:
            self.gradients = self._reserved_gradients[:size]
        self.layout += 1
        for each in moved:
            each.locate()
        parameter.data[...] = values.T

    def allocated_gradients(self) -> np.ndarray:
        """The gradient buffer, made when this is asked first."""
        if self.gradients is None:
            self._reserved_gradients = aligned_zeros(len(self._reserved_values), self.values.dtype)
            self.gradients = self._reserved_gradients[: len(self.values)]
            for each in self._parameters:
                each.locate()
        return self.gradients

    def clear_gradients(self, start: int, stop: int) -> None:
        """Set a part of the gradients to zero, where they were written last."""
        if self.gradients_copy is not None:
            self.gradients_copy.clear(start, stop)
        elif self.gradients is not None:
            self.gradients[start:stop] = 0

    def writable_gradients(self) -> np.ndarray:
        """The gradient buffer on the host, up to date and going to be written."""
        found = self.allocated_gradients()
        if self.gradients_copy is not None:
            self.gradients_copy.fetch()
            self.gradients_copy.written()
        return found


def aligned_zeros(size: int, dtype: np.dtype) -> np.ndarray:
    """``size`` zeros that start on a multiple of `ALIGNMENT`; takes memory only as it is written."""
    block = np.zeros(size * dtype.itemsize + ALIGNMENT, dtype=np.uint8)
    start = -block.ctypes.data % ALIGNMENT
    return block[start : start + size * dtype.itemsize].view(dtype)


def _aligned(values: np.ndarray) -> np.ndarray:
    result = aligned_zeros(values.size, values.dtype)
    result[...] = values
    return result


@contextmanager
def memory_for(name: str, shape: tuple[int, ...], dtype: np.dtype) -> Iterator[None]:
    """Turn a `MemoryError` inside into one that names the parameter and says how much it wanted."""
    try:
        yield
    except MemoryError as error:
        wanted = np.prod(shape, dtype=float) * dtype.itemsize / 2**30
        raise OutOfMemoryError(f"{name} of shape {shape} wants {wanted:.1f} GiB of memory: {error}") from None


def of_shape(name: str, array: Any, shape: tuple[int, ...]) -> np.ndarray:
    """``array`` as a NumPy array, after a check that it has ``shape``; ``name`` is for the error."""
    array = np.asarray(array)
    if array.shape != shape:
        raise ShapeError(f"{name} has the shape {shape}: an array of shape {array.shape} does not fit")
    return array
