"""Memory of one graph on a device: values, scratch space of a batch, and what goes up in one copy before a plan.

A location is an address in elements, so that any number of chunks lie in one space: kernels get null for their memory.
Chunks are kept between graphs. Scratch space is used again by the next batch, since batches run one after the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dynbatch.cpu.memory import Arena
from dynbatch.cuda import launches
from dynbatch.cuda.driver import Driver
from dynbatch.cuda.sources import Kernels

_ALIGN = 256  # bytes
_FIRST_CHUNK = 1 << 20  # bytes
_PART_ALIGN = 16  # bytes, of what goes up: the widest access


class _Region:
    """Chunks that are filled from the first to the last, and emptied from the end.

    Attributes:
        chunks: address and size of each.
        top: a chunk, the bytes of it that are in use, and how many zones there are.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._zones: list[tuple[int, int]] = []  # behind what was taken, where the driver watches them
        self.chunks: list[tuple[int, int]] = []
        self.top = (0, 0, 0)

    def take(self, nbytes: int) -> int:
        """Address of that many bytes."""
        zone = self._driver.red_zone
        size = -(-(nbytes + zone) // _ALIGN) * _ALIGN
        chunk, used, _ = self.top
        while chunk < len(self.chunks) and used + size > self.chunks[chunk][1]:
            chunk, used = chunk + 1, 0
        if chunk == len(self.chunks):
            grown = max(size, _FIRST_CHUNK, sum(s for _, s in self.chunks))
            self.chunks.append((self._driver.allocate(grown), grown))
        address = self.chunks[chunk][0] + used
        if Arena.poisoned and nbytes:
            self._driver.fill(address, 0xFF, nbytes)  # NaN
        if zone:
            self._zones.append((address + nbytes, size - nbytes))
            self._driver.poison(*self._zones[-1])
        self.top = chunk, used + size, len(self._zones)
        return address

    def reset(self, top: tuple[int, int, int] = (0, 0, 0)) -> None:
        """Give back what was taken since ``top``."""
        for zone in self._zones[top[2] :]:
            self._driver.unpoison(*zone)
        del self._zones[top[2] :]
        self.top = top

    def discard(self) -> None:
        """Nobody needs the chunks any more."""
        for address, _ in self.chunks:
            self._driver.discard(address)


class DeviceArena:
    """What `dynbatch.cpu.memory.Arena` is on the CPU; see the module.

    Attributes:
        kernels: of the device, in the precision of the values.
        uploads: what goes up before a plan.
        top: up to where values lie, for `reset`.
        peak: most bytes of values so far.
        is_remote: whether reading a value takes a transfer.
    """

    is_remote = True

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.driver = kernels.driver
        self.dtype = np.dtype(kernels.dtype)
        self.itemsize = self.dtype.itemsize
        self._values, self._scratch = _Region(self.driver), _Region(self.driver)
        self.uploads = Uploads(self.driver)
        self._one = 0
        self.peak = 0

    def __del__(self) -> None:
        for region in (self._values, self._scratch):
            region.discard()
        if self._one:
            self.driver.discard(self._one)

    @property
    def top(self) -> tuple[int, int, int]:
        """Up to where values lie, for `reset`."""
        return self._values.top

    @property
    def used(self) -> int:
        """Bytes of values."""
        chunk, used, _ = self._values.top
        return sum(size for _, size in self._values.chunks[:chunk]) + used

    @property
    def layout(self) -> Any:
        """Equal where the same requests give the same locations."""
        return tuple(address for address, _ in self._values.chunks)

    def allocate(self, elements: int) -> int:
        """Location of space for values, which lasts until `reset`."""
        found = self._values.take(elements * self.itemsize) // self.itemsize
        self.peak = max(self.peak, self.used)
        return found

    def scratch(self, elements: int) -> int:
        """Location of space that the batch which is prepared may use."""
        return self._scratch.take(elements * self.itemsize) // self.itemsize

    def release_scratch(self) -> None:
        """The next batch may use the scratch space."""
        self._scratch.reset()

    def reset(self, top: tuple[int, int, int] = (0, 0, 0)) -> None:
        """Give back all values above ``top``."""
        self._values.reset(top)
        self._scratch.reset()

    def one(self) -> int:
        """Location of a 1."""
        if not self._one:
            self._one = self.driver.allocate(self.itemsize)
            self.driver.upload(self._one, np.ones(1, self.dtype))
        return self._one // self.itemsize

    def read(self, locations: np.ndarray, storage: tuple[int, ...]) -> np.ndarray:
        """The values at these locations, each in storage order; brought together there, and copied down at once."""
        width = int(np.prod(storage))
        out = np.empty((locations.size, *storage), self.dtype)
        if locations.size == 1 or (np.diff(locations) == width).all():
            self.driver.download(int(locations[0]) * self.itemsize, out)
            return out
        self.uploads.reset()
        offsets = self.uploads.put(locations)
        self.uploads.flush()
        start = self.scratch(out.size)
        launch = launches.teams(locations.size, width, launches.vector(self.dtype.name))
        args = (
            np.uint64(0), np.int64(locations.size), np.int32(width), np.int64(start), np.int64(width), np.uint64(0),
            np.uint64(offsets), np.int64(0),
        )  # fmt: skip
        self.driver.launch(self.kernels.fixed("gather"), launch.grid, launch.block, 0, args)
        self.driver.download(start * self.itemsize, out)
        self.release_scratch()
        return out


class Uploads:
    """What a plan's kernels read besides values: it is brought together here, and goes up in one copy.

    Arguments:
        driver: of the device.
        room: bytes at first; it grows.
    """

    def __init__(self, driver: Driver, room: int = _FIRST_CHUNK) -> None:
        self._driver = driver
        self._room = room
        self._host = np.empty(0, np.uint8)
        self._address = 0
        self._used = self._sent = 0
        self._outgrown: list[int] = []  # read by kernels that were asked for already
        # values given by the user: in which buffer and from where on, and of which places and how many at each
        self._data: list[tuple[np.ndarray, int, int, np.ndarray, int]] = []

    def __del__(self) -> None:
        for address in (self._address, *self._outgrown):
            if address:
                self._driver.discard(address)

    def reset(self) -> None:
        """The last plan's part is over: its kernels have been asked for, and run before what comes up next."""
        for address in self._outgrown:
            self._driver.free(address)
        self._outgrown = []
        self._data = []
        self._used = self._sent = 0

    def put_data(self, data: np.ndarray, where: np.ndarray, width: int) -> int:
        """`put` of the values at some places, which `renew_data` may replace."""
        address = self.put(data[where[:, None] + np.arange(width)])
        self._data.append((self._host, self._address, address - self._address, where, width))
        return address

    def renew_data(self, data: np.ndarray) -> None:
        """Replace values given by the user by others at the same places; all goes up anew then."""
        for host, address, start, where, width in self._data:
            found = data[where[:, None] + np.arange(width)]
            if host is self._host:
                host[start : start + found.nbytes] = found.reshape(-1).view(np.uint8)
                self._sent = 0
            else:  # outgrown, and still read by a captured plan
                self._driver.upload(address + start, found)

    def put(self, array: np.ndarray) -> int:
        """The address that an array will have; it is copied now, and goes up with the next `flush`."""
        size = -(-max(array.nbytes, 1) // _PART_ALIGN) * _PART_ALIGN
        if self._used + size > self._host.size:
            self._grow(size)
        start = self._used
        self._used += size
        self._host[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return self._address + start

    def flush(self) -> None:
        """Copy up what was put since the last time."""
        if self._sent < self._used:
            self._driver.upload(self._address + self._sent, self._host[self._sent : self._used])
            self._sent = self._used

    def _grow(self, size: int) -> None:
        self.flush()
        if self._address:
            self._outgrown.append(self._address)
        self._host = np.empty(max(2 * self._host.size, size, self._room), np.uint8)
        self._address = self._driver.allocate(self._host.size)
        self._used = self._sent = 0
