"""One flat array for all values of a graph, in reserved address space that is committed as it is used.

Addresses never move while a graph lives, so that a value is named by one integer, its offset in elements, whatever
pool it lies in. The memory is kept between graphs: fresh pages cost their page faults each time.
"""

from __future__ import annotations

import math
import mmap
import sys
from pathlib import Path
from typing import Any

import numpy as np

from dynbatch.errors import OutOfMemoryError

_RESERVE = 1 << 36  # bytes of address space: 64 GiB
_CHECK_EVERY = 64 << 20  # bytes between two looks at how much memory is left
_ALIGN = 64  # bytes: a cache line, and the widest vector


def available_bytes() -> int | None:
    """Memory that can still be had without swapping: the system's, or the control group's if less; None if unknown."""
    found = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    except OSError:
        return None
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            found.append(int(limit) - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return min(found) if found else None


def _reserve(size: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(-1, min(size, 1 << 33))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    while True:
        try:
            return mmap.mmap(-1, size, flags=flags)
        except (OSError, ValueError):
            size //= 2
            if size < 1 << 28:
                raise OutOfMemoryError("could not reserve 256 MiB of address space for values") from None


class Arena:
    """A bump allocator over the reservation: values from the bottom, scratch space in the upper half.

    Attributes:
        mem: the flat array.
        address: of the first element.
        top: elements in use.
        poisoned: fill fresh space with NaN, so that reading what was never written shows; for tests.
        is_remote: whether reading a value takes a transfer.
    """

    poisoned = False
    is_remote = False

    def __init__(self, dtype: str) -> None:
        self._mapping = _reserve(_RESERVE)
        self.mem = np.frombuffer(self._mapping, dtype)
        self.itemsize = self.mem.itemsize
        self.address = self.mem.ctypes.data
        self._align = _ALIGN // self.itemsize
        self._half = self.mem.size // 2
        self.top = 0
        self._scratch = self._half
        self._checked = [0, self._half]  # up to where memory was found to be available
        self.peak = 0

    @property
    def used(self) -> int:
        """Bytes of values."""
        return self.top * self.itemsize

    def allocate(self, elements: int) -> int:
        """Offset of fresh space for values, which lasts until `reset`; its content is undefined."""
        start = self.top
        self.top = self._grow(0, start, elements, self._half)
        self.peak = max(self.peak, self.top)
        return start

    def scratch(self, elements: int) -> int:
        """Offset of space that lasts until `release_scratch`."""
        start = self._scratch
        self._scratch = self._grow(1, start, elements, self.mem.size)
        return start

    def release_scratch(self) -> None:
        """Give back all scratch space."""
        self._scratch = self._half

    def reset(self, top: int = 0) -> None:
        """Give back all values above ``top``."""
        self.top = top
        self._scratch = self._half

    @property
    def layout(self) -> Any:
        """Equal where the same requests give the same locations."""
        return None

    def one(self) -> int:
        """Offset of a 1, which lasts until `reset`."""
        start = self.allocate(1)
        self.mem[start] = 1
        return start

    def read(self, locations: np.ndarray, storage: tuple[int, ...]) -> np.ndarray:
        """Copies of the values at these offsets, each in storage order."""
        width = math.prod(storage)
        everywhere = (self.mem.size - width + 1, width)  # a value at every offset
        values = np.ndarray(everywhere, self.mem.dtype, self.mem, 0, (self.itemsize, self.itemsize))
        return values[locations].reshape(-1, *storage)

    def view(self, offset: int, shape: tuple[int, ...]) -> np.ndarray:
        """The values at an offset, C-ordered."""
        return np.ndarray(shape, self.mem.dtype, self.mem, offset * self.itemsize)

    def _grow(self, part: int, start: int, elements: int, limit: int) -> int:
        end = start + -(-elements // self._align) * self._align
        if end > self._checked[part]:
            self._check(part, end, elements, limit)
        if Arena.poisoned:
            self.mem[start:end] = np.nan
        return end

    def _check(self, part: int, end: int, elements: int, limit: int) -> None:
        step = _CHECK_EVERY // self.itemsize
        wanted = (end - self._checked[part]) * self.itemsize
        available = available_bytes()
        left = (limit - self._checked[part]) * self.itemsize
        if available is not None:
            left = min(left, available)
        if wanted > left:
            raise OutOfMemoryError(
                f"out of memory: {elements * self.itemsize / 2**20:.0f} MiB more were wanted for values, "
                f"{left / 2**20:.0f} MiB are available; this graph holds {self.top * self.itemsize / 2**20:.0f} MiB. "
                f"Use a smaller minibatch, or dy.no_grad() where no gradient is needed"
            )
        self._checked[part] = min(limit, max(end, self._checked[part] + step))
