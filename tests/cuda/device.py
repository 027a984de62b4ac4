"""A device for the kernels' own tests: arrays go up, a kernel runs, they come back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dynbatch.cuda.driver import Driver
from dynbatch.cuda.launches import Launch
from dynbatch.cuda.sources import Kernels
from tests import cuda_emulator

SEEDS = [0, 1, 2]
"""Orders in which the emulator runs the threads between two barriers."""

needs_compiler = pytest.mark.skipif(not cuda_emulator.available(), reason="the emulator needs g++")


class Device:
    """The emulator, with kernels of one precision.

    Attributes:
        real: the type of scalars.
    """

    def __init__(self, dtype: str, seed: int = 0) -> None:
        self.driver: Driver = cuda_emulator.driver(0)
        self.driver.seed = seed  # type: ignore[attr-defined]
        self.kernels = Kernels(self.driver, dtype)
        self.real = np.dtype(dtype).type

    def run(self, kernel: Any, launch: Launch, *args: Any) -> None:
        """Launch a kernel with arrays, which it may change, integers of 64 bits, and NumPy scalars; None is null.

        An array given twice is the same memory.
        """
        addresses: dict[int, tuple[np.ndarray, int]] = {}
        given: list[Any] = []
        for arg in args:
            if arg is None:
                given.append(np.uint64(0))
            elif isinstance(arg, np.ndarray):
                if id(arg) not in addresses:
                    addresses[id(arg)] = arg, self.driver.allocate(max(arg.nbytes, 1))
                    self.driver.upload(addresses[id(arg)][1], arg)
                given.append(np.uint64(addresses[id(arg)][1]))
            else:
                given.append(np.int64(arg) if type(arg) is int else arg)
        self.driver.launch(kernel, launch.grid, launch.block, 0, given)
        for array, address in addresses.values():
            self.driver.download(address, array)
            self.driver.free(address)

    def fixed(self, name: str, launch: Launch, *args: Any) -> None:
        """Launch one of `dynbatch.cuda.sources.FILES`."""
        self.run(self.kernels.fixed(name), launch, *args)
