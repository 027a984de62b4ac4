"""Which backend runs the plans of a graph: that of the device in use."""

from __future__ import annotations

import functools
from typing import Any

from dynbatch.config import config


def backend() -> Any:
    """The backend of the device in use: `CpuBackend`, or a `CudaBackend`.

    Raises:
        DeviceError: the device cannot be used; it says why.
    """
    return _backend(config.device)


@functools.cache
def _backend(device: str) -> Any:
    if device == "cpu":
        from dynbatch.cpu.backend import CpuBackend

        return CpuBackend()
    from dynbatch.cuda.backend import CudaBackend

    return CudaBackend(device)
