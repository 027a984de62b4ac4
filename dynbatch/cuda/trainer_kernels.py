"""The trainers' kernels on a device, by the names and with the arguments of `dynbatch.cpu.trainer_kernels`.

Arrays are `DeviceCopy`. What says which parts of them take part goes up in one copy; only the norm comes down.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from dynbatch.cuda import launches
from dynbatch.cuda.copies import DeviceCopy
from dynbatch.cuda.devices import driver
from dynbatch.cuda.memory import DeviceArena
from dynbatch.cuda.sources import Kernels


@functools.cache
def trainer_kernels(device: str, dtype: str) -> TrainerKernels:
    """Those of a device, by its name, in a precision."""
    return TrainerKernels(Kernels(driver(device), dtype))


class TrainerKernels:
    """See the module."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._driver = kernels.driver
        self._memory = DeviceArena(kernels)
        self._lock = threading.Lock()  # of the memory, which trainers of several threads use

    def sum_of_squares(self, parts: Sequence[tuple[DeviceCopy, np.ndarray, np.ndarray]]) -> float:
        """Of parts of arrays, in float64; one number comes down."""
        parts = [part for part in parts if part[1].size]
        if not parts:
            return 0.0
        shapes = [launches.parts(starts.size, int((stops - starts).max())) for _, starts, stops in parts]
        counts = [launch.grid[0] * launch.grid[1] for launch in shapes]
        with self._lock:
            doubles = 8 // self._memory.itemsize
            sums = self._memory.scratch((sum(counts) + 1) * doubles) * self._memory.itemsize
            at = sums
            for (g, starts, stops), launch, count in zip(parts, shapes, counts):
                self._launch("squared_norm", launch, np.uint64(at), np.uint64(g.address), *self._parts(starts, stops))
                at += 8 * count
            self._launch("add_norms", launches.parts(1, 1), np.uint64(at), np.int64(sum(counts)), np.uint64(sums))
            found = np.empty(1)
            self._driver.download(at, found)
            self._memory.release_scratch()
        return float(found[0])

    def scale(self, x: DeviceCopy, keep: Any) -> None:
        """``x *= keep``."""
        self._launch("scale", launches.elements(len(x)), np.uint64(x.target), np.int64(len(x)), keep)

    def __getattr__(self, rule: str) -> Any:
        if rule.startswith("_"):
            raise AttributeError(rule)
        return functools.partial(self._run, rule)

    def _run(self, rule: str, *args: Any) -> None:
        """One of the rules: arrays, which parts of them, and numbers."""
        arrays = [a for a in args if isinstance(a, DeviceCopy)]
        starts, stops, *numbers = args[len(arrays) :]
        if starts.size:
            launch = launches.parts(starts.size, int((stops - starts).max()))
            targets = [np.uint64(a.target) for a in arrays]
            with self._lock:
                self._launch(rule, launch, *targets, *self._parts(starts, stops), *numbers)

    def _parts(self, starts: np.ndarray, stops: np.ndarray) -> tuple[Any, ...]:
        uploads = self._memory.uploads
        uploads.reset()
        where = uploads.put(np.concatenate((starts, stops)))
        uploads.flush()
        return np.uint64(where), np.uint64(where + 8 * starts.size), np.int64(starts.size)

    def _launch(self, name: str, launch: launches.Launch, *args: Any) -> None:
        self._driver.launch(self._kernels.fixed(name), launch.grid, launch.block, 0, args)
