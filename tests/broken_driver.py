"""The emulator with a fault, so that what looks for faults can be tested: ``BROKEN`` says which kernel, and how.

``wrong:lookup_rows`` leaves that kernel out. ``lost:rearrange`` makes every call fail from that kernel's launch on, as
a GPU does behind an illegal access.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from dynbatch.errors import DeviceError
from tests.cuda_emulator import Emulator, count

__all__ = ["BrokenDriver", "count", "driver"]


class BrokenDriver(Emulator):
    """See the module."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._how, _, self._kernel = os.environ["BROKEN"].partition(":")
        self._lost = False

    def launch(self, kernel: Any, grid: Any, block: Any, shared: int, args: Sequence[Any]) -> None:
        if kernel.name == self._kernel:
            self._lost = self._how == "lost"
            if self._how == "wrong":
                return
        self._fail()
        super().launch(kernel, grid, block, shared, args)

    def synchronize(self) -> None:
        self._fail()
        super().synchronize()

    def _fail(self) -> None:
        if self._lost:
            raise DeviceError("an illegal memory access was encountered")


def driver(index: int) -> BrokenDriver:
    """A driver of one of the devices."""
    return BrokenDriver(index)
