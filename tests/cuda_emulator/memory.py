"""The emulator's memory: allocations with zones around them that nothing may touch, and what was poisoned within.

Kernels that AddressSanitizer checks end the process at the first access to a zone. Others may write there: that shows
when the zones are next looked at. What the driver itself copies or multiplies is checked before.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from dynbatch.errors import DeviceError, OutOfMemoryError
from tests.cuda_emulator import asan, build

ALIGNMENT = 256  # bytes; as many lie before and behind each allocation
_UNWRITTEN = 0xFF  # NaN in any type
POISON = 0xCD


def _alone(method: Callable[..., Any]) -> Callable[..., Any]:
    """One thread at a time."""

    @functools.wraps(method)
    def locked(self: Memory, *args: Any) -> Any:
        with self._lock:
            return method(self, *args)

    return locked


class Memory:
    """The memory of one device.

    Attributes:
        size: in bytes.
        used: bytes of all allocations.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        self._lock = threading.RLock()  # a driver may be asked by several threads
        self._shadow = asan.Shadow() if asan.ENABLED else None
        self._blocks: dict[int, np.ndarray] = {}  # by address; with the zones around
        self._sizes: dict[int, int] = {}
        self._sorted: list[int] = []
        self._poisoned: dict[int, int] = {}  # zones
        self._table: np.ndarray | None = None  # the same, as an array; None once it has changed

    def __del__(self) -> None:
        if self._shadow:  # NumPy hands the memory out again
            for address, nbytes in self._poisoned.items():
                self._shadow.unpoison(address, nbytes)

    @_alone
    def allocate(self, nbytes: int) -> int:
        """See `Driver.allocate`."""
        if nbytes > self.size - self.used:
            raise OutOfMemoryError(
                f"{nbytes} bytes wanted on the emulator; its pool holds {self.used} bytes of {self.size}"
            )
        padded = -nbytes % ALIGNMENT + nbytes
        block = np.empty(padded + 3 * ALIGNMENT, np.uint8)
        address = block.ctypes.data + ALIGNMENT
        address += -address % ALIGNMENT
        self._blocks[address], self._sizes[address] = block, nbytes
        bisect.insort(self._sorted, address)
        self.used += nbytes
        view(address, (nbytes,), np.uint8)[:] = _UNWRITTEN
        self.poison(address - ALIGNMENT, ALIGNMENT)
        self.poison(address + nbytes, padded - nbytes + ALIGNMENT)
        return address

    @_alone
    def free(self, address: int) -> None:
        """See `Driver.free`."""
        if address not in self._sizes:
            raise DeviceError(f"free of {address:#x}, which is no allocation")
        nbytes = self._sizes[address]
        end = -nbytes % ALIGNMENT + nbytes + ALIGNMENT
        for zone in [z for z in self._poisoned if address - ALIGNMENT <= z < address + end]:
            self.unpoison(zone, self._poisoned[zone])
        self._sorted.remove(address)
        self.used -= self._sizes.pop(address)
        del self._blocks[address]

    @_alone
    def poison(self, address: int, nbytes: int) -> None:
        """See `Driver.poison`."""
        view(address, (nbytes,), np.uint8)[:] = POISON
        self._poisoned[address] = nbytes
        self._table = None
        if self._shadow:
            self._shadow.poison(address, nbytes)

    @_alone
    def unpoison(self, address: int, nbytes: int) -> None:
        """See `Driver.unpoison`; zones are taken back as they were given."""
        if self._poisoned.get(address) != nbytes:
            raise DeviceError(f"unpoison of {nbytes} bytes at {address:#x}, which were not poisoned as they are")
        del self._poisoned[address]
        self._table = None
        if self._shadow:
            self._shadow.unpoison(address, nbytes)
        view(address, (nbytes,), np.uint8).fill(_UNWRITTEN)

    @_alone
    def damaged(self) -> int | None:
        """Address of a zone that something has written to, None if there is none; it is whole again then.

        AddressSanitizer would have ended the process.
        """
        zones = self._zones()
        if self._shadow or not len(zones):
            return None
        place = build.runtime().emulator_find_damage(zones.ctypes.data, len(zones), POISON)
        if place < 0:
            return None
        address, nbytes = map(int, zones[place])
        view(address, (nbytes,), np.uint8).fill(POISON)
        return address

    @_alone
    def check(self, what: str, address: int, nbytes: int) -> None:
        """Whether these bytes lie in one allocation and none of them is poisoned.

        Raises:
            DeviceError: they do not.
        """
        if nbytes == 0:
            return
        place = bisect.bisect_right(self._sorted, address) - 1
        start = self._sorted[place] if place >= 0 else 0
        if place < 0 or address + nbytes > start + self._sizes[start]:
            raise DeviceError(f"{what} of {nbytes} bytes at {address:#x}: illegal address, outside of all allocations")
        zones = self._zones()
        if ((address < zones.sum(1)) & (zones[:, 0] < address + nbytes)).any():
            raise DeviceError(f"{what} of {nbytes} bytes at {address:#x}: illegal address, in a poisoned zone")

    def _zones(self) -> np.ndarray:
        """(address, size) of what is poisoned."""
        if self._table is None:
            zones = self._poisoned.copy()  # collecting garbage may free memory, and take zones away, at any time
            self._table = np.array(list(zones.items()), np.int64).reshape(-1, 2)
        return self._table


def view(address: int, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...] | None = None) -> np.ndarray:
    """Memory as an array; strides are in bytes."""
    if 0 in shape:
        return np.empty(shape, dtype)
    item = np.dtype(dtype).itemsize
    extent = item + sum((n - 1) * s for n, s in zip(shape, strides)) if strides else item * math.prod(shape)
    buffer = (ctypes.c_char * extent).from_address(address)
    return np.ndarray(shape, dtype, buffer, strides=strides)
