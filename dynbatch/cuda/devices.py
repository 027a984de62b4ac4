"""Which devices there are, and the driver of each: CuPy's, or the module that ``DYNBATCH_CUDA_DRIVER`` names."""

from __future__ import annotations

import functools
import importlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynbatch.errors import ConfigurationError, DeviceError

if TYPE_CHECKING:
    from dynbatch.cuda.driver import Driver


@dataclass(frozen=True)
class Device:
    """A device that ``init(device=...)`` takes.

    Attributes:
        name: as it is given there, such as ``"cuda:0"``.
        product: what it is.
        memory: of its own, in bytes; 0 for the CPU.
    """

    name: str
    product: str
    memory: int


def devices() -> list[Device]:
    """The devices of this machine, the CPU first.

    GPUs are missing where they cannot be used; why not is what choosing one says.
    """
    found = [Device("cpu", "NumPy and numba", 0)]
    try:
        names = [f"cuda:{index}" for index in range(_module().count())]
    except DeviceError:
        return found
    for name in names:
        properties = driver(name).properties
        found.append(Device(name, properties.name, properties.memory))
    return found


def driver(name: str) -> Driver:
    """The driver of a CUDA device, the same one each time.

    Arguments:
        name: ``"cuda"``, which is ``"cuda:0"``, or another index.

    Raises:
        ConfigurationError: no name of a CUDA device, or ``DYNBATCH_CUDA_DRIVER`` names no driver.
        DeviceError: CuPy, the CUDA driver or the device is missing, or too old.
    """
    return _driver(int(full_name(name)[5:]))


def full_name(name: object) -> str:
    """The name of a CUDA device with its index; raises as `driver` does for what is none."""
    kind, _, index = str(name).partition(":")
    if not isinstance(name, str) or kind != "cuda" or not (index.isdecimal() or name == "cuda"):
        raise ConfigurationError(f'unknown device {name!r}: choose "cpu", "cuda" or "cuda:1"')
    return f"cuda:{int(index or 0)}"


@functools.cache
def _driver(index: int) -> Driver:
    opened: Driver = _module().driver(index)
    return opened


def _module() -> Any:
    """The module with ``count()`` and ``driver(index)``."""
    name = os.environ.get("DYNBATCH_CUDA_DRIVER") or "dynbatch.cuda.cupy_driver"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"DYNBATCH_CUDA_DRIVER={name!r} cannot be imported: {error}") from error
