"""Arrays of parameters that lie on a device as well as on the host; where they were written last is what counts."""

from __future__ import annotations

from typing import Any

import numpy as np

from dynbatch.cuda.driver import Driver


class DeviceCopy:
    """A host array's copy on a device.

    Arguments:
        driver: of the device.
        array: contiguous; what it holds is what there is at first.

    Attributes:
        dtype: of the array.
    """

    def __init__(self, driver: Driver, array: np.ndarray) -> None:
        self.driver = driver
        self.array = array
        self.dtype = array.dtype
        driver.free_discarded()
        self._address = driver.allocate(max(array.nbytes, 1))
        self._newer: str | None = "host"

    def __del__(self) -> None:
        address = self.__dict__.pop("_address", None)
        if address is not None:
            self.driver.discard(address)

    def __len__(self) -> int:
        return self.array.size

    @property
    def address(self) -> int:
        """Where the values are on the device, as they are now; for kernels that read them."""
        if self._newer == "host":
            self.driver.upload(self._address, self.array)
            self._newer = None
        return self._address

    @property
    def target(self) -> int:
        """The same for kernels that write them, too."""
        address = self.address
        self._newer = "device"
        return address

    def fetch(self) -> np.ndarray:
        """The host array, with the values as they are now."""
        if self._newer == "device":
            self.driver.download(self._address, self.array)
            self._newer = None
        return self.array

    def written(self) -> None:
        """The host array, as `fetch` has returned it, may have been written to."""
        if self._newer is None:
            self._newer = "host"

    def clear(self, start: int = 0, stop: int | None = None) -> None:
        """Set elements to zero, on the device; all of them, or some."""
        stop = len(self) if stop is None else stop
        item = self.dtype.itemsize
        address = self._address if stop - start == len(self) else self.target
        self.driver.fill(address + start * item, 0, (stop - start) * item)
        self._newer = "device"


def copy_for(copy: DeviceCopy | None, driver: Driver, array: np.ndarray) -> DeviceCopy:
    """This copy, if it is one of this array on this device, else a new one."""
    if copy is not None and copy.array is array and copy.driver is driver:
        return copy
    return DeviceCopy(driver, array)


def fetched(copy: DeviceCopy | None, array: Any) -> Any:
    """A host array, which may have a copy, with its values as they are now."""
    return array if copy is None else copy.fetch()
